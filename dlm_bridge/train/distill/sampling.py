"""Texts of on-policy distillation: completions of prompts by the model in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dlm_bridge.data.blocks import LabelledTokens
from dlm_bridge.generation.samplers import SpecialTokens
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.objectives.trajectory import NOT_RECORDED
from dlm_bridge.train.distill.config import DistillConfig
from dlm_bridge.train.rl.likelihood import NEVER_COMMITTED
from dlm_bridge.train.rl.reward_worker import RewardWorkers
from dlm_bridge.train.rl.rollout import Completion, Rollouts
from dlm_bridge.train.rl.rows import Problem, Shuffled


class SampledRows:
    """Rows of prompts with sampled completions, a `Samples`. `sample` draws those of a step, which depend only on the
    weights, the seed, the step and the sample index; `rows` returns them."""

    def __init__(self, config: DistillConfig, model: Any, problems: list[Problem], tokenizer: Any) -> None:
        """Raises SettingError if the model's sampler lacks a setting of `generation`."""
        options, seed = config.distill, config.data.seed
        keywords = {"gen_length": options.gen_length, "temperature": options.temperature, **options.sampler}
        settings = resolve_settings(model, None, keywords, prompt_width=1)
        settings.sampler.spec(SpecialTokens.of(settings))
        self.temperature, self.seq_length = options.temperature, config.data.seq_length
        self.problems = Shuffled(problems, seed)
        self.rollouts = Rollouts(
            tokenizer=tokenizer,
            reward_workers=RewardWorkers([]),
            seed=seed,
            group_size=1,
            gen_length=options.gen_length,
            temperature=options.temperature,
            sampler=options.sampler,
            batch_size=options.rollout_batch_size,
            remedy="lower `gen_length`",
        )
        self._drawn: dict[int, Completion] = {}

    def __len__(self) -> int:
        return len(self.problems.items)

    def sample(self, model: Any, step: int, samples: Sequence[int]) -> None:
        """Complete the prompts of these samples with the current weights."""
        problems = [self.problems[sample] for sample in samples]
        with torch.compiler.set_stance("force_eager"):  # compiled layers would be recompiled for each length
            drawn = self.rollouts.complete(model, problems, samples, step, self.temperature)
        self._drawn = dict(zip(samples, drawn, strict=True))

    def rows(self, samples: Sequence[int]) -> LabelledTokens:
        """The completions up to the end of the text, or to the first token that the sampler did not commit."""
        shape = (len(samples), self.seq_length)
        tokens, real = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
        labels, steps = torch.full(shape, IGNORE_INDEX), torch.full(shape, NOT_RECORDED)
        for row, sample in enumerate(samples):
            drawn = self._drawn[sample]
            begin = len(drawn.prompt)
            length = int((drawn.order[: drawn.length] != NEVER_COMMITTED).cumprod(dim=0).sum())
            answer = slice(begin, begin + length)
            tokens[row, :begin] = torch.tensor(drawn.prompt)
            tokens[row, answer] = labels[row, answer] = drawn.tokens[:length]
            steps[row, answer] = drawn.order[:length]
            real[row, : answer.stop] = True
        return LabelledTokens(tokens, labels, real, commit_steps=steps)
