"""Next-token prediction, for the autoregressive families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.models.spec import Topology
from dlm_bridge.train.objectives.base import Objective, total
from dlm_bridge.train.objectives.clean import Clean, one_earlier
from dlm_bridge.train.objectives.hybrid import next_tokens
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

    mask_token_id: int = -1

    def corrupt(self, clean: Clean, uniforms: Uniforms) -> NoisyBatch:
        keep = next_tokens(clean)
        return NoisyBatch(
            input_ids=clean.input_ids,
            **self.placed(clean),
            mask=keep,
            counted=keep,
            targets=one_earlier(clean.targets)[keep],
            weights=torch.ones(int(keep.sum()), device=keep.device),
            terms=None,
            normaliser=total(keep),
        )
