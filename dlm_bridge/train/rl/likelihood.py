"""Likelihood estimates of diffusion models: one-step and block-wise token log-probabilities, and the evidence bound.

All of them are batches of the training objectives with given noise, which define every family's shift, attention
pattern and streams. `one_step`, `blockwise` and `bound_query` build the model's input without the model;
`LikelihoodQuery.token_logps` and `bound_sums` take the log-probabilities that it gives the targets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.family_spec import FamilySpec
from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch
from dlm_bridge.objectives.noise import Purpose, Uniforms
from dlm_bridge.objectives.registry import family_objective, mask_token_id
from dlm_bridge.objectives.single_stream import MaskedDiffusion, ShiftedDiffusion

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

    def token_logps(self, logps_M: torch.Tensor) -> torch.Tensor:
        """[B, L] fp32: the estimated log-probability of each scored token, zero elsewhere."""
        places = (self.rows.to(logps_M.device), self.columns.to(logps_M.device))
        return torch.zeros(self.shape, device=logps_M.device).index_put(places, logps_M)


def one_step(
    model: Any, sequences: Sequences, seed: int, draw: int, samples: Sequence[int], fraction: float
) -> LikelihoodQuery:
    """diffu-GRPO's estimate (d1, arXiv 2504.12216): every token of the completion from one forward pass with the whole
    completion masked, and a random `fraction` of the prompt; the noise is keyed by (seed, draw, sample)."""
    tokens, objective = sequences.tokens, _single_stream(model)
    uniforms = Uniforms.keyed(seed, draw, samples, tokens.shape[1], Purpose.PROMPT_MASK)
    hidden = sequences.completion | (sequences.prompt & (uniforms.token.to(tokens.device) < fraction))
    return _all_masked(objective, torch.where(hidden, objective.mask_token_id, tokens), sequences)


def blockwise(model: Any, sequences: Sequences, trace_steps: int) -> LikelihoodQuery:
    """The block-wise estimate: tokens given those committed before them, in the sampler's order (compare TraceRL,
    arXiv 2509.06949).

    A block-causal model evaluates all blocks in one pass of its two streams. For a bidirectional one each sequence is
    repeated for every `trace_steps` forward passes of its sampler, whose tokens are masked together with all later
    ones; with `trace_steps` 1 this is the probability with which the tokens were drawn.

    Raises:
        DlmBridgeError: a family whose blocks are neither.
    """
    family: FamilySpec = model.family
    if family.attention_pattern == "block_causal":
        objective = dataclasses.replace(family_objective(model), length_variation=0.0)
        after_end = sequences.completion & ~sequences.scored  # after the end: not part of the sequence
        tokens = torch.where(after_end, objective.mask_token_id, sequences.tokens)
        return _all_masked(objective, tokens, sequences)
    objective = _single_stream(model)
    if family.attention_pattern != "bidirectional" or family.objective in ("nemotron", "wedlm"):
        raise DlmBridgeError(f"--method block-grpo is not for {family.title}: use diffu-grpo")
    groups = (sequences.order - 1) // trace_steps
    scored_parts, hidden_parts, owners = [], [], []
    for number in range(int(groups[sequences.scored].max()) + 1):
        scored_now = sequences.scored & (groups == number)
        owner = scored_now.any(dim=1).nonzero()[:, 0]
        scored_parts.append(scored_now[owner])
        hidden_parts.append((sequences.completion & (groups >= number))[owner])
        owners.append(owner)
    owner, hidden = torch.cat(owners), torch.cat(hidden_parts)
    repeated = dataclasses.replace(sequences.rows(owner), scored=torch.cat(scored_parts))
    query = _all_masked(objective, torch.where(hidden, objective.mask_token_id, repeated.tokens), repeated)
    return LikelihoodQuery(query.noisy, owner[query.rows], query.columns, sequences.shape)


def bound_query(
    model: Any, tokens: torch.Tensor, answer: torch.Tensor, real: torch.Tensor, uniforms: Uniforms
) -> NoisyBatch:
    """Input of the model for one sample of the evidence lower bound of B answers, by its family's own objective.

    Args:
        tokens: [B, L].
        answer: [B, L] bool, the tokens whose likelihood is bounded.
        real: [B, L] bool, false at padding.
        uniforms: of the same B and L; the same for another model gives it the same noise.

    Raises:
        DlmBridgeError: a family whose loss is not a bound.
    """
    objective = family_objective(model)
    if objective.resizes:
        objective = _single_stream(model)  # of the tokens where they are
    if not {"tokens", "level"} <= {*objective.normalisations, *objective.weightings} or objective.terms > 1:
        raise DlmBridgeError(
            f"--method vrpo needs a likelihood bound, which the objective of {model.family.title} does not give"
        )
    objective = dataclasses.replace(objective, loss_normalisation="tokens", loss_weighting="level", eps=1e-3)
    return objective.noise(tokens, uniforms, torch.where(answer, tokens, IGNORE_INDEX), real)


def bound_sums(noisy: NoisyBatch, logps_M: torch.Tensor) -> torch.Tensor:
    """[B] fp32: each row's sample of its answer's bound on the log-likelihood, in nats."""
    rows = noisy.mask.nonzero()[:, 0].to(logps_M.device)
    weighted_M = logps_M * noisy.weights.to(logps_M.device)
    return torch.zeros(len(noisy.mask), device=logps_M.device).index_add(0, rows, weighted_M)


def _single_stream(model: Any) -> Objective:
    """The single-stream objective of the family's shift."""
    kind: type[Objective] = ShiftedDiffusion if model.family.shift else MaskedDiffusion
    return kind(mask_token_id=mask_token_id(model))


def _all_masked(objective: Objective, tokens: torch.Tensor, sequences: Sequences) -> LikelihoodQuery:
    """The query with every scored token masked and predicted."""
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
