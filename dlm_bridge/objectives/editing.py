"""Block diffusion that trains edits of committed tokens: rewriting (LLaDA2.1), and deletion and insertion (LLaDA2.2).

A draft of a segment (the m answer tokens of one block) is compared with the m target tokens. Missing and superfluous
tokens are labelled as in LLaDA2.2's technical report (inclusionAI/LLaDA2.X f402f0b, section 3.1):

    anchors: pairs of a longest common subsequence of draft and target, in which a mask matches any token
    label of an anchor: the target token; INSERT if the target has more tokens before it than the draft
    labels of the draft tokens between two anchors: the target tokens between them, in order, then DELETE
    label of draft tokens after the last anchor: DELETE

Choices that the report does not specify: among subsequences of equal length, the one with the most tokens other than
masks, matched from the end; a mask is matched to the allowed target position nearest to its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from dlm_bridge.errors import SettingError
from dlm_bridge.lazy_import import LazyModule
from dlm_bridge.objectives.base import total
from dlm_bridge.objectives.batches import CleanBatch, NoisyBatch, preceded
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.two_streams import BlockDiffusion

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

# Odd multipliers of Knuth's hash, which derive independent numbers from the 24 bits of one.
TOKEN, OPERATION, KIND = 2654435761, 2246822519, 3266489917


class Edit(IntEnum):
    """Edit operation at a position of a draft."""

    KEEP = 0
    SUBSTITUTE = 1
    DELETE = 2
    INSERT = 3  # a new position before this one


@dataclass(frozen=True)
class EditingBlockDiffusion(BlockDiffusion):
    """Block diffusion with edits: LLaDA2.1's mixture of mask-to-token and token-to-token (technical report of
    inclusionAI/LLaDA2.X f402f0b, section 3.1).

    Masks are those of block diffusion. Each other counted token is replaced by a random token with probability
    `edit_probability`, and the model predicts the clean token at all of these positions, replaced or not (LLaDA2.2's
    report calls the edits substitute and keep). The loss is that of the masks plus `editing_weight` times the mean
    cross-entropy of the other positions. The authors' values of both are not published.

    With `indel_probability` p, each token of a segment is missing with probability p / 2, or has a superfluous token
    before it (itself again, or a random token) with probability p / 2. The draft is truncated, or padded with masks,
    to its length, then masked and replaced as above; its labels are those of the module's docstring, with LLaDA2.2's
    two edit tokens. The report's drafts come from the model itself, in rounds that it does not describe; random edits
    replace them here, as random tokens replace the model's wrong tokens.
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
                raise SettingError(name, f"must be in [0, 1], not {getattr(self, name)}")
        if self.indel_probability and (self.delete_token_id is None or self.insert_token_id is None):
            raise SettingError(
                "indel_probability", "needs delete_token_id and split_token_id in config.json, as in LLaDA2.2's"
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
        # The uniform number of an unmasked token is uniform on [p, 1).
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
        """[S, N] segments with missing and superfluous tokens; [S, N] bool: the masks that pad them."""
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
        ):  # an extra column receives the tokens beyond the segment's length
            here_SN = chosen_SN & (place_SN < segments.lengths[:, None])
            column_SN = torch.where(here_SN, place_SN, tokens_SN.shape[1])
            draft.scatter_(1, column_SN, written_SN)
            filled.scatter_(1, column_SN, False)
        return draft[:, :-1], filled[:, :-1]

    def _labels(
        self, segments: Segments, tokens_BL: torch.Tensor, masks_SN: torch.Tensor, targets_BL: torch.Tensor
    ) -> torch.Tensor:
        """[S, N] labels of each segment."""
        assert self.delete_token_id is not None
        assert self.insert_token_id is not None
        targets_SN = segments.take(targets_BL)
        edits_SN, places_SN = edit_labels(segments.take(tokens_BL), masks_SN, targets_SN, segments.valid)
        labels_SN = targets_SN.gather(1, places_SN)
        labels_SN = labels_SN.masked_fill(edits_SN == Edit.DELETE, self.delete_token_id)
        return labels_SN.masked_fill(edits_SN == Edit.INSERT, self.insert_token_id)

    def _random_tokens(self, uniform_BL: torch.Tensor) -> torch.Tensor:
        """[B, L] random tokens without the mask token. The numbers are hashed because replaced tokens have numbers
        from a narrow range."""
        tokens_BL = (hashed(uniform_BL, TOKEN) * (self.vocabulary_size - 1)).long()
        return tokens_BL + (tokens_BL >= self.mask_token_id)


def hashed(uniform: torch.Tensor, multiplier: int) -> torch.Tensor:
    """Hash the 24 bits of uniform numbers to other numbers in [0, 1), float64 (Knuth's multiplicative hash)."""
    return (uniform.double() * 2**24).long() * multiplier % 2**32 / 2**32


@dataclass(frozen=True)
class Segments:
    """S segments, each a run of counted positions within a block, padded to the block's N positions."""

    places: torch.Tensor  # [S, N] int64, positions in the flattened batch; 0 if not valid
    valid: torch.Tensor  # [S, N] bool

    @classmethod
    def of(cls, clean: CleanBatch, block_size: int) -> Segments:
        """Segments of a batch."""
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
        """[S] number of positions of each segment."""
        return self.valid.sum(dim=1)

    def take(self, values_BL: torch.Tensor) -> torch.Tensor:
        """[S, N] values at the segments' positions; undefined if not valid."""
        return values_BL.flatten()[self.places]

    def put(self, values_BL: torch.Tensor, new_SN: torch.Tensor) -> torch.Tensor:
        """`values_BL` with the segments' new values."""
        result = values_BL.flatten().clone()
        result[self.places[self.valid]] = new_SN[self.valid]
        return result.view_as(values_BL)


def edit_labels(
    draft_SN: torch.Tensor, wild_SN: torch.Tensor, target_SN: torch.Tensor, valid_SN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, N] the `Edit` of each draft position; [S, N] the target position that it keeps or substitutes (else 0). See
    the module's docstring. `wild_SN`: masks of the drafts. Drafts and targets have the same `valid_SN` positions, at
    the start."""
    width = draft_SN.shape[1]
    equal_SNN = (draft_SN[:, :, None] == target_SN[:, None, :]) & ~wild_SN[:, :, None]
    both_SNN = valid_SN[:, :, None] & valid_SN[:, None, :]
    # The longest subsequence, then the one with the fewest masks.
    scores_SNN = torch.where(equal_SNN, width + 2, torch.where(wild_SN[:, :, None], width + 1, 0)) * both_SNN
    lengths_S = valid_SN.sum(dim=1)
    anchors_SN = _nearest(_common_subsequence(scores_SNN, lengths_S), wild_SN, lengths_S)

    order_N = torch.arange(width, device=draft_SN.device)
    anchored_SN = anchors_SN >= 0
    before_SN = _previous(torch.where(anchored_SN, order_N, -1))  # draft position of the previous anchor
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
    """[S, N] target position paired with each draft position (-1: none) in the common subsequence with the highest sum
    of scores (a score of 0: no pair), by dynamic programming over prefixes."""
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
    """Move the pairs of masks to the target position nearest to their own, between the previous and the next pair."""
    limit_SN = _next(torch.where(anchors_SN >= 0, anchors_SN, lengths_S[:, None]), lengths_S[:, None])
    moved, last_S = anchors_SN.clone(), torch.full_like(lengths_S, -1)
    for place in range(anchors_SN.shape[1]):
        anchor_S = anchors_SN[:, place]
        nearest_S = torch.full_like(anchor_S, place).clamp(min=last_S + 1).clamp(max=limit_SN[:, place] - 1)
        moved[:, place] = torch.where((anchor_S >= 0) & wild_SN[:, place], nearest_S, anchor_S)
        last_S = torch.where(anchor_S >= 0, moved[:, place], last_S)
    return moved


def _previous(values_SN: torch.Tensor) -> torch.Tensor:
    """Largest value before each position; -1 for the first position."""
    shifted = torch.cat([torch.full_like(values_SN[:, :1], -1), values_SN[:, :-1]], dim=1)
    return shifted.cummax(dim=1).values


def _next(values_SN: torch.Tensor, end: int | torch.Tensor) -> torch.Tensor:
    """Smallest value after each position; `end` for the last position."""
    last = torch.zeros_like(values_SN[:, :1]) + end
    return torch.cat([values_SN[:, 1:], last], dim=1).flip(1).cummin(dim=1).values.flip(1)
