"""Monte-Carlo likelihood bounds of diffusion models, by the family's own training objective.

The evidence lower bound of an answer of L tokens masks l ~ U{1..L} of them, uniformly over subsets of one size and
without the prompt, and weights the masked tokens' log-probabilities by L / l (LLaDA, arXiv 2502.09992, equation 6:
exact in expectation, with less variance than masking each token independently). If a family denoises block by block,
given the clean blocks before, the answer's tokens in each block have their own bound (BD3-LM, arXiv 2503.09573), and
one pass computes all blocks. The family's training objective determines the attention mask and the tokens that logits
predict.

A model trained with noise of random tokens, as recorded in its config, has the bound of that noise instead: t ~ U(0,
1), and the loss of every token of the answer with the weights of `objectives.losses`.
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

from dlm_bridge.attention.masks import MaskDescriptor
from dlm_bridge.errors import NonFiniteError, RowError, SettingError
from dlm_bridge.evaluation.resume import FinishedParts
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.losses import position_losses
from dlm_bridge.objectives.noise import Purpose, Uniforms, keyed_generator
from dlm_bridge.objectives.registry import family_objective
from dlm_bridge.objectives.single_stream import MaskedDiffusion, ShiftedDiffusion
from dlm_bridge.replicas import ALONE, Replicas

NO_FIGURE = (
    "the log-likelihood is NaN or infinite: look for NaN in the model's weights; float16 overflows where bfloat16 "
    "does not"
)


@dataclass(frozen=True)
class Answer:
    """Token ids of a prompt, and of the answer whose likelihood given the prompt is bounded."""

    prompt: tuple[int, ...]  # at least one token
    answer: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class LikelihoodBound:
    """Bound in nats: the mean over the samples, whose expectation is at most the log-likelihood, and its standard
    error (0 with a single sample)."""

    value: float
    error: float


@dataclass(frozen=True)
class BoundEstimator:
    """Estimator of likelihood bounds for a family."""

    objective: Objective
    block: int | None  # block size; None: the whole answer is denoised at once

    @property
    def described(self) -> str:
        if self.objective.noise_process != "mask":
            return f"{type(self.objective).__name__}: t ~ U(0, 1), {self.objective.noise_process} noise in the answer"
        blocks = "" if self.block is None else f", in each block of {self.block}"
        return f"{type(self.objective).__name__}: l ~ U(1, L) of the answer's L tokens masked, weight L / l{blocks}"


def bound_estimator(model: Any) -> BoundEstimator:
    """Estimator for a model. Raises CheckpointError for a config without the values that it needs."""
    chosen = family_objective(model)
    if chosen.noise_process != "mask":
        return BoundEstimator(dataclasses.replace(chosen, eps=0.0, loss_weighting="bound"), None)
    if chosen.samples_clean_stream:  # with blocks of one token the clean stream predicts every token: exact
        chosen = dataclasses.replace(chosen, block_size=1)  # type: ignore[call-arg]
    if chosen.streams == 2:
        return BoundEstimator(chosen, chosen.block_size)  # type: ignore[attr-defined]
    kind: type[Objective] = ShiftedDiffusion if chosen.shift else MaskedDiffusion
    return BoundEstimator(kind(mask_token_id=chosen.mask_token_id, ordinary_mask=chosen.ordinary_mask), None)


@torch.no_grad()
def likelihood_bounds(
    model: Any,
    answers: Sequence[Answer],
    samples: int,
    seed: int = 0,
    batch_size: int = 8,
    replicas: Replicas = ALONE,
    finished: FinishedParts | None = None,
) -> list[LikelihoodBound]:
    """Bound of each answer from `samples` forward passes, `batch_size` rows at a time, on `replicas` together, without
    the samples that are `finished`.

    The samples of an answer are stratified over the number of masks. Noise is keyed by (seed, sample, prompt): it
    depends on neither order nor batch, and answers to one prompt are compared under the same noise.

    Raises:
        RowError: answers contain the mask token; raised before the first forward pass. Rows are indices of answers.
        NonFiniteError: bounds are NaN or infinite.
    """
    estimator = bound_estimator(model)
    check_answers(model, answers)
    values = np.zeros((len(answers), samples))
    order = sorted(range(len(answers)), key=lambda number: -answers[number].length)
    turns = [(number, sample) for number in order for sample in range(samples) if answers[number].answer]
    finished = finished or FinishedParts()
    section, known = finished.section("bounds", [turns, [dataclasses.astuple(answer) for answer in answers]])
    left = [turn for turn in range(len(turns)) if turn not in known]
    for turn in known if replicas.leads else ():
        values[turns[turn]] = known[turn]
    with replicas.named():
        for start in replicas.share(range(0, len(left), batch_size)):
            chosen = left[start : start + batch_size]
            part = [turns[turn] for turn in chosen]
            rows = [answers[number] for number, _ in part]
            if estimator.objective.noise_process == "mask":
                masks = [_sample_mask(estimator, answers[number], seed, sample, samples) for number, sample in part]
                found = _sample_bounds(model, estimator, rows, masks)
            else:
                drawn = [sample for _, sample in part]
                found = _random_token_bounds(model, estimator.objective, rows, drawn, samples, seed)
            for (number, sample), value in zip(part, found, strict=True):
                values[number, sample] = value
            finished.add(section, dict(zip(chosen, map(float, found), strict=True)))
    values = np.sum(replicas.gather(values), axis=0)  # each value is 0 in all processes but one
    check_finite(values.sum(axis=1))
    errors = values.std(axis=1, ddof=1) / math.sqrt(samples) if samples > 1 else np.zeros(len(answers))
    return [
        LikelihoodBound(float(value), float(error)) for value, error in zip(values.mean(axis=1), errors, strict=True)
    ]


def check_answers(model: Any, answers: Sequence[Answer]) -> None:
    """Raise RowError for answers or prompts with the mask token, which would count as a mask (unless it is an ordinary
    token); its rows are indices of answers."""
    mask = bound_estimator(model).objective.mask_token
    bad = [number for number, one in enumerate(answers) if mask in one.prompt or mask in one.answer]
    if mask is not None and bad:
        raise RowError(f"the text contains the mask token {mask}: remove it from the data", bad)


def check_finite(values: Sequence[float] | np.ndarray[Any, Any]) -> None:
    """Raise NonFiniteError for log-likelihoods that are NaN or infinite; its rows are their indices."""
    bad = np.flatnonzero(~np.isfinite(np.asarray(values, dtype=np.float64))).tolist()
    if bad:
        raise NonFiniteError(NO_FIGURE, bad if len(bad) < len(values) else ())


@torch.no_grad()
def is_greedy(model: Any, answer: Answer) -> bool:
    """True if greedy decoding gives the answer, committing per step the most confident token of the first unfinished
    block. Raises SettingError for a model of random tokens, which has no such decoding, and NonFiniteError."""
    estimator = bound_estimator(model)
    if estimator.objective.noise_process != "mask":
        noise = estimator.objective.noise_process
        raise SettingError("tasks", f"a metric needs greedy decoding, which models trained with {noise} noise lack")
    blocks = _block_ids(estimator, answer)
    left = np.ones(len(answer.answer), dtype=bool)
    while left.any():
        # Later blocks are also masked, and ignored below.
        batch = _bound_batch(estimator, [answer], [MaskSample(left, np.ones(len(left)))])
        logits_MV = _logits(model, batch).float()
        if estimator.objective.mask_token is not None:
            logits_MV[:, estimator.objective.mask_token] = -torch.inf
        confidences, tokens = (values.cpu() for values in logits_MV.log_softmax(-1).max(dim=-1))
        places = batch.columns - len(answer.prompt)
        later = torch.from_numpy(blocks)[places] != int(blocks[left].min())
        chosen = int(confidences.masked_fill(later, -torch.inf).argmax())
        check_finite([float(confidences[chosen])])
        if int(tokens[chosen]) != answer.answer[int(places[chosen])]:
            return False
        left[int(places[chosen])] = False
    return True


@dataclass(frozen=True)
class MaskSample:
    """Random mask of an answer's tokens, and the weight of each masked token."""

    masked: np.ndarray[Any, Any]  # [L] bool
    weights: np.ndarray[Any, Any]  # [L] float64


def _sample_mask(estimator: BoundEstimator, answer: Answer, seed: int, sample: int, samples: int) -> MaskSample:
    count = len(answer.answer)
    blocks = _block_ids(estimator, answer)
    key = zlib.crc32(np.asarray(answer.prompt, dtype=np.int64).tobytes())
    generator = keyed_generator(seed, Purpose.LIKELIHOOD, sample, key)
    fractions = (sample + generator.random(int(blocks[-1]) + 1)) / samples % 1  # masked fraction of each block
    numbers = generator.random(count)
    sizes = np.bincount(blocks)
    wanted = 1 + np.minimum((fractions * sizes).astype(np.int64), sizes - 1)
    order = np.lexsort((numbers, blocks))
    rank = np.empty(count, dtype=np.int64)
    rank[order] = np.arange(count) - np.concatenate([[0], np.cumsum(sizes)])[blocks[order]]
    return MaskSample(rank < wanted[blocks], (sizes / wanted)[blocks])


def _block_ids(estimator: BoundEstimator, answer: Answer) -> np.ndarray[Any, Any]:
    """[L] index of the block of each token, from 0."""
    if estimator.block is None:
        return np.zeros(len(answer.answer), dtype=np.int64)
    places = np.arange(len(answer.prompt), answer.length)
    return places // estimator.block - places[0] // estimator.block


@dataclass(frozen=True)
class BoundBatch:
    """Model inputs of B rows, and the tokens that their M logits predict."""

    noisy: NoisyBatch  # `noisy.mask` [B, S]: positions of the logits
    rows: torch.Tensor  # [M] int64
    columns: torch.Tensor  # [M] int64
    targets: torch.Tensor  # [M] int64
    weights: torch.Tensor  # [M] float64


def _sample_bounds(
    model: Any, estimator: BoundEstimator, rows: Sequence[Answer], mask_samples: Sequence[MaskSample]
) -> list[float]:
    """One sample of each row's bound."""
    batch = _bound_batch(estimator, rows, mask_samples)
    logits_MV = _logits(model, batch)
    losses_M = F.cross_entropy(logits_MV.float(), batch.targets.to(logits_MV.device), reduction="none")
    weighted_M = losses_M.double().cpu() * batch.weights
    return torch.zeros(len(rows), dtype=torch.float64).index_add(0, batch.rows, -weighted_M).tolist()


def _random_token_bounds(
    model: Any, objective: Objective, rows: Sequence[Answer], turns: Sequence[int], samples: int, seed: int
) -> list[float]:
    """Sample number `turns[i]` of each row's bound under noise of random tokens."""
    tokens, labels, real = _padded(rows)
    levels = torch.zeros(len(rows), dtype=torch.float64)
    numbers = torch.zeros(2, *tokens.shape, dtype=torch.float64)  # select replaced tokens, and their replacements
    for place, (row, sample) in enumerate(zip(rows, turns, strict=True)):
        key = zlib.crc32(np.asarray(row.prompt, dtype=np.int64).tobytes())
        generator = keyed_generator(seed, Purpose.LIKELIHOOD, sample, key)
        levels[place] = (sample + generator.random()) / samples % 1
        drawn = torch.from_numpy(generator.random((len(row.answer), 2)))
        numbers[:, place, len(row.prompt) : row.length] = drawn.T
    levels.clamp_(2**-40, 1 - 2**-40)  # weights are infinite at 0 and 1
    whole = torch.ones(len(rows))
    uniforms = Uniforms(levels, numbers[0], whole, whole, torch.zeros(tokens.shape), numbers[1])
    noisy = objective.noise(tokens, uniforms, labels, None if bool(real.all()) else real)
    noisy = noisy.to(model.get_input_embeddings().weight.device)
    losses_M = position_losses(noisy.logits(model).float(), noisy.targets, noisy.noise) * noisy.weights
    owners = noisy.mask.nonzero()[:, 0].cpu()
    return torch.zeros(len(rows), dtype=torch.float64).index_add(0, owners, -losses_M.double().cpu()).tolist()


def _padded(rows: Sequence[Answer]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, L] tokens, [B, L] labels of the answers, [B, L] bool: False at padding."""
    length = max(row.length for row in rows)
    tokens, labels = torch.zeros(len(rows), length, dtype=torch.long), torch.full((len(rows), length), IGNORE_INDEX)
    real = torch.zeros(len(rows), length, dtype=torch.bool)
    for number, row in enumerate(rows):
        answer = slice(len(row.prompt), row.length)
        tokens[number, : row.length] = torch.tensor([*row.prompt, *row.answer])
        labels[number, answer] = tokens[number, answer]
        real[number, : row.length] = True
    return tokens, labels, real


def _bound_batch(estimator: BoundEstimator, rows: Sequence[Answer], mask_samples: Sequence[MaskSample]) -> BoundBatch:
    objective = estimator.objective
    tokens, labels, real = _padded(rows)
    length = tokens.shape[1]
    masked = torch.zeros(len(rows), length, dtype=torch.bool)
    weights = torch.zeros(len(rows), length, dtype=torch.float64)
    for number, (row, sampled) in enumerate(zip(rows, mask_samples, strict=True)):
        answer = slice(len(row.prompt), row.length)
        masked[number, answer] = torch.from_numpy(sampled.masked)
        weights[number, answer] = torch.from_numpy(sampled.weights)
    # Objectives mask tokens with numbers below the masking probability, here one half.
    number_BL = torch.where(masked, 0.0, 1 - 2**-24)
    half_B, fraction_BL = torch.full((len(rows),), 0.5), torch.full((len(rows), length), 0.5)
    if objective.exact_block_masks and estimator.block is not None:
        # The objective masks a block's fraction of its tokens, those with the lowest numbers.
        fraction_BL = _masked_fractions(masked, labels != IGNORE_INDEX, estimator.block)
    uniforms = Uniforms(level=half_B, token=number_BL, cut=half_B + 0.5, cut_length=half_B, block=fraction_BL)
    noisy = _first_rows(objective.noise(tokens, uniforms, labels, None if bool(real.all()) else real), len(rows))
    predicting, order = _predicting_positions(estimator, noisy, masked)
    owners, columns = (index[order] for index in masked.nonzero(as_tuple=True))
    return BoundBatch(
        noisy=dataclasses.replace(noisy, mask=predicting),
        rows=owners,
        columns=columns,
        targets=tokens[owners, columns],
        weights=weights[owners, columns],
    )


def _predicting_positions(
    estimator: BoundEstimator, noisy: NoisyBatch, masked: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, S] positions that predict masked tokens; [M] the order of the predicted tokens, row by row."""
    length = masked.shape[1]
    predicting = noisy.mask.clone()
    if estimator.block is None:
        return predicting, torch.arange(int(masked.sum()))
    predicting[:, length:] = False  # predictions of the clean stream
    if not estimator.objective.shift:
        # Masks keep their order even if an objective reorders the tokens of a block.
        return predicting, torch.arange(int(masked.sum()))
    # A block's first token is predicted by the last token of the block before, from the clean stream.
    rows, columns = masked.nonzero(as_tuple=True)
    places = columns - 1 + torch.where(columns % estimator.block == 0, length, 0)
    predicting = torch.zeros_like(predicting)
    predicting[rows, places] = True
    return predicting, (rows * predicting.shape[1] + places).argsort()


def _first_rows(noisy: NoisyBatch, rows: int) -> NoisyBatch:
    """The first rows, without the complementary ones that some objectives add."""
    if len(noisy.mask) == rows:
        return noisy
    counts = dict.fromkeys(("input_ids", "attention_mask", "position_ids", "mask", "counted", "pairs"), rows)
    counts |= dict.fromkeys(("targets", "weights", "terms"), int(noisy.mask[:rows].sum()))
    values: dict[str, Any] = {name: getattr(noisy, name) for name in counts}
    first: dict[str, Any] = {name: None if value is None else value[: counts[name]] for name, value in values.items()}
    descriptor = None if noisy.mask_descriptor is None else MaskDescriptor(noisy.mask_descriptor.codes[:rows])
    return dataclasses.replace(noisy, mask_descriptor=descriptor, **first)


def _masked_fractions(masked: torch.Tensor, counted: torch.Tensor, block: int) -> torch.Tensor:
    """[B, L]: in column b the masked fraction of the counted tokens of block b; 0 if it has none."""
    blocks = torch.arange(masked.shape[1]) // block
    zeros = torch.zeros(masked.shape, dtype=torch.float32)
    sums = [zeros.index_add(1, blocks, values.float()) for values in (masked, counted)]
    return torch.where(sums[1] > 0, sums[0] / sums[1], 0.0)


def _logits(model: Any, batch: BoundBatch) -> torch.Tensor:
    """[M, V] logits of a batch."""
    return batch.noisy.to(model.get_input_embeddings().weight.device).logits(model)
