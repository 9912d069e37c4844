"""Next-token prediction, for the autoregressive families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dlm_bridge.models.spec import Topology
from dlm_bridge.train.objectives.base import Objective, total
from dlm_bridge.train.objectives.hybrid import next_tokens
from dlm_bridge.train.objectives.noise import NoisyBatch, Uniforms, one_earlier


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

    def corrupt(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        counted: torch.Tensor,
        real: torch.Tensor | None,
        uniforms: Uniforms,
    ) -> NoisyBatch:
        keep = next_tokens(counted, real)
        return NoisyBatch(
            input_ids=input_ids,
            attention_mask=real,
            position_ids=None,
            mask=keep,
            counted=keep,
            targets=one_earlier(targets)[keep],
            weights=torch.ones(int(keep.sum()), device=input_ids.device),
            terms=None,
            normaliser=total(keep),
        )
