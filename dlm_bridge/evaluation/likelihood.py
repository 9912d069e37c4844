"""Monte-Carlo likelihood bounds of diffusion models, by the family's own training objective.

The evidence lower bound of an answer of L tokens masks l ~ U{1..L} of them, uniformly over subsets of a size, never the
prompt, and weights the masked tokens' log-probabilities by L / l (LLaDA, arXiv 2502.09992, equation 6: exact in
expectation, with less variance than masking each token independently). Where a family denoises block by block with the
clean blocks before in view, the answer's tokens of each block are such an answer of their own (BD3-LM, arXiv
2503.09573), and one pass computes all blocks. The family's training objective decides the attention mask and which
logits predict which token.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.attention_mask import MaskDescriptor
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.noise import Purpose, Uniforms, keyed_generator
from dlm_bridge.objectives.registry import family_objective
from dlm_bridge.objectives.single_stream import MaskedDiffusion, ShiftedDiffusion
from dlm_bridge.objectives.two_streams import TwoStreamObjective, WeDLMDiffusion


@dataclass(frozen=True)
class Answer:
    """Token ids; what is bounded is the answer given the prompt."""

    prompt: tuple[int, ...]  # at least one
    answer: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class LikelihoodBound:
    """In nats: the mean over the samples, which in expectation is at most the log-likelihood, and its standard error
    (0 with one sample, which tells nothing)."""

    value: float
    error: float


@dataclass(frozen=True)
class BoundEstimator:
    """How a family's answers are masked and read."""

    objective: Objective
    block: int | None  # tokens that are denoised together; None: the whole answer

    @property
    def described(self) -> str:
        blocks = "" if self.block is None else f", in each block of {self.block}"
        return f"{type(self.objective).__name__}: l ~ U(1, L) of the answer's L tokens masked, weight L / l{blocks}"


def estimator(model: Any) -> BoundEstimator:
    """That of a diffusion model's family. Raises DlmBridgeError where its config lacks what it needs."""
    chosen = family_objective(model)
    if isinstance(chosen, TwoStreamObjective):
        return BoundEstimator(chosen, chosen.block_size)
    kind: type[Objective] = ShiftedDiffusion if chosen.shift else MaskedDiffusion
    return BoundEstimator(kind(mask_token_id=chosen.mask_token_id), None)


@torch.no_grad()
def likelihood_bounds(
    model: Any, answers: Sequence[Answer], samples: int, seed: int = 0, batch_size: int = 8
) -> list[LikelihoodBound]:
    """Each answer's bound from `samples` passes, `batch_size` rows at a time.

    The samples of an answer are spread evenly over all numbers of masks. Noise is keyed by (seed, sample, prompt):
    neither order nor batch changes it, and answers to one prompt are compared under the same noise.
    """
    read = estimator(model)
    values = np.zeros((len(answers), samples))
    order = sorted(range(len(answers)), key=lambda number: -answers[number].length)
    turns = [(number, sample) for number in order for sample in range(samples) if answers[number].answer]
    for start in range(0, len(turns), batch_size):
        part = turns[start : start + batch_size]
        rows = [answers[number] for number, _ in part]
        draws = [_sample_mask(read, answers[number], seed, sample, samples) for number, sample in part]
        for (number, sample), value in zip(part, _sample_bounds(model, read, rows, draws), strict=True):
            values[number, sample] = value
    errors = values.std(axis=1, ddof=1) / math.sqrt(samples) if samples > 1 else np.zeros(len(answers))
    return [
        LikelihoodBound(float(value), float(error)) for value, error in zip(values.mean(axis=1), errors, strict=True)
    ]


@torch.no_grad()
def is_greedy(model: Any, answer: Answer) -> bool:
    """Whether a sampler that settles the surest token of the first unfinished block, one a pass, writes the answer."""
    read = estimator(model)
    blocks = _block_ids(read, answer)
    left = np.ones(len(answer.answer), dtype=bool)
    while left.any():
        reading = _bound_batch(
            read, [answer], [MaskSample(left, np.ones(len(left)))]
        )  # blocks behind are masked, and not asked
        logits_MV = _logits(model, reading).float()
        logits_MV[:, read.objective.mask_token_id] = -torch.inf
        surest, tokens = (values.cpu() for values in logits_MV.log_softmax(-1).max(dim=-1))
        places = reading.columns - len(answer.prompt)
        later = torch.from_numpy(blocks)[places] != int(blocks[left].min())
        chosen = int(surest.masked_fill(later, -torch.inf).argmax())
        if int(tokens[chosen]) != answer.answer[int(places[chosen])]:
            return False
        left[int(places[chosen])] = False
    return True


@dataclass(frozen=True)
class MaskSample:
    """Of an answer's tokens: which are masked, and what each weighs then."""

    masked: np.ndarray[Any, Any]  # [L] bool
    weights: np.ndarray[Any, Any]  # [L] float64


def _sample_mask(read: BoundEstimator, answer: Answer, seed: int, sample: int, samples: int) -> MaskSample:
    count = len(answer.answer)
    groups = _block_ids(read, answer)
    key = zlib.crc32(np.asarray(answer.prompt, dtype=np.int64).tobytes())
    generator = keyed_generator(seed, Purpose.LIKELIHOOD, sample, key)
    share = (sample + generator.random(int(groups[-1]) + 1)) / samples % 1  # of each group that is masked
    numbers = generator.random(count)
    sizes = np.bincount(groups)
    wanted = 1 + np.minimum((share * sizes).astype(np.int64), sizes - 1)
    order = np.lexsort((numbers, groups))
    rank = np.empty(count, dtype=np.int64)
    rank[order] = np.arange(count) - np.concatenate([[0], np.cumsum(sizes)])[groups[order]]
    return MaskSample(rank < wanted[groups], (sizes / wanted)[groups])


def _block_ids(read: BoundEstimator, answer: Answer) -> np.ndarray[Any, Any]:
    """[L] the number of each token's group, from 0."""
    if read.block is None:
        return np.zeros(len(answer.answer), dtype=np.int64)
    places = np.arange(len(answer.prompt), answer.length)
    return places // read.block - places[0] // read.block


@dataclass(frozen=True)
class BoundBatch:
    """What the model reads of B rows, and which of their tokens the M logits are about."""

    noisy: NoisyBatch  # its mask [B, S] says which positions' logits
    rows: torch.Tensor  # [M] int64
    columns: torch.Tensor  # [M] int64
    targets: torch.Tensor  # [M] int64
    weights: torch.Tensor  # [M] float64


def _sample_bounds(
    model: Any, read: BoundEstimator, rows: Sequence[Answer], draws: Sequence[MaskSample]
) -> list[float]:
    """One sample of each row's bound."""
    reading = _bound_batch(read, rows, draws)
    logits_MV = _logits(model, reading)
    losses_M = F.cross_entropy(logits_MV.float(), reading.targets.to(logits_MV.device), reduction="none")
    weighted_M = losses_M.double().cpu() * reading.weights
    return torch.zeros(len(rows), dtype=torch.float64).index_add(0, reading.rows, -weighted_M).tolist()


def _bound_batch(read: BoundEstimator, rows: Sequence[Answer], draws: Sequence[MaskSample]) -> BoundBatch:
    objective = read.objective
    length = max(row.length for row in rows)
    tokens, labels = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), IGNORE_INDEX)
    real = torch.zeros(len(rows), length, dtype=torch.bool)
    masked = torch.zeros(len(rows), length, dtype=torch.bool)
    weights = torch.zeros(len(rows), length, dtype=torch.float64)
    for number, (row, draw) in enumerate(zip(rows, draws, strict=True)):
        answer = slice(len(row.prompt), row.length)
        tokens[number, : row.length] = torch.tensor([*row.prompt, *row.answer])
        labels[number, answer] = tokens[number, answer]
        real[number, : row.length] = True
        masked[number, answer] = torch.from_numpy(draw.masked)
        weights[number, answer] = torch.from_numpy(draw.weights)
    # Objectives mask what has drawn a number below its probability, here one half.
    number_BL = torch.where(masked, 0.0, 1 - 2**-24)
    half_B, share_BL = torch.full((len(rows),), 0.5), torch.full((len(rows), length), 0.5)
    if isinstance(objective, WeDLMDiffusion):  # the lowest numbers, as many as a block's share says
        share_BL = _shares(masked, labels != IGNORE_INDEX, objective.block_size)
    uniforms = Uniforms(level=half_B, token=number_BL, cut=half_B + 0.5, cut_length=half_B, block=share_BL)
    noisy = _first_rows(objective.noise(tokens, uniforms, labels, None if bool(real.all()) else real), len(rows))
    asked, order = _predicting_positions(objective, noisy, masked)
    owners, columns = (index[order] for index in masked.nonzero(as_tuple=True))
    return BoundBatch(
        noisy=dataclasses.replace(noisy, mask=asked),
        rows=owners,
        columns=columns,
        targets=tokens[owners, columns],
        weights=weights[owners, columns],
    )


def _predicting_positions(
    objective: Objective, noisy: NoisyBatch, masked: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S] the positions that predict masked tokens; [M] the order of the tokens that they predict, row by row."""
    length = masked.shape[1]
    asked = noisy.mask.clone()
    if not isinstance(objective, TwoStreamObjective):
        return asked, torch.arange(int(masked.sum()))
    asked[:, length:] = False  # the clean stream's own predictions
    if not objective.shift:
        return asked, torch.arange(
            int(masked.sum())
        )  # also where a block's tokens stand in another order: masks keep it
    # A block's first token is predicted by the last one of the block before, which is clean when a sampler gets there.
    rows, columns = masked.nonzero(as_tuple=True)
    places = columns - 1 + torch.where(columns % objective.block_size == 0, length, 0)
    asked = torch.zeros_like(asked)
    asked[rows, places] = True
    return asked, (rows * asked.shape[1] + places).argsort()


def _first_rows(noisy: NoisyBatch, rows: int) -> NoisyBatch:
    """Without those that an objective adds, masked where the others are not."""
    if len(noisy.mask) == rows:
        return noisy
    kept = int(noisy.mask[:rows].sum())

    def first(value: Any, count: int) -> Any:
        return None if value is None else value[:count]

    return NoisyBatch(
        input_ids=noisy.input_ids[:rows],
        attention_mask=first(noisy.attention_mask, rows),
        mask_descriptor=None if noisy.mask_descriptor is None else MaskDescriptor(noisy.mask_descriptor.codes[:rows]),
        position_ids=first(noisy.position_ids, rows),
        mask=noisy.mask[:rows],
        counted=noisy.counted[:rows],
        targets=noisy.targets[:kept],
        weights=noisy.weights[:kept],
        terms=first(noisy.terms, kept),
        normaliser=noisy.normaliser,
        pairs=first(noisy.pairs, rows),
    )


def _shares(masked: torch.Tensor, counted: torch.Tensor, block: int) -> torch.Tensor:
    """[B, L]: in column b the masked share of the counted tokens in block b, 0 where it has none."""
    blocks = torch.arange(masked.shape[1]) // block
    zeros = torch.zeros(masked.shape, dtype=torch.float32)
    sums = [zeros.index_add(1, blocks, values.float()) for values in (masked, counted)]
    return torch.where(sums[1] > 0, sums[0] / sums[1], 0.0)


def _logits(model: Any, reading: BoundBatch) -> torch.Tensor:
    """[M, V]."""
    return reading.noisy.to(model.get_input_embeddings().weight.device).logits(model)
