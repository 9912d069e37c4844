"""Training objectives as pure functions, shared by every engine: clean tokens and random numbers in, a noisy batch out.

An engine draws `Uniforms` on the CPU, lets the objective make a `NoisyBatch` of them, runs the model on it with logits
at `noisy.mask` only, and sums `objective.loss_sum` over its micro-batches and processes. Dividing by the sum of
`noisy.normaliser` over the whole global batch makes loss and gradients independent of how that batch was cut.

`noise` has the keyed random numbers, `batches` the clean and the noisy batch, `base` the Objective, `single_stream` and
`two_streams` the published objectives, `registry` the table of their names, `loss` the loss of one batch.
"""

from __future__ import annotations

from dlm_bridge.objectives.base import Objective
from dlm_bridge.objectives.batches import IGNORE_INDEX, NoisyBatch, document_level
from dlm_bridge.objectives.loss import diffusion_loss, divisors, mean_loss, weighted_loss
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.registry import (
    OBJECTIVES,
    build_objective,
    check_objective,
    family_objective,
    mask_token_id,
)
from dlm_bridge.objectives.single_stream import MaskedDiffusion, NextTokenPrediction, ShiftedDiffusion, cart_weights
from dlm_bridge.objectives.two_streams import (
    BlockDiffusion,
    ComplementaryBlockDiffusion,
    NemotronDiffusion,
    TwoStreamObjective,
    WeDLMDiffusion,
)

__all__ = [
    "IGNORE_INDEX",
    "OBJECTIVES",
    "BlockDiffusion",
    "ComplementaryBlockDiffusion",
    "MaskedDiffusion",
    "NemotronDiffusion",
    "NextTokenPrediction",
    "NoisyBatch",
    "Objective",
    "ShiftedDiffusion",
    "TwoStreamObjective",
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
