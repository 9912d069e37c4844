"""Block diffusion that trains edits of committed tokens: rewriting (LLaDA2.1), and deletion and insertion (LLaDA2.2).

A draft of a segment, the m answer tokens of one block, is compared with the m tokens that should stand there. Where
tokens are missing or superfluous, the labels are those of LLaDA2.2's technical report (inclusionAI/LLaDA2.X f402f0b,
section 3.1):

    anchors = the pairs of a longest common subsequence of draft and target, in which a mask matches any token
    of each anchor: the target token
    of the draft tokens between two anchors: as many target tokens as stand between these, then DELETE
    of an anchor before which the target has more tokens than the draft: INSERT
    of draft tokens behind the last anchor: DELETE

What the report leaves open: of equally long subsequences the one with the most tokens that are no masks is taken,
matched from the end; and a mask is matched to the target position nearest to its own that the other pairs allow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.base import total
from dlm_bridge.objectives.batches import CleanBatch, NoisyBatch, preceded
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.two_streams import BlockDiffusion

# Odd multipliers of Knuth's hash: independent numbers out of the 24 bits of one.
TOKEN, OPERATION, KIND = 2654435761, 2246822519, 3266489917


class Edit(IntEnum):
    """What a label asks for at a draft's position."""

    KEEP = 0
    SUBSTITUTE = 1
    DELETE = 2
    INSERT = 3  # a new position before this one


@dataclass(frozen=True)
class EditingBlockDiffusion(BlockDiffusion):
    """Block diffusion that trains edits as well: LLaDA2.1's mixture of mask-to-token and token-to-token (technical
    report of inclusionAI/LLaDA2.X f402f0b, section 3.1).

    Masks as in block diffusion. Of the counted tokens that are left, each is replaced by a random one with probability
    `edit_probability`, and the model predicts the clean token at all of them, replaced or kept; in LLaDA2.2's report
    the edits are called keep and substitute. The loss is that of the masks plus `editing_weight` times the mean cross-
    entropy of the others. Neither number is published.

    With `indel_probability` each token of a segment is missing with half of that probability, or has one too many
    before it: itself again, or a random token. The draft is cut, or filled with masks, to its length, then masked and
    replaced as above, and the labels are those of the module's docstring, with LLaDA2.2's two edit tokens. The
    report's drafts are the model's own, of rounds that it does not describe; these stand in for them, as random tokens
    do for the model's wrong ones.
    """

    forces_certainty: ClassVar[bool] = False
    loss_fraction: ClassVar[float] = 1.0
    terms: ClassVar[int] = 2

    vocabulary_size: int = 0
    edit_probability: float = 0.1
    editing_weight: float = 1.0
    indel_probability: float = 0.0
    delete_token_id: int | None = None
    insert_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("edit_probability", "indel_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise DlmBridgeError(f"--{name.replace('_', '-')} {getattr(self, name)} must be within 0 and 1")
        if self.indel_probability and (self.delete_token_id is None or self.insert_token_id is None):
            raise DlmBridgeError(
                f"--indel-probability {self.indel_probability}: the model's config names no delete_token_id and "
                "split_token_id, as LLaDA2.2's does"
            )

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        return super().settings(config) | {
            "vocabulary_size": config.vocab_size,
            "delete_token_id": getattr(config, "delete_token_id", None),
            "insert_token_id": getattr(config, "split_token_id", None),
        }

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        masked = super().corrupt(clean, uniforms)
        mask_BL, none_BL = masked.mask.chunk(2, dim=1)
        visible_BL = clean.counted & ~mask_BL
        # The number of a token that is not masked is uniform on [p, 1).
        p_BL = self.mask_probability(clean, uniforms)
        replaced_BL = visible_BL & (uniforms.token < p_BL + self.edit_probability * (1 - p_BL))
        tokens_BL, targets_BL = clean.input_ids, clean.targets
        segments = Segments.of(clean, self.block_size) if self.indel_probability else None
        if segments is not None:
            draft_SN, filled_SN = self._draft(segments, clean.input_ids, uniforms.token)
            tokens_BL = segments.put(tokens_BL, draft_SN)
            filled_BL = segments.put(torch.zeros_like(mask_BL), filled_SN)
            replaced_BL &= ~filled_BL
        tokens_BL = torch.where(replaced_BL, self._random_tokens(uniforms.token), tokens_BL)
        tokens_BL = torch.where(mask_BL, self.mask_token_id, tokens_BL)
        if segments is not None:
            masks_SN = segments.take(mask_BL | filled_BL)
            targets_BL = segments.put(targets_BL, self._labels(segments, tokens_BL, masks_SN, clean.targets))
        weights_BL = torch.full_like(p_BL, self.editing_weight).masked_scatter(mask_BL, masked.weights)
        return replace(
            masked,
            input_ids=torch.cat([tokens_BL, clean.input_ids], dim=1),
            mask=torch.cat([clean.counted, none_BL], dim=1),
            counted=torch.cat([clean.counted, none_BL], dim=1),
            targets=targets_BL[clean.counted],
            weights=weights_BL[clean.counted],
            terms=visible_BL[clean.counted].long(),
            normaliser=torch.cat([masked.normaliser, total(visible_BL)]),
        )

    def _draft(
        self, segments: Segments, tokens_BL: torch.Tensor, uniform_BL: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, N] the segments with tokens missing and too many; bool, which of them are masks that fill them."""
        tokens_SN, random_SN = segments.take(tokens_BL), segments.take(self._random_tokens(uniform_BL))
        operation_SN = segments.take(hashed(uniform_BL, OPERATION))
        half = self.indel_probability / 2
        missing_SN = segments.valid & (operation_SN < half)
        added_SN = segments.valid & (operation_SN >= half) & (operation_SN < 2 * half)
        again_SN = segments.take(hashed(uniform_BL, KIND)) < 0.5
        stops_SN = (segments.valid.long() - missing_SN.long() + added_SN.long()).cumsum(dim=1)
        draft = tokens_SN.new_full((len(tokens_SN), tokens_SN.shape[1] + 1), self.mask_token_id)
        filled = torch.ones_like(draft, dtype=torch.bool)
        for chosen_SN, place_SN, written_SN in (
            (segments.valid & ~missing_SN, stops_SN - 1, tokens_SN),
            (added_SN, stops_SN - 2, torch.where(again_SN, tokens_SN, random_SN)),
        ):  # one column more takes what is pushed out
            here_SN = chosen_SN & (place_SN < segments.lengths[:, None])
            column_SN = torch.where(here_SN, place_SN, tokens_SN.shape[1])
            draft.scatter_(1, column_SN, written_SN)
            filled.scatter_(1, column_SN, False)
        return draft[:, :-1], filled[:, :-1]

    def _labels(
        self, segments: Segments, tokens_BL: torch.Tensor, masks_SN: torch.Tensor, targets_BL: torch.Tensor
    ) -> torch.Tensor:
        """[S, N] what the model is to predict of each segment."""
        assert self.delete_token_id is not None
        assert self.insert_token_id is not None
        targets_SN = segments.take(targets_BL)
        edits_SN, places_SN = edit_labels(segments.take(tokens_BL), masks_SN, targets_SN, segments.valid)
        labels_SN = targets_SN.gather(1, places_SN)
        labels_SN = labels_SN.masked_fill(edits_SN == Edit.DELETE, self.delete_token_id)
        return labels_SN.masked_fill(edits_SN == Edit.INSERT, self.insert_token_id)

    def _random_tokens(self, uniform_BL: torch.Tensor) -> torch.Tensor:
        """[B, L] tokens, the mask token never: hashed, because the numbers themselves are from a narrow range where a
        token is replaced."""
        tokens_BL = (hashed(uniform_BL, TOKEN) * (self.vocabulary_size - 1)).long()
        return tokens_BL + (tokens_BL >= self.mask_token_id)


def hashed(uniform: torch.Tensor, multiplier: int) -> torch.Tensor:
    """Numbers in [0, 1), float64, made of the 24 bits of others by Knuth's multiplicative hash."""
    return (uniform.double() * 2**24).long() * multiplier % 2**32 / 2**32


@dataclass(frozen=True)
class Segments:
    """The S runs of counted positions within a block, each padded to the block's N positions."""

    places: torch.Tensor  # [S, N] int64, positions in the flattened batch; 0 where not valid
    valid: torch.Tensor  # [S, N] bool

    @classmethod
    def of(cls, clean: CleanBatch, block_size: int) -> Segments:
        """Those of a batch."""
        counted, blocks = clean.counted, clean.blocks(block_size)
        same = preceded(counted)
        same[:, 1:] &= blocks[:, 1:] == blocks[:, :-1]
        starts_M = (counted & (~same | clean.document_starts))[counted]
        segment_M, order_M = starts_M.long().cumsum(0) - 1, torch.arange(len(starts_M), device=counted.device)
        place_M = order_M - torch.where(starts_M, order_M, 0).cummax(0).values if len(order_M) else order_M
        shape = (int(starts_M.sum()), block_size)
        places = torch.zeros(shape, dtype=torch.long, device=counted.device)
        valid = torch.zeros(shape, dtype=torch.bool, device=counted.device)
        places[segment_M, place_M] = counted.flatten().nonzero()[:, 0]
        valid[segment_M, place_M] = True
        return cls(places, valid)

    @property
    def lengths(self) -> torch.Tensor:
        """[S]"""
        return self.valid.sum(dim=1)

    def take(self, values_BL: torch.Tensor) -> torch.Tensor:
        """[S, N] the values at the segments' positions; any where not valid."""
        return values_BL.flatten()[self.places]

    def put(self, values_BL: torch.Tensor, new_SN: torch.Tensor) -> torch.Tensor:
        """`values_BL` with the segments' new values."""
        result = values_BL.flatten().clone()
        result[self.places[self.valid]] = new_SN[self.valid]
        return result.view_as(values_BL)


def edit_labels(
    draft_SN: torch.Tensor, wild_SN: torch.Tensor, target_SN: torch.Tensor, valid_SN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, N] the `Edit` of each draft position, and the target position that it keeps or is substituted by (0 where it
    is neither); see the module's docstring. `wild_SN`: the draft's masks. Drafts and targets have the same `valid_SN`
    positions, the first ones."""
    width = draft_SN.shape[1]
    equal_SNN = (draft_SN[:, :, None] == target_SN[:, None, :]) & ~wild_SN[:, :, None]
    both_SNN = valid_SN[:, :, None] & valid_SN[:, None, :]
    # As long as possible, then with as few masks as possible.
    scores_SNN = torch.where(equal_SNN, width + 2, torch.where(wild_SN[:, :, None], width + 1, 0)) * both_SNN
    lengths_S = valid_SN.sum(dim=1)
    anchors_SN = _nearest(_common_subsequence(scores_SNN, lengths_S), wild_SN, lengths_S)

    order_N = torch.arange(width, device=draft_SN.device)
    anchored_SN = anchors_SN >= 0
    before_SN = _previous(torch.where(anchored_SN, order_N, -1))  # the draft position of the anchor before
    target_before_SN = _previous(anchors_SN)
    after_SN = _next(torch.where(anchored_SN, order_N, width), width)
    target_after_SN = _next(torch.where(anchored_SN, anchors_SN, width), width)
    offset_SN = order_N - before_SN  # from 1 on
    gap_SN = target_after_SN - target_before_SN - 1
    aligned_SN = ~anchored_SN & (after_SN < width) & (offset_SN <= gap_SN)
    edits_SN = torch.full_like(draft_SN, Edit.DELETE).masked_fill(aligned_SN, Edit.SUBSTITUTE)
    lacks_SN = anchors_SN - target_before_SN > offset_SN
    edits_SN = torch.where(anchored_SN, torch.where(lacks_SN, Edit.INSERT, Edit.KEEP), edits_SN)
    places_SN = torch.where(aligned_SN, target_before_SN + offset_SN, anchors_SN.clamp(min=0))
    return edits_SN, places_SN


def _common_subsequence(scores_SNN: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """[S, N] the target position that each draft position is paired with, -1 for none, in the common subsequence with
    the highest sum of scores (0: no pair), by the usual table of the best sums of all prefixes."""
    segments, width = scores_SNN.shape[:2]
    best = scores_SNN.new_zeros(segments, width + 1, width + 1)
    for place in range(width):
        paired_SN = torch.where(scores_SNN[:, place] > 0, best[:, place, :-1] + scores_SNN[:, place], 0)
        best[:, place + 1, 1:] = torch.maximum(best[:, place, 1:], paired_SN).cummax(dim=1).values
    found = torch.full((segments, width), -1, dtype=torch.long, device=scores_SNN.device)
    s, i, j = torch.arange(segments, device=scores_SNN.device), lengths_S, lengths_S
    for _ in range(2 * width):
        left, up = (j - 1).clamp(min=0), (i - 1).clamp(min=0)
        here, score = best[s, i, j], scores_SNN[s, up, left]
        pair = (i > 0) & (j > 0) & (score > 0) & (best[s, up, left] + score == here)
        found[s[pair], up[pair]] = left[pair]
        skip = ~pair & (best[s, up, j] == here)
        i, j = torch.where(pair | skip, up, i), torch.where(pair | ~skip, left, j)
    return found


def _nearest(anchors_SN: torch.Tensor, wild_SN: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    """The pairs of masks moved to the target position nearest to their own between the pairs before and after."""
    limit_SN = _next(torch.where(anchors_SN >= 0, anchors_SN, lengths_S[:, None]), lengths_S[:, None])
    moved, last_S = anchors_SN.clone(), torch.full_like(lengths_S, -1)
    for place in range(anchors_SN.shape[1]):
        anchor_S = anchors_SN[:, place]
        nearest_S = torch.full_like(anchor_S, place).clamp(min=last_S + 1).clamp(max=limit_SN[:, place] - 1)
        moved[:, place] = torch.where((anchor_S >= 0) & wild_SN[:, place], nearest_S, anchor_S)
        last_S = torch.where(anchor_S >= 0, moved[:, place], last_S)
    return moved


def _previous(values_SN: torch.Tensor) -> torch.Tensor:
    """The largest value before each position; -1 before the first."""
    shifted = torch.cat([torch.full_like(values_SN[:, :1], -1), values_SN[:, :-1]], dim=1)
    return shifted.cummax(dim=1).values


def _next(values_SN: torch.Tensor, end: int | torch.Tensor) -> torch.Tensor:
    """The smallest value behind each position; `end` behind the last."""
    last = torch.zeros_like(values_SN[:, :1]) + end
    return torch.cat([values_SN[:, 1:], last], dim=1).flip(1).cummin(dim=1).values.flip(1)
