"""Training objectives as pure functions, shared by every engine: noise in, loss sums and their normalisers out.

An engine draws `Uniforms` on the CPU, lets the objective make a `NoisyBatch` of them, runs the model on it with logits
at `noisy.mask` only, and sums `objective.loss_sum` over its micro-batches and processes. Dividing by the sum of
`noisy.normaliser` over the whole global batch makes loss and gradients independent of how that batch was cut.
"""

from __future__ import annotations

from dlm_bridge.train.objectives.base import Objective
from dlm_bridge.train.objectives.block import BlockDiffusion, ComplementaryBlockDiffusion, TwoStreams
from dlm_bridge.train.objectives.causal import NextToken
from dlm_bridge.train.objectives.clean import document_level
from dlm_bridge.train.objectives.hybrid import NemotronDiffusion, WeDLMDiffusion
from dlm_bridge.train.objectives.loss import diffusion_loss, divisors, mean_loss, weighted_loss
from dlm_bridge.train.objectives.masked import MaskedDiffusion
from dlm_bridge.train.objectives.noise import IGNORE, NoisyBatch, Uniforms
from dlm_bridge.train.objectives.registry import (
    OBJECTIVES,
    build_objective,
    check_objective,
    family_objective,
    mask_token_id,
)
from dlm_bridge.train.objectives.shifted import ShiftedDiffusion, cart_weights

__all__ = [
    "IGNORE",
    "OBJECTIVES",
    "BlockDiffusion",
    "ComplementaryBlockDiffusion",
    "MaskedDiffusion",
    "NemotronDiffusion",
    "NextToken",
    "NoisyBatch",
    "Objective",
    "ShiftedDiffusion",
    "TwoStreams",
    "Uniforms",
    "WeDLMDiffusion",
    "build_objective",
    "cart_weights",
    "check_objective",
    "diffusion_loss",
    "divisors",
    "document_level",
    "family_objective",
    "mask_token_id",
    "mean_loss",
    "weighted_loss",
]
