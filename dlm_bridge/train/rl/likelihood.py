"""Likelihoods: an autoregressive model's token log-probabilities; for diffusion models the one-step, block-wise and
trajectory estimates of them, and the evidence lower bound.

Each is a batch of a training objective with given noise; the objective defines the family's shift, attention pattern
and streams. `causal`, `one_step`, `blockwise`, `trajectory` and `bound_query` build the model's input without running
the model; `LikelihoodQuery.per_token` and `bound_sums` take the log-probabilities of its targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.models.families import FamilySpec
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.noise import Purpose, Uniforms
from dlm_bridge.objectives.registry import family_objective, mask_token_id
from dlm_bridge.objectives.single_stream import MaskedDiffusion, NextTokenPrediction, ShiftedDiffusion
from dlm_bridge.objectives.two_streams import BlockDiffusion

NEVER_COMMITTED = torch.iinfo(torch.int64).max  # in `Sequences.order`: a token that the sampler left masked


@dataclass(frozen=True)
class Sequences:
    """B prompts with their completions, a row each: prompt, completion, padding."""

    tokens: torch.Tensor  # [B, L] int64
    prompt: torch.Tensor  # [B, L] bool
    completion: torch.Tensor  # [B, L] bool: all positions of the completion
    scored: torch.Tensor  # [B, L] bool: the completion up to and including its first end-of-sequence token
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
        """Pad the rows to `width`."""
        more = (0, width - self.tokens.shape[1])
        values = {name: torch.nn.functional.pad(value, more) for name, value in vars(self).items()}
        values["order"][:, self.tokens.shape[1] :] = NEVER_COMMITTED
        return Sequences(**values)


@dataclass(frozen=True)
class LikelihoodQuery:
    """Input of the model, and the positions in the B sequences that its M logits predict."""

    noisy: NoisyBatch
    rows: torch.Tensor  # [M] int64
    columns: torch.Tensor  # [M] int64
    shape: tuple[int, int]  # B, L

    def per_token(self, values_M: torch.Tensor) -> torch.Tensor:
        """Scatter a value per target, such as its log-probability, to [B, L] fp32, zero elsewhere."""
        places = (self.rows.to(values_M.device), self.columns.to(values_M.device))
        return torch.zeros(self.shape, device=values_M.device).index_put(places, values_M)

    @property
    def predicted(self) -> torch.Tensor:
        """Tokens that the logits predict, [B, L] bool."""
        return torch.zeros(self.shape, dtype=torch.bool).index_put((self.rows, self.columns), torch.tensor(True))

    def without_targets(self) -> LikelihoodQuery:
        """The first row's input without targets."""
        return LikelihoodQuery(self.noisy.row_without_targets(), self.rows[:0], self.columns[:0], self.shape)


def causal(sequences: Sequences) -> LikelihoodQuery:
    """Query of an autoregressive model's log-probabilities: every token given those before it."""
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
    """The block-wise estimate: tokens given those of earlier blocks. A block-causal model needs one pass of its two
    streams; for a bidirectional model it is `trajectory`. Raises SettingError for other families."""
    if model.family.attention_pattern != "block_causal":
        return trajectory(model, sequences, trace_steps)
    objective = dataclasses.replace(family_objective(model), length_variation=0.0)
    after_end = sequences.completion & ~sequences.scored
    tokens = torch.where(after_end, objective.mask_token_id, sequences.tokens)
    return [_predicted(objective, tokens, sequences)]


def trajectory(model: Any, sequences: Sequences, trace_steps: int) -> list[LikelihoodQuery]:
    """TraceRL's estimate (arXiv 2509.06949): each token given the canvas of the sampler's step that committed it.
    Groups of `trace_steps` neighbouring steps are predicted together, from the canvas of the first of them.

    A bidirectional model needs one forward pass per group of steps. A block-causal model processes its blocks in
    parallel, in two streams: in pass n the n-th group of every block is masked, and all later ones. Sequences without
    a token in a pass are omitted from it.

    Raises:
        SettingError: the family is neither bidirectional nor block-causal.
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
        raise SettingError(
            "method",
            f"tracerl and block-grpo replay a sampler's steps, which is not possible for {family.title}: use "
            f"{'block-grpo or ' if two_streams else ''}diffu-grpo",
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
    """Group of `trace_steps` neighbouring sampler steps that committed each token of a completion, [B, L] int64 from
    0.

    Groups are counted anew in each block of `block_size` tokens. Tokens that the sampler left masked are in the last
    group; positions outside of completions are 0.
    """
    blocks = _blocks(sequences, block_size)
    ranks = _ranks(blocks, sequences.order, sequences.completion)
    first = torch.full_like(ranks, NEVER_COMMITTED).scatter_reduce(
        1, blocks, ranks.masked_fill(~sequences.completion, NEVER_COMMITTED), "amin"
    )
    groups = (ranks - first.gather(1, blocks)) // trace_steps
    return groups.masked_fill(~sequences.completion, 0)


def trace_numbers(sequences: Sequences, trace_steps: int, block_size: int | None) -> torch.Tensor:
    """Aggregated step of each scored token, [B, L] int64 from 0, in the order of the trajectory (blocks from left to
    right, `step_groups` within them); -1 elsewhere."""
    groups = step_groups(sequences, trace_steps, block_size)
    return _ranks(_blocks(sequences, block_size), groups, sequences.scored).masked_fill(~sequences.scored, -1)


def trace_block_size(model: Any) -> int | None:
    """Tokens per block in which steps are counted separately; None for a bidirectional model."""
    return model.config.block_size if model.family.attention_pattern == "block_causal" else None


def bound_query(
    model: Any, tokens: torch.Tensor, answer: torch.Tensor, real: torch.Tensor, uniforms: Uniforms
) -> NoisyBatch:
    """Input of the model for one sample of the evidence lower bound of B answers, from its family's own objective; for
    an autoregressive model, of their log-likelihood.

    Args:
        tokens: [B, L].
        answer: [B, L] bool, the tokens whose likelihood is bounded.
        real: [B, L] bool, false at padding.
        uniforms: noise of shape B, L; equal uniforms give two models the same noise.

    Raises:
        SettingError: the family's loss is not a likelihood bound.
    """
    labels = torch.where(answer, tokens, IGNORE_INDEX)
    if not hasattr(model, "family"):
        return NextTokenPrediction().noise(tokens, uniforms, labels, real)
    objective = family_objective(model)
    if objective.resizes:
        objective = _single_stream(model)  # without insertions and deletions
    if not {"tokens", "level"} <= {*objective.normalisations, *objective.weightings} or objective.terms > 1:
        raise SettingError(
            "method", f"vrpo needs a likelihood bound, and the objective of {model.family.title} has none"
        )
    objective = dataclasses.replace(objective, loss_normalisation="tokens", loss_weighting="level", eps=1e-3)
    return objective.noise(tokens, uniforms, labels, real)


def bound_sums(noisy: NoisyBatch, logps_M: torch.Tensor) -> torch.Tensor:
    """One sample of the bound on the log-likelihood of each row's answer, [B] fp32, in nats."""
    rows = noisy.mask.nonzero()[:, 0].to(logps_M.device)
    weighted_M = logps_M * noisy.weights.to(logps_M.device)
    return torch.zeros(len(noisy.mask), device=logps_M.device).index_add(0, rows, weighted_M)


def _blocks(sequences: Sequences, block_size: int | None) -> torch.Tensor:
    """Block number of each position, [B, L] int64; without a block size each row is one block."""
    positions = torch.arange(sequences.tokens.shape[1]).expand(sequences.shape)
    return positions // block_size if block_size else torch.zeros_like(positions)


def _ranks(major: torch.Tensor, minor: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Rank of each `chosen` position's pair (major, minor) among the different pairs of its row, [B, L] int64."""
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
    """Query that predicts every scored token from `tokens`. Objectives that add masks get the largest noise level."""
    batch, length = tokens.shape
    zeros_B, zeros_BL = torch.zeros(batch), torch.zeros(batch, length)
    certain = Uniforms(level=zeros_B + 1, token=zeros_BL, cut=zeros_B + 1, cut_length=zeros_B, block=zeros_BL + 1)
    real = sequences.prompt | sequences.completion
    labels = torch.where(sequences.scored, sequences.tokens, IGNORE_INDEX)
    noisy = objective.noise(tokens, certain, labels, None if bool(real.all()) else real)
    rows, columns = sequences.scored.nonzero(as_tuple=True)  # in the order of the objective's targets
    if len(rows) != len(noisy.targets):
        raise SettingError(
            "method", f"{type(objective).__name__} does not predict each token exactly once: use diffu-grpo"
        )
    return LikelihoodQuery(noisy, rows, columns, (batch, length))
