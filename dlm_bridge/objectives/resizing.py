"""DreamOn's objective: a masked span whose length the model corrects, with masks to expand and masks to delete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.lazy_import import LazyModule
from dlm_bridge.objectives.base import Normalisation, Objective, Weighting, total
from dlm_bridge.objectives.batches import CleanBatch, NoisyBatch, shift_left
from dlm_bridge.objectives.noise import Uniforms

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

START, END, DELETIONS, SCHEDULE = range(4)  # columns of `Uniforms.span`


@dataclass(frozen=True)
class DreamOnDiffusion(Objective):
    """DreamOn's objective (arXiv 2602.01326; src/trainer of DreamLM/DreamOn 8a0a549, middle_strategy "random").

    Of the T counted tokens of a row without the delete token (which is the end of text), a middle [a, b) is drawn: a
    on 1..T-1, b on a+1..T. With t ~ U(0, 1),

        each token of the middle is masked with probability t, independently;
        0..max_deletions-1 masks follow the middle, as many as fit into the row: their label is the delete token;
        in the middle, a mask that is followed by another mask is merged with it, with probability q: its label becomes
        the expand token, the mask after it is removed, and the rest of the row moves to the left. A merged mask merges
        with the next one in the same way.

    q is `merge_probability` in half of the rows (`constant_merges`), and `merge_probability` times the unmasked
    fraction of the middle in the others. The loss is the cross-entropy of the masks' labels with weights 1 - t,
    divided by their number, where the deletions of a row count as one token: each weighs (1 - t) / (deletions of the
    row).

    Rows keep their length L: a row that grows beyond it loses its end.
    """

    shift: ClassVar[bool] = True
    families: ClassVar[tuple[str, ...]] = ("dreamon",)
    resizes: ClassVar[bool] = True
    forces_certainty: ClassVar[bool] = False
    loss_fraction: ClassVar[float] = 0.25
    weightings: ClassVar[tuple[Weighting, ...]] = ("linear",)
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted",)

    eps: float = 0.0
    loss_weighting: Weighting = "linear"
    loss_normalisation: Normalisation = "predicted"
    expand_token_id: int = -1
    delete_token_id: int = -1
    max_deletions: int = 64
    merge_probability: float = 0.5
    constant_merges: float = 0.5

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        """Expand and delete tokens of the config. Raises CheckpointError for a token that is missing or outside the
        vocabulary."""
        found = {}
        for name, key in (("expand_token_id", "expand_token_id"), ("delete_token_id", "eos_token_id")):
            token = getattr(config, key, None)
            if type(token) is not int or not 0 <= token < config.vocab_size:
                raise CheckpointError(
                    "config.json", f"{key} {token!r} is not a token of the vocabulary of {config.vocab_size}: set it"
                )
            found[name] = token
        return found

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        if clean.packed:
            raise SettingError("packing", "DreamOn supports one text per row: disable packing and document attention")
        assert uniforms.span is not None, "Uniforms.drawn needs spans=True"
        length = clean.input_ids.shape[1]
        t_B1 = self.probability(clean.noise_levels(uniforms.level))
        middle = self._middle(clean, uniforms.span)
        masked = middle & (uniforms.token < t_B1)
        merging_B1 = self._merge_probability(middle, masked, uniforms.span)
        # Slots: the columns of the row, with extra ones for the deletions after its middle.
        order = torch.arange(length, device=middle.device)
        last_B1 = torch.where(middle, order, -1).amax(dim=1, keepdim=True)
        deletions_B1 = (uniforms.span[:, DELETIONS, None] * self.max_deletions).long()
        deletions_B1 = torch.where(last_B1 >= 0, torch.minimum(deletions_B1, length - 1 - last_B1), 0)
        slots = torch.arange(length + self.max_deletions - 1, device=middle.device)
        behind_BE = slots - last_B1  # 1, 2, ... for deletions
        deleting = (behind_BE >= 1) & (behind_BE < self.max_deletions)
        column_BE = torch.where(behind_BE < self.max_deletions, slots, slots - self.max_deletions + 1).clamp(
            max=length - 1
        )
        exists = torch.where(deleting, behind_BE <= deletions_B1, clean.real_mask.gather(1, column_BE))
        masks = exists & (deleting | masked.gather(1, column_BE))
        expanding = masks & ~deleting & shift_left(masks) & (uniforms.block.gather(1, column_BE) < merging_B1)
        taken_in = torch.cat([torch.zeros_like(expanding[:, :1]), expanding[:, :-1]], dim=1)
        labels = clean.targets.gather(1, column_BE)
        labels = labels.masked_fill(deleting, self.delete_token_id).masked_fill(expanding, self.expand_token_id)
        tokens = clean.input_ids.gather(1, column_BE).masked_fill(masks, self.mask_token_id)
        # Move the kept slots to the left.
        kept = exists & ~taken_in
        moved_BL = (~kept).long().argsort(dim=1, stable=True)[:, :length]
        real = kept.gather(1, moved_BL)
        mask, deleting = (values.gather(1, moved_BL) & real for values in (masks, deleting))
        counts_B1 = deleting.sum(dim=1, keepdim=True)
        weights_BL = (1 - t_B1) / torch.where(deleting, counts_B1, 1)
        return NoisyBatch(
            input_ids=tokens.gather(1, moved_BL).masked_fill(~real, self.delete_token_id),
            attention_mask=real,
            mask_descriptor=None,
            position_ids=None,
            mask=shift_left(mask),  # the first token of a row is never in its middle
            counted=shift_left(mask),
            targets=labels.gather(1, moved_BL)[mask],
            weights=weights_BL[mask],
            normaliser=total(mask & ~deleting) + total(counts_B1 > 0),
        )

    def _middle(self, clean: CleanBatch, span_BK: torch.Tensor) -> torch.Tensor:
        """[B, L] bool: the middle of each row; the only candidate of a row that has a single one."""
        candidates = clean.counted & clean.preceded & (clean.input_ids != self.delete_token_id)
        count_B1 = candidates.sum(dim=1, keepdim=True)
        start_B1 = torch.where(count_B1 > 1, 1 + (span_BK[:, START, None] * (count_B1 - 1)).long(), 0)
        end_B1 = start_B1 + 1 + (span_BK[:, END, None] * (count_B1 - start_B1)).long()
        rank = candidates.cumsum(dim=1) - 1
        return candidates & (rank >= start_B1) & (rank < end_B1)

    def _merge_probability(self, middle: torch.Tensor, masked: torch.Tensor, span_BK: torch.Tensor) -> torch.Tensor:
        """[B, 1] merge probability q of each row."""
        masked_B1 = masked.sum(dim=1, keepdim=True) / middle.sum(dim=1, keepdim=True).clamp(min=1)
        constant_B1 = span_BK[:, SCHEDULE, None] < self.constant_merges
        return self.merge_probability * torch.where(constant_B1, 1.0, 1 - masked_B1)
