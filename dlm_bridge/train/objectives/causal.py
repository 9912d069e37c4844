"""Next-token prediction, for the autoregressive families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.models.spec import Topology
from dlm_bridge.train.objectives.base import Normalisation, Objective, Weighting
from dlm_bridge.train.objectives.clean import Clean, one_earlier
from dlm_bridge.train.objectives.noise import NoisyBatch, Uniforms


@dataclass(frozen=True)
class NextToken(Objective):
    """The cross-entropy of every counted token given those before it, summed and divided by the number of tokens that
    are predicted (all but the first of a row): the loss of transformers' own classes, without the routers' auxiliary
    losses. Nothing is masked.
    """

    topologies: ClassVar[tuple[Topology, ...]] = ("causal",)
    shift: ClassVar[bool] = True
    masks: ClassVar[bool] = False
    weightings: ClassVar[tuple[Weighting, ...]] = ("uniform",)
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted", "sequences")

    mask_token_id: int = -1
    loss_weighting: Weighting = "uniform"
    loss_normalisation: Normalisation = "predicted"

    def corrupt(self, clean: Clean, uniforms: Uniforms) -> NoisyBatch:
        predicted = clean.counted & clean.preceded
        ones_BL = torch.ones(predicted.shape, device=predicted.device)
        weights_BL, normaliser = self.normalised(clean, ones_BL, predicted, predicted)
        keep = one_earlier(predicted)
        return NoisyBatch(
            input_ids=clean.input_ids,
            **self.placed(clean),
            mask=keep,
            counted=keep,
            targets=clean.targets[predicted],
            weights=weights_BL[predicted],
            terms=None,
            normaliser=normaliser,
        )
