"""Rollouts: completions by the family's own sampler, or by transformers' `generate`, with their rewards.

A rollout needs a live Hub model only, which the engine gives (`UpdateEngine.sampling_model`). Ranks that hold a
replica of the trained model together sample a part of its completions each and share them: all train on the same.
Ranks whose model to sample from is tensor parallel run the rows of all of them together, and each scores its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from dlm_bridge.distributed import ALONE, Replicas
from dlm_bridge.errors import rows_named
from dlm_bridge.generation.batch_size import plan_batch
from dlm_bridge.generation.offline import open_engine
from dlm_bridge.generation.request import MASK, Ended, Failed, Request
from dlm_bridge.objectives.noise import Purpose, keyed_generator
from dlm_bridge.objectives.registry import mask_token_id
from dlm_bridge.train.rl.likelihood import NEVER_COMMITTED, Sequences
from dlm_bridge.train.rl.replica import no_room
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
    """Samples completions and their rewards."""

    tokenizer: Any
    reward_workers: RewardWorkers
    seed: int
    group_size: int
    gen_length: int
    temperature: float
    sampler: dict[str, Any]  # further keyword arguments of generate
    batch_size: int | None = None  # sequences at once; None: as many as free memory holds
    scaled: bool = False  # advantages over the group's standard deviation
    autoregressive: bool = False
    remedy: str = ""  # how to make room, for the error where there is none
    ranks: Replicas = ALONE  # that share their completions
    samplers: Replicas = ALONE  # that have the model to sample from together

    def sample(self, model: Any, problems: Sequence[Problem], step: int, first: int) -> Rollout:
        """Complete each problem `group_size` times; `first` is the global index of the first completion, and with
        (seed, step) the key of its noise. Ranks of a replica give the same and get the same. Raises DlmBridgeError for
        rewards that fail, NonFiniteError where the model's logits are NaN."""
        repeated = [problem for problem in problems for _ in range(self.group_size)]
        samples = list(range(first, first + len(repeated)))
        begin, end = (len(repeated) * rank // self.ranks.processes for rank in (self.ranks.rank, self.ranks.rank + 1))
        own = self._complete(model, repeated[begin:end], samples[begin:end], step, self.temperature)
        parts = self.ranks.gather((own, self._scores(own, repeated[begin:end])))
        completed = [one for rows, _ in parts for one in rows]
        scores = RewardScores.joined([found for _, found in parts])
        texts, rewards = [one.text for one in completed], torch.tensor(scores.rewards)
        return Rollout(
            samples=samples,
            sequences=_sequences(completed),
            prompts=[problem.prompt for problem in repeated],
            completions=texts,
            scores=scores,
            rewards=rewards,
            advantages=group_advantages(rewards, self.group_size, self.scaled),
        )

    def answer(self, model: Any, problems: Sequence[Problem]) -> tuple[list[str], RewardScores]:
        """Complete each problem once, greedily."""
        completed = self._complete(model, problems, list(range(len(problems))), 0, 0.0)
        return [one.text for one in completed], self._scores(completed, problems)

    def _scores(self, completed: Sequence[_Completed], problems: Sequence[Problem]) -> RewardScores:
        if not problems:
            return RewardScores([], {function.name: [] for function in self.reward_workers.functions}, 0)
        return self.reward_workers(
            [problem.prompt for problem in problems], [one.text for one in completed], list(problems)
        )

    @torch.no_grad()
    def _complete(
        self, model: Any, problems: Sequence[Problem], samples: Sequence[int], step: int, temperature: float
    ) -> list[_Completed]:
        """Of this process's problems, any number; processes with one model call it together."""
        own = [(problem.input_ids, sample) for problem, sample in zip(problems, samples, strict=True)]
        shares = self.samplers.gather(own)
        numbers = [sample for share in shares for _, sample in share]
        rows = [(prompt, self._seed(step, sample)) for share in shares for prompt, sample in share]
        if not rows:
            return []
        training = model.training
        model.eval()
        try:
            named = rows_named(lambda row: f"step {step}, completion {numbers[row]}")
            with self._room(model, [len(prompt) for prompt, _ in rows]) as size, named:
                completed = self._sampled(model, rows, temperature, size)
        finally:
            model.train(training)
        first = sum(map(len, shares[: self.samplers.rank]))
        completed = completed[first : first + len(own)]
        kept = [row.tokens[: row.length].tolist() for row in completed]
        for row, text in zip(completed, self.tokenizer.batch_decode(kept, skip_special_tokens=True), strict=True):
            row.text = text
        return completed

    @contextlib.contextmanager
    def _room(self, model: Any, lengths: list[int]) -> Iterator[int]:
        """Context of sampling: how many rows run at once. Raises DlmBridgeError where a row does not fit beside the
        weights, and where the device runs out of memory all the same."""
        new = "max_new_tokens" if self.autoregressive else "gen_length"
        plan = plan_batch(model, lengths, {new: self.gen_length, **self.sampler}, diffusion=not self.autoregressive)
        if plan.row > plan.free:
            raise no_room(plan.described, plan.row, plan.free, self.remedy)
        rows = min(self.batch_size or plan.rows, len(lengths))
        try:
            yield rows
        except torch.OutOfMemoryError as error:
            raise no_room(
                f"{rows} rows at once, of which {plan.described}",
                rows * plan.row,
                plan.free,
                f"sample fewer at once (--rollout-batch-size); or {self.remedy}",
            ) from error

    def _seed(self, step: int, sample: int) -> int:
        return int(keyed_generator(self.seed, Purpose.ROLLOUT, step, sample).integers(2**63))

    def _sampled(
        self, model: Any, rows: Sequence[tuple[list[int], int]], temperature: float, size: int
    ) -> list[_Completed]:
        """Complete (prompt, seed) rows, `size` at once."""
        settings = {"temperature": temperature, **self.sampler}
        length = max(len(prompt) for prompt, _ in rows) + self.gen_length
        found = [_Completed(prompt) for prompt, _ in rows]
        with _only_ends(model) if self.autoregressive else contextlib.nullcontext():
            engine = open_engine(model, self.tokenizer, settings, max_rows=size, max_length=length, record=True)
            for number, (prompt, seed) in enumerate(rows):
                engine.submit(Request(number, prompt, self.gen_length, seed, stream=False))
            try:
                while not engine.idle:
                    for event in engine.step():
                        if isinstance(event, Failed):
                            raise event.error
                        if isinstance(event, Ended):
                            found[event.name].end(event, self._mask_token_id(model))
            finally:
                engine.close()
        return found

    def _mask_token_id(self, model: Any) -> int:
        return 0 if self.autoregressive else mask_token_id(model) or 0


@contextlib.contextmanager
def _only_ends(model: Any) -> Iterator[None]:
    """In which `generate` draws from the distribution that the loss is of. Left out are settings for chats that a
    checkpoint's generation_config.json has (top_k, repetition_penalty, ...), and transformers' own top_k of 50."""
    stored = model.generation_config
    ends = {
        name: getattr(stored, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "stop_strings")
    }
    model.generation_config = GenerationConfig(**ends, do_sample=True, top_k=0)
    try:
        yield
    finally:
        model.generation_config = stored


@dataclass
class _Completed:
    prompt: list[int]
    # [N], of a diffusion model gen_length, mask tokens where nothing was committed
    tokens: torch.Tensor = field(init=False)
    order: torch.Tensor = field(init=False)  # [N], the row's step that committed each, also behind its end
    length: int = 0  # up to the end of the sequence, that included
    text: str = ""

    def end(self, event: Ended, mask_token_id: int) -> None:
        """Set what was sampled. An autoregressive model commits a token in each step."""
        tokens = torch.tensor(event.canvas or event.tokens)
        self.tokens = tokens.masked_fill(tokens == MASK, mask_token_id)
        steps = torch.tensor(event.steps) if event.canvas else torch.arange(1, len(tokens) + 1)
        self.order = torch.where(steps > 0, steps, NEVER_COMMITTED)
        self.length = len(event.tokens)


def group_advantages(rewards: torch.Tensor, group_size: int, scaled: bool) -> torch.Tensor:
    """[B] how much better than the mean of its group each completion is (GRPO, arXiv 2402.03300); with `scaled` over
    the group's standard deviation, which weighs prompts that are nearly always or nearly never answered more."""
    groups = rewards.reshape(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    # Of equal rewards exactly zero: what rounding leaves, Adam would make a step of full size of.
    centred = centred.masked_fill(groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True), 0.0)
    if scaled:
        centred = centred / (groups.std(dim=1, keepdim=True) + 1e-4)
    return centred.reshape(-1)


def _sequences(rows: Sequence[_Completed]) -> Sequences:
    """Prompts, completions and padding on the right, all moved together."""
    width = max(len(row.prompt) + len(row.tokens) for row in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    order = torch.full_like(tokens, NEVER_COMMITTED)
    prompt, completion, scored = (torch.zeros_like(tokens, dtype=torch.bool) for _ in range(3))
    for number, row in enumerate(rows):
        begin, end = len(row.prompt), len(row.prompt) + len(row.tokens)
        tokens[number, :begin] = torch.tensor(row.prompt)
        tokens[number, begin:end] = row.tokens
        order[number, begin:end] = row.order
        prompt[number, :begin] = True
        completion[number, begin:end] = True
        scored[number, begin : begin + row.length] = True
    return Sequences(tokens, prompt, completion, scored, order)
