"""Rollouts: completions by the family's own sampler, with their rewards.

A rollout needs a live Hub model only, which the engine gives (`UpdateEngine.sampling_model`). Ranks that hold a
replica of the trained model together sample a part of its completions each and share them: all train on the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlm_bridge.generation.batching import ContinuousBatch, RowEnded, RowFailed, RowRequest
from dlm_bridge.objectives.noise import Purpose, keyed_generator
from dlm_bridge.train.rl.likelihood import NEVER_COMMITTED, Sequences
from dlm_bridge.train.rl.reward_worker import RewardScores, RewardWorkers
from dlm_bridge.train.rl.rows import Problem
from dlm_bridge.train.rl.update_engine import ReplicaRanks


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
    batch_size: int | None = None  # sequences at once; None: all
    scaled: bool = False  # advantages over the group's standard deviation
    ranks: ReplicaRanks = field(default_factory=ReplicaRanks)  # that share their completions

    def sample(self, model: Any, problems: Sequence[Problem], step: int, first: int) -> Rollout:
        """Complete each problem `group_size` times; `first` is the global index of the first completion, and with
        (seed, step) the key of its noise. Ranks of a replica give the same and get the same. Raises DlmBridgeError for
        rewards that fail."""
        repeated = [problem for problem in problems for _ in range(self.group_size)]
        samples = list(range(first, first + len(repeated)))
        begin, end = (len(repeated) * rank // self.ranks.size for rank in (self.ranks.rank, self.ranks.rank + 1))
        own = self._complete(model, repeated[begin:end], samples[begin:end], step, self.temperature)
        parts = self.ranks.gather((own, self._scores(own, repeated[begin:end])))
        completed = [one for rows, _ in parts for one in rows]
        scores = RewardScores.joined([found for _, found in parts])
        texts, rewards = [one.text for one in completed], torch.tensor(scores.rewards)
        return Rollout(
            samples=samples,
            sequences=_sequences(completed, self.gen_length),
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
        if not problems:
            return []
        settings = {"temperature": temperature, "return_dict_in_generate": False, **self.sampler}
        rows: list[_Completed] = []
        training = model.training
        model.eval()
        try:
            batch = ContinuousBatch(
                model,
                settings,
                max_rows=self.batch_size or len(problems),
                max_length=max(len(problem.input_ids) for problem in problems) + self.gen_length,
                stream=False,
                record=True,
            )
            for number, (problem, sample) in enumerate(zip(problems, samples, strict=True)):
                seed = int(keyed_generator(self.seed, Purpose.ROLLOUT, step, sample).integers(2**63))
                batch.submit(RowRequest(number, problem.input_ids, self.gen_length, seed))
                rows.append(_Completed(problem.input_ids))
            _run(batch, rows)
        finally:
            model.train(training)
        kept = [row.tokens[: row.length].tolist() for row in rows]
        for row, text in zip(rows, self.tokenizer.batch_decode(kept, skip_special_tokens=True), strict=True):
            row.text = text
        return rows


def _run(batch: ContinuousBatch, rows: Sequence[_Completed]) -> None:
    """Fill the rows, which are named by their number. Raises DlmBridgeError for one that fails."""
    try:
        while not batch.idle:
            for event in batch.advance():
                row = rows[event.name]
                if isinstance(event, RowFailed):
                    raise event.error
                if isinstance(event, RowEnded):
                    row.tokens, steps = torch.tensor(event.written), torch.tensor(event.steps)
                    row.order = torch.where(steps > 0, steps, NEVER_COMMITTED)
                    row.length = len(event.tokens)
    finally:
        batch.close()


@dataclass
class _Completed:
    prompt: list[int]
    tokens: torch.Tensor = field(init=False)  # [gen_length], mask tokens where nothing was committed
    order: torch.Tensor = field(init=False)  # [gen_length], the row's step that committed each, also behind its end
    length: int = 0  # up to the end of the sequence, that included
    text: str = ""


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
