"""What all objectives share: which positions count, shortened sequences, and the weighted cross-entropy."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.models.spec import Topology
from dlm_bridge.models.visibility import Visibility
from dlm_bridge.train.objectives.clean import Clean
from dlm_bridge.train.objectives.noise import IGNORE, NoisyBatch, Uniforms


@dataclass(frozen=True)
class Objective(abc.ABC):
    """A training objective: clean tokens and random numbers in, a noisy batch out, and the loss of its logits.

    A share `length_variation` of the sequences is cut to a length uniform on 1..L.
    """

    # The models that it fits: another topology or shift would train them for what they are not sampled with.
    topologies: ClassVar[tuple[Topology, ...]] = ("bidirectional",)
    shift: ClassVar[bool] = False  # logits[i - 1] predicts token i
    families: ClassVar[tuple[str, ...]] = ()  # where only these have it
    also: ClassVar[tuple[str, ...]] = ()  # families that are sampled this way too, where they are asked to
    masks: ClassVar[bool] = True  # False: it has no use for a mask token
    terms: ClassVar[int] = 1  # K, sums with a divisor of their own
    tokens_read: ClassVar[int] = 1  # tokens that the model reads for each token of a sequence

    mask_token_id: int
    eps: float = 1e-3
    length_variation: float = 0.0

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        """What a model's configuration says about the objective, as constructor arguments."""
        return {}

    def noise(
        self,
        input_ids: torch.Tensor,
        uniforms: Uniforms,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
    ) -> NoisyBatch:
        """Mask a clean batch.

        Args:
            input_ids: [B, L] clean tokens.
            uniforms: of the same B and L.
            labels: [B, L], -100 (`IGNORE`) where a position is never masked and not counted, else the target.
            attention_mask: [B, L], zero at padding, which is never masked and not counted.
            documents: [B, L] int, of packed rows: a number for each document, equal at its tokens and other than its
                neighbours'. Each is noised, positioned and attended as if it stood alone, at its own `document_level`.
        """
        uniforms = uniforms.to(input_ids.device)
        real = None if attention_mask is None else attention_mask.to(input_ids.device).bool()
        if self.length_variation > 0:
            real = self._cut(uniforms, input_ids.shape[1], real)
        counted = torch.ones_like(input_ids, dtype=torch.bool) if real is None else real
        if labels is not None:
            counted = counted & (labels != IGNORE)
        numbers = None if documents is None else documents.to(input_ids.device)
        targets = input_ids if labels is None else labels
        return self.corrupt(Clean(input_ids, targets, counted, real, numbers), uniforms)

    @abc.abstractmethod
    def corrupt(self, clean: Clean, uniforms: Uniforms) -> NoisyBatch:
        """The noisy batch of a clean one."""

    def loss_sum(self, logits_MV: torch.Tensor, noisy: NoisyBatch) -> torch.Tensor:
        """[K] the weighted cross-entropy summed over the positions, in fp32. Zero, with a graph, where M is 0."""
        losses_M = F.cross_entropy(logits_MV.float(), noisy.targets, reduction="none") * noisy.weights
        if noisy.terms is None:
            return losses_M.sum()[None]
        return torch.stack([losses_M[noisy.terms == term].sum() for term in range(len(noisy.normaliser))])

    def _cut(self, uniforms: Uniforms, length: int, real: torch.Tensor | None) -> torch.Tensor | None:
        """Positions that are left after the length variation; None where no row is cut and none was padded."""
        cut_B = uniforms.cut < self.length_variation
        if not bool(cut_B.any()):
            return real
        lengths_B = torch.where(cut_B, 1 + (uniforms.cut_length * length).long().clamp(max=length - 1), length)
        kept = torch.arange(length, device=lengths_B.device) < lengths_B[:, None]
        return kept if real is None else kept & real

    def probability(self, clean: Clean, uniforms: Uniforms) -> torch.Tensor:
        """[B, L] the masking probability of each sequence, p = (1 - eps) t + eps."""
        return ((1 - self.eps) * clean.levels(uniforms.level) + self.eps).expand_as(clean.input_ids)

    def placed(self, clean: Clean) -> dict[str, Any]:
        """Who looks at whom and the position ids, as fields of a batch of the noisy tokens alone."""
        if not clean.packed:
            return {"attention_mask": clean.real, "visibility": None, "position_ids": None}
        rule = Visibility.causal if "causal" in self.topologies else Visibility.bidirectional
        return {
            "attention_mask": clean.real,
            "visibility": rule(clean.apart),
            "position_ids": clean.positions,
        }


def total(value: torch.Tensor) -> torch.Tensor:
    """A sum as one element of a normaliser."""
    return value.sum().double()[None]
