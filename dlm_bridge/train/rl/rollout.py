"""Rollouts: completions by the family's own sampler, or by transformers' `generate`, with their rewards.

A rollout needs only a live Hub model (`UpdateEngine.sampling_model`). Ranks that hold one replica of the trained model
together each sample a part of its completions and exchange them, so that all train on the same. Ranks that share a
tensor parallel rollout model run the rows of all of them together, and each scores its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from dlm_bridge.errors import counted, rows_named
from dlm_bridge.generation.batch_size import plan_batch
from dlm_bridge.generation.offline import open_engine
from dlm_bridge.generation.request import MASK, Ended, Failed, Request
from dlm_bridge.objectives.noise import Purpose, keyed_generator
from dlm_bridge.objectives.registry import mask_token_id
from dlm_bridge.replicas import ALONE, Replicas
from dlm_bridge.train.rl.likelihood import NEVER_COMMITTED, Sequences
from dlm_bridge.train.rl.replica import no_room
from dlm_bridge.train.rl.reward_worker import RewardScores, RewardWorkers
from dlm_bridge.train.rl.rows import Problem


@dataclass(frozen=True)
class Rollout:
    """B completions; those of one prompt are neighbours."""

    samples: list[int]  # global indices, the keys of all noise
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
    batch_size: int | None = None  # sequences at once; None: as many as fit into free memory
    scaled: bool = False  # divide advantages by the group's standard deviation
    autoregressive: bool = False
    remedy: str = ""  # how to free memory, for the error if there is not enough
    ranks: Replicas = ALONE  # ranks that exchange their completions
    samplers: Replicas = ALONE  # ranks that share the rollout model

    def sample(self, model: Any, problems: Sequence[Problem], step: int, first: int) -> Rollout:
        """Complete each problem `group_size` times.

        Args:
            problems: the same on all ranks of a replica.
            first: global index of the first completion; with (seed, step) it keys the noise.

        Raises:
            RowError: a reward failed.
            NonFiniteError: the model's logits are NaN.
            ResourceError: a row does not fit into free memory.
        """
        repeated = [problem for problem in problems for _ in range(self.group_size)]
        samples = list(range(first, first + len(repeated)))
        begin, end = (len(repeated) * rank // self.ranks.processes for rank in (self.ranks.rank, self.ranks.rank + 1))
        own = self.complete(model, repeated[begin:end], samples[begin:end], step, self.temperature)
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
        """Complete each problem once, greedily. Returns the texts and their scores."""
        completed = self.complete(model, problems, list(range(len(problems))), 0, 0.0)
        return [one.text for one in completed], self._scores(completed, problems)

    def _scores(self, completed: Sequence[Completion], problems: Sequence[Problem]) -> RewardScores:
        if not problems:
            return RewardScores([], {function.name: [] for function in self.reward_workers.functions}, 0)
        return self.reward_workers(
            [problem.prompt for problem in problems], [one.text for one in completed], list(problems)
        )

    @torch.no_grad()
    def complete(
        self, model: Any, problems: Sequence[Problem], samples: Sequence[int], step: int, temperature: float
    ) -> list[Completion]:
        """Complete this process's problems (any number). Processes that share a model call it together."""
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
        """Context manager of sampling that yields the number of rows to run at once. Raises ResourceError if a row
        does not fit beside the weights, or if the device runs out of memory nevertheless."""
        new = "max_new_tokens" if self.autoregressive else "gen_length"
        plan = plan_batch(model, lengths, {new: self.gen_length, **self.sampler}, diffusion=not self.autoregressive)
        if plan.row > plan.free:
            raise no_room(plan.described, plan.row, plan.free, self.remedy)
        rows = min(self.batch_size or plan.rows, len(lengths))
        try:
            yield rows
        except torch.OutOfMemoryError as error:
            raise no_room(
                f"{counted(rows, 'row')} at once, of which {plan.described}",
                rows * plan.row,
                plan.free,
                f"sample fewer at once (`rollout_batch_size`); or {self.remedy}",
            ) from error

    def _seed(self, step: int, sample: int) -> int:
        return int(keyed_generator(self.seed, Purpose.ROLLOUT, step, sample).integers(2**63))

    def _sampled(
        self, model: Any, rows: Sequence[tuple[list[int], int]], temperature: float, size: int
    ) -> list[Completion]:
        """Complete (prompt, seed) rows, `size` of them at once."""
        settings = {"temperature": temperature, **self.sampler}
        length = max(len(prompt) for prompt, _ in rows) + self.gen_length
        found = [Completion(prompt) for prompt, _ in rows]
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
    """Context manager in which `generate` samples from the distribution of the loss: the checkpoint's chat settings
    (top_k, repetition_penalty, ...) and transformers' default top_k of 50 do not apply."""
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
class Completion:
    prompt: list[int]
    # [N]; N is gen_length for a diffusion model, with mask tokens where nothing was committed
    tokens: torch.Tensor = field(init=False)
    order: torch.Tensor = field(init=False)  # [N], the step that committed each token, also after the end
    length: int = 0  # tokens up to and including the end of the sequence
    text: str = ""

    def end(self, event: Ended, mask_token_id: int) -> None:
        """Store the sampled tokens. An autoregressive model commits one token per step."""
        tokens = torch.tensor(event.canvas or event.tokens)
        self.tokens = tokens.masked_fill(tokens == MASK, mask_token_id)
        steps = torch.tensor(event.steps) if event.canvas else torch.arange(1, len(tokens) + 1)
        self.order = torch.where(steps > 0, steps, NEVER_COMMITTED)
        self.length = len(event.tokens)


def group_advantages(rewards: torch.Tensor, group_size: int, scaled: bool) -> torch.Tensor:
    """Reward of each completion minus the mean of its group, [B] (GRPO, arXiv 2402.03300). `scaled` divides by the
    group's standard deviation, which gives prompts that are nearly always or nearly never solved more weight."""
    groups = rewards.reshape(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    # Exactly zero for equal rewards: Adam would turn rounding errors into full-sized steps.
    centred = centred.masked_fill(groups.amax(dim=1, keepdim=True) == groups.amin(dim=1, keepdim=True), 0.0)
    if scaled:
        centred = centred / (groups.std(dim=1, keepdim=True) + 1e-4)
    return centred.reshape(-1)


def _sequences(rows: Sequence[Completion]) -> Sequences:
    """Sequences of prompts and completions, padded on the right."""
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
