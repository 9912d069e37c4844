"""Likelihoods: an autoregressive model's token log-probabilities; a diffusion model's estimates of them, one-step,
block-wise and along the trajectory, and the evidence bound.

All of them are batches of the training objectives with given noise, which define every family's shift, attention
pattern and streams. `causal`, `one_step`, `blockwise`, `trajectory` and `bound_query` build the model's input without
the model; `LikelihoodQuery.per_token` and `bound_sums` take the log-probabilities that it gives the targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.noise import Purpose, Uniforms
from dlm_bridge.objectives.registry import family_objective, mask_token_id
from dlm_bridge.objectives.single_stream import MaskedDiffusion, NextTokenPrediction, ShiftedDiffusion
from dlm_bridge.objectives.two_streams import BlockDiffusion

NEVER_COMMITTED = torch.iinfo(torch.int64).max  # of `Sequences.order`: a token that the sampler left masked


@dataclass(frozen=True)
class Sequences:
    """B prompts with their completions, a row each: prompt, completion, padding."""

    tokens: torch.Tensor  # [B, L] int64
    prompt: torch.Tensor  # [B, L] bool
    completion: torch.Tensor  # [B, L] bool: all that the sampler filled
    scored: torch.Tensor  # [B, L] bool: of it, up to and including the first end-of-sequence token
    order: torch.Tensor  # [B, L] int64: sampler step, from 1, that committed a token; else `NEVER_COMMITTED`

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def shape(self) -> tuple[int, int]:
        """B, L."""
        return self.tokens.shape[0], self.tokens.shape[1]

    def rows(self, chosen: slice | torch.Tensor) -> Sequences:
        return Sequences(*(value[chosen] for value in vars(self).values()))

    def padded(self, width: int) -> Sequences:
        """The same rows with padding up to `width`."""
        more = (0, width - self.tokens.shape[1])
        values = {name: torch.nn.functional.pad(value, more) for name, value in vars(self).items()}
        values["order"][:, self.tokens.shape[1] :] = NEVER_COMMITTED
        return Sequences(**values)


@dataclass(frozen=True)
class LikelihoodQuery:
    """Input of the model, and the tokens of the B sequences that its M logits predict."""

    noisy: NoisyBatch
    rows: torch.Tensor  # [M] int64
    columns: torch.Tensor  # [M] int64
    shape: tuple[int, int]  # B, L

    def per_token(self, values_M: torch.Tensor) -> torch.Tensor:
        """[B, L] fp32: a number for each scored token, such as its log-probability, zero elsewhere."""
        places = (self.rows.to(values_M.device), self.columns.to(values_M.device))
        return torch.zeros(self.shape, device=values_M.device).index_put(places, values_M)

    @property
    def predicted(self) -> torch.Tensor:
        """[B, L] bool: the tokens that the logits predict."""
        return torch.zeros(self.shape, dtype=torch.bool).index_put((self.rows, self.columns), torch.tensor(True))

    def without_targets(self) -> LikelihoodQuery:
        """The first row's input, of which no logits are needed."""
        return LikelihoodQuery(self.noisy.row_without_targets(), self.rows[:0], self.columns[:0], self.shape)


def causal(sequences: Sequences) -> LikelihoodQuery:
    """An autoregressive model's own log-probabilities: every token given those before it."""
    return _predicted(NextTokenPrediction(), sequences.tokens, sequences)


def one_step(
    model: Any, sequences: Sequences, seed: int, draw: int, samples: Sequence[int], fraction: float
) -> LikelihoodQuery:
    """diffu-GRPO's estimate (d1, arXiv 2504.12216): every token of the completion from one forward pass with the whole
    completion masked, and a random `fraction` of the prompt; the noise is keyed by (seed, draw, sample)."""
    tokens, objective = sequences.tokens, _single_stream(model)
    uniforms = Uniforms.keyed(seed, draw, samples, tokens.shape[1], Purpose.PROMPT_MASK)
    hidden = sequences.completion | (sequences.prompt & (uniforms.token.to(tokens.device) < fraction))
    return _predicted(objective, torch.where(hidden, objective.mask_token_id, tokens), sequences)


def blockwise(model: Any, sequences: Sequences, trace_steps: int) -> list[LikelihoodQuery]:
    """The block-wise estimate: tokens given those committed in the blocks before, for a block-causal model in one pass
    of its two streams; for a bidirectional one it is `trajectory`. Raises DlmBridgeError for a family whose blocks are
    neither."""
    if model.family.attention_pattern != "block_causal":
        return trajectory(model, sequences, trace_steps)
    objective = dataclasses.replace(family_objective(model), length_variation=0.0)
    after_end = sequences.completion & ~sequences.scored  # after the end: not part of the sequence
    tokens = torch.where(after_end, objective.mask_token_id, sequences.tokens)
    return [_predicted(objective, tokens, sequences)]


def trajectory(model: Any, sequences: Sequences, trace_steps: int) -> list[LikelihoodQuery]:
    """TraceRL's estimate (arXiv 2509.06949): each token given the canvas of the sampler's step that committed it, or
    with `trace_steps` s, of the first of s neighbouring steps whose tokens are predicted together.

    A bidirectional model takes a forward pass for each such group of steps. A block-causal one takes its blocks side
    by side, in two streams: pass n has the n-th group of every block masked, with all later ones. The sequences
    without a token in a pass are left out of it.

    Raises:
        DlmBridgeError: a family whose state at a step is neither.
    """
    family: FamilySpec = model.family
    own = family_objective(model)
    two_streams = family.attention_pattern == "block_causal"
    if two_streams:
        objective = dataclasses.replace(own, length_variation=0.0)
        known = type(objective) is BlockDiffusion and not family.shift
    else:
        objective = _single_stream(model)
        known = family.attention_pattern == "bidirectional" and own.streams == 1 and not own.resizes
    if not known:
        raise DlmBridgeError(
            f"--method tracerl and block-grpo replay a sampler's steps, which is not for {family.title}: "
            f"use {'block-grpo or ' if two_streams else ''}diffu-grpo"
        )
    groups = step_groups(sequences, trace_steps, trace_block_size(model))
    queries = []
    for number in groups[sequences.scored].unique().tolist():
        predicted = sequences.scored & (groups == number)
        owner = predicted.any(dim=1).nonzero()[:, 0]
        rows = dataclasses.replace(sequences.rows(owner), scored=predicted[owner])
        hidden = (sequences.completion & (groups >= number))[owner]
        masked = torch.where(hidden, objective.mask_token_id, rows.tokens)
        query = _predicted(objective, rows.tokens if two_streams else masked, rows)
        if two_streams:
            tokens = torch.cat([masked, query.noisy.input_ids[:, masked.shape[1] :]], dim=1)
            query = dataclasses.replace(query, noisy=dataclasses.replace(query.noisy, input_ids=tokens))
        queries.append(dataclasses.replace(query, rows=owner[query.rows], shape=sequences.shape))
    return queries


def step_groups(sequences: Sequences, trace_steps: int, block_size: int | None) -> torch.Tensor:
    """[B, L] int64, from 0: which `trace_steps` neighbouring steps of the sampler committed a completion's tokens,
    counted anew in each block of `block_size` tokens; tokens that it left masked come last. Zero elsewhere."""
    blocks = _blocks(sequences, block_size)
    ranks = _ranks(blocks, sequences.order, sequences.completion)
    first = torch.full_like(ranks, NEVER_COMMITTED).scatter_reduce(
        1, blocks, ranks.masked_fill(~sequences.completion, NEVER_COMMITTED), "amin"
    )
    groups = (ranks - first.gather(1, blocks)) // trace_steps
    return groups.masked_fill(~sequences.completion, 0)


def trace_numbers(sequences: Sequences, trace_steps: int, block_size: int | None) -> torch.Tensor:
    """[B, L] int64, from 0: the aggregated step of each scored token, in the order of the trajectory (blocks from left
    to right, `step_groups` within them); -1 elsewhere."""
    groups = step_groups(sequences, trace_steps, block_size)
    return _ranks(_blocks(sequences, block_size), groups, sequences.scored).masked_fill(~sequences.scored, -1)


def trace_block_size(model: Any) -> int | None:
    """The tokens of a block whose steps are counted by themselves; None for a bidirectional model."""
    return model.config.block_size if model.family.attention_pattern == "block_causal" else None


def bound_query(
    model: Any, tokens: torch.Tensor, answer: torch.Tensor, real: torch.Tensor, uniforms: Uniforms
) -> NoisyBatch:
    """Input of the model for one sample of the evidence lower bound of B answers, by its family's own objective; of an
    autoregressive model for their log-likelihood.

    Args:
        tokens: [B, L].
        answer: [B, L] bool, the tokens whose likelihood is bounded.
        real: [B, L] bool, false at padding.
        uniforms: of the same B and L; the same for another model gives it the same noise.

    Raises:
        DlmBridgeError: a family whose loss is not a bound.
    """
    labels = torch.where(answer, tokens, IGNORE_INDEX)
    if not hasattr(model, "family"):
        return NextTokenPrediction().noise(tokens, uniforms, labels, real)
    objective = family_objective(model)
    if objective.resizes:
        objective = _single_stream(model)  # of the tokens where they are
    if not {"tokens", "level"} <= {*objective.normalisations, *objective.weightings} or objective.terms > 1:
        raise DlmBridgeError(
            f"--method vrpo needs a likelihood bound, which the objective of {model.family.title} does not give"
        )
    objective = dataclasses.replace(objective, loss_normalisation="tokens", loss_weighting="level", eps=1e-3)
    return objective.noise(tokens, uniforms, labels, real)


def bound_sums(noisy: NoisyBatch, logps_M: torch.Tensor) -> torch.Tensor:
    """[B] fp32: each row's sample of its answer's bound on the log-likelihood, in nats."""
    rows = noisy.mask.nonzero()[:, 0].to(logps_M.device)
    weighted_M = logps_M * noisy.weights.to(logps_M.device)
    return torch.zeros(len(noisy.mask), device=logps_M.device).index_add(0, rows, weighted_M)


def _blocks(sequences: Sequences, block_size: int | None) -> torch.Tensor:
    """[B, L] int64: the number of each position's block; one block a row without a size."""
    positions = torch.arange(sequences.tokens.shape[1]).expand(sequences.shape)
    return positions // block_size if block_size else torch.zeros_like(positions)


def _ranks(major: torch.Tensor, minor: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[B, L] int64: how many different smaller pairs (major, minor) a row has at its `chosen` positions."""
    found = torch.zeros_like(minor)
    for row, places in enumerate(chosen):
        pairs = torch.stack([major[row, places], minor[row, places]], dim=1)
        found[row, places] = torch.unique(pairs, dim=0, return_inverse=True)[1]
    return found


def _single_stream(model: Any) -> Objective:
    """The single-stream objective of the family's shift."""
    kind: type[Objective] = ShiftedDiffusion if model.family.shift else MaskedDiffusion
    return kind(mask_token_id=mask_token_id(model))


def _predicted(objective: Objective, tokens: torch.Tensor, sequences: Sequences) -> LikelihoodQuery:
    """The query that predicts every scored token, from `tokens`; an objective that masks them is given all masked."""
    batch, length = tokens.shape
    zeros_B, zeros_BL = torch.zeros(batch), torch.zeros(batch, length)
    certain = Uniforms(level=zeros_B + 1, token=zeros_BL, cut=zeros_B + 1, cut_length=zeros_B, block=zeros_BL + 1)
    real = sequences.prompt | sequences.completion
    labels = torch.where(sequences.scored, sequences.tokens, IGNORE_INDEX)
    noisy = objective.noise(tokens, certain, labels, None if bool(real.all()) else real)
    rows, columns = sequences.scored.nonzero(as_tuple=True)  # in the order of the objective's targets
    if len(rows) != len(noisy.targets):
        raise DlmBridgeError(
            f"{type(objective).__name__} does not predict each token of a completion once: use --method diffu-grpo"
        )
    return LikelihoodQuery(noisy, rows, columns, (batch, length))
