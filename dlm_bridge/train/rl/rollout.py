"""Rollouts: completions by the family's own sampler, with their rewards.

A rollout needs a live Hub model only. An engine that shards the model updates it with `Bridge.refresh_hf_model` or
`Bridge.stream_hf_weights` before the next rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.generation.batching import ContinuousBatch, RowCommits, RowEnded, RowFailed, RowRequest
from dlm_bridge.generation.texts import mask_token
from dlm_bridge.objectives.noise import Purpose, keyed_generator
from dlm_bridge.train.rl.likelihood import NEVER_COMMITTED, Sequences
from dlm_bridge.train.rl.reward_worker import RewardScores, RewardWorkers
from dlm_bridge.train.rl.rows import Problem


@dataclass(frozen=True)
class Rollout:
    """B completions, those of one prompt beside each other."""

    samples: list[int]  # global indices, which key all noise
    sequences: Sequences  # on the CPU
    prompts: list[Any]  # as in the rows
    completions: list[str]
    scores: RewardScores
    rewards: torch.Tensor  # [B] fp32
    advantages: torch.Tensor  # [B] fp32

    def __len__(self) -> int:
        return len(self.samples)


@dataclass
class Rollouts:
    """Samples and reward_workers completions of one model."""

    model: Any
    tokenizer: Any
    reward_workers: RewardWorkers
    seed: int
    group_size: int
    gen_length: int
    temperature: float
    sampler: dict[str, Any]  # further keyword arguments of generate
    batch_size: int | None = None  # sequences at once; None: all
    scaled: bool = False  # advantages over the group's standard deviation

    def sample(self, problems: Sequence[Problem], step: int, first: int) -> Rollout:
        """Complete each problem `group_size` times; `first` is the global index of the first completion, and with
        (seed, step) the key of its noise. Raises DlmBridgeError for rewards that fail."""
        repeated = [problem for problem in problems for _ in range(self.group_size)]
        samples = list(range(first, first + len(repeated)))
        sequences, texts = self._complete(repeated, samples, step, self.temperature)
        scores = self.reward_workers([problem.prompt for problem in repeated], texts, repeated)
        rewards = torch.tensor(scores.rewards)
        return Rollout(
            samples=samples,
            sequences=sequences,
            prompts=[problem.prompt for problem in repeated],
            completions=texts,
            scores=scores,
            rewards=rewards,
            advantages=group_advantages(rewards, self.group_size, self.scaled),
        )

    def answer(self, problems: Sequence[Problem]) -> tuple[list[str], RewardScores]:
        """Complete each problem once, greedily."""
        if not problems:
            return [], RewardScores([], {function.name: [] for function in self.reward_workers.functions}, 0)
        _, texts = self._complete(problems, list(range(len(problems))), 0, 0.0)
        return texts, self.reward_workers([problem.prompt for problem in problems], texts, problems)

    @torch.no_grad()
    def _complete(
        self, problems: Sequence[Problem], samples: Sequence[int], step: int, temperature: float
    ) -> tuple[Sequences, list[str]]:
        settings = {"temperature": temperature, "return_dict_in_generate": False, **self.sampler}
        rows: list[_Completed] = []
        training = self.model.training
        self.model.eval()
        try:
            batch = ContinuousBatch(
                self.model,
                settings,
                max_rows=self.batch_size or len(problems),
                max_length=max(len(problem.input_ids) for problem in problems) + self.gen_length,
            )
            mask = mask_token(self.model, settings)
            for number, (problem, sample) in enumerate(zip(problems, samples, strict=True)):
                seed = int(keyed_generator(self.seed, Purpose.ROLLOUT, step, sample).integers(2**63))
                batch.submit(RowRequest(number, problem.input_ids, self.gen_length, seed))
                tokens = torch.full((self.gen_length,), -1 if mask is None else mask)
                rows.append(_Completed(problem.input_ids, tokens, torch.full_like(tokens, NEVER_COMMITTED)))
            _run(batch, rows)
        finally:
            self.model.train(training)
        kept = [row.tokens[: row.length].tolist() for row in rows]
        return _sequences(rows, self.gen_length), self.tokenizer.batch_decode(kept, skip_special_tokens=True)


def _run(batch: ContinuousBatch, rows: Sequence[_Completed]) -> None:
    """Fill the rows, which are named by their number. Raises DlmBridgeError for one that fails."""
    try:
        while not batch.idle:
            for event in batch.advance():
                row = rows[event.name]
                if isinstance(event, RowFailed):
                    raise event.error
                if isinstance(event, RowCommits):
                    places = list(event.places)
                    row.tokens[places] = torch.tensor(event.tokens)
                    row.order[places] = event.step
                if isinstance(event, RowEnded):
                    row.length = len(event.tokens)
    finally:
        batch.close()


@dataclass
class _Completed:
    prompt: list[int]
    tokens: torch.Tensor  # [gen_length], mask tokens where nothing was committed
    order: torch.Tensor  # [gen_length], the row's step that committed each, also behind its end
    length: int = 0  # up to the end of the sequence, that included


def group_advantages(rewards: torch.Tensor, group_size: int, scaled: bool) -> torch.Tensor:
    """[B] how much better than the mean of its group each completion is (GRPO, arXiv 2402.03300); with `scaled` over
    the group's standard deviation, which weighs prompts that are nearly always or nearly never answered more."""
    groups = rewards.reshape(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    if scaled:
        centred = centred / (groups.std(dim=1, keepdim=True) + 1e-4)
    return centred.reshape(-1)


def _sequences(rows: Sequence[_Completed], gen_length: int) -> Sequences:
    """Prompts, completions and padding on the right, all moved together."""
    width = max(len(row.prompt) for row in rows) + gen_length
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    order = torch.full_like(tokens, NEVER_COMMITTED)
    prompt, completion, scored = (torch.zeros_like(tokens, dtype=torch.bool) for _ in range(3))
    for number, row in enumerate(rows):
        begin, end = len(row.prompt), len(row.prompt) + gen_length
        tokens[number, :begin] = torch.tensor(row.prompt)
        tokens[number, begin:end] = row.tokens
        order[number, begin:end] = row.order
        prompt[number, :begin] = True
        completion[number, begin:end] = True
        scored[number, begin : begin + row.length] = True
    return Sequences(tokens, prompt, completion, scored, order)
