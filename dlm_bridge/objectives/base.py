"""Base class of the objectives: which positions count, loss weights and normalisers; and the loss of one batch."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F  # noqa: N812

from dlm_bridge.attention.masks import AttentionPattern, MaskDescriptor
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.batches import IGNORE_INDEX, CleanBatch, NoisyBatch
from dlm_bridge.objectives.losses import Certainty, balanced_weights, position_losses
from dlm_bridge.objectives.noise import Uniforms

Weighting = Literal["level", "fraction", "uniform", "linear", "cart", "bound", "clipped", "dynamic"]
Normalisation = Literal["tokens", "sequences", "predicted"]
NoiseName = Literal["mask", "uniform", "hybrid"]


@dataclass(frozen=True)
class Objective(abc.ABC):
    """A training objective: clean tokens and random numbers in, a noisy batch out, and the loss of its logits.

    A fraction `length_variation` of the sequences is truncated to a length uniform on 1..L.

    `loss_weighting` is the weight of a masked position: "level", one over the probability p that masked it;
    "fraction", one over the masked fraction of its document, which then has at least one mask (MegaDLMs); "uniform",
    one; "linear", 1 - p.

    `loss_normalisation` is the divisor of the weighted sum over the global batch: "tokens", the positions that count;
    "predicted", those with a loss; "sequences", the documents, with each position's weight over the number of
    positions that count in its document (LLaDA's fine-tuning: the mean over answers of any length).

    `noise_range` has the lowest and the highest probability of masking, in place of `eps` and 1. `certainty` adds
    certainty-forcing to the loss of each position, under the same weight. With `ordinary_mask` texts contain the mask
    token, which is noised and predicted as any other: only `corrupt` knows which positions are masks.

    The class attributes are the objective's capabilities, which engines, planning and evaluation read.
    """

    # The models that it fits: with another attention pattern or shift they would be sampled differently than trained.
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    shift: ClassVar[bool] = False  # logits[i - 1] predicts token i
    families: ClassVar[tuple[str, ...]] = ()  # the only families that have it; () for no restriction
    also: ClassVar[tuple[str, ...]] = ()  # families of another attention pattern that support it too
    masks: ClassVar[bool] = True  # False: no mask token is needed
    noise_ranges: ClassVar[bool] = True  # False: it takes no `noise_range`
    forces_certainty: ClassVar[bool] = True  # False: it takes no `certainty`
    noise_process: ClassVar[NoiseName] = "mask"  # what a position's token becomes
    trajectories: ClassVar[bool] = False  # it needs the tokens' commit steps
    resizes: ClassVar[bool] = False  # tokens move within a row, which holds one text
    streams: ClassVar[int] = 1  # 2 for [noisy | clean], in blocks of `block_size`, with its own mask and position ids
    own_positions: ClassVar[bool] = False  # position ids differ from row to row
    exact_block_masks: ClassVar[bool] = False  # masks round(n p) tokens of a block, not each with probability p
    answer_blocks: ClassVar[bool] = False  # blocks are counted from a row's first counted token
    samples_clean_stream: ClassVar[bool] = False  # text is drawn from what the clean stream predicts, token by token
    terms: ClassVar[int] = 1  # K, sums with a divisor of their own
    tokens_read: ClassVar[int] = 1  # input tokens of the model per token of a sequence
    loss_fraction: ClassVar[float] = 0.5  # expected positions with a loss per token; noise levels are uniform
    weightings: ClassVar[tuple[Weighting, ...]] = ("level", "fraction", "uniform")
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("tokens", "sequences", "predicted")

    mask_token_id: int
    eps: float = 1e-3
    length_variation: float = 0.0
    loss_weighting: Weighting = "level"
    loss_normalisation: Normalisation = "tokens"
    noise_range: tuple[float, float] | None = None
    certainty: Certainty | None = None
    ordinary_mask: bool = False

    def __post_init__(self) -> None:
        if self.noise_range is not None and not self.noise_ranges:
            raise DlmBridgeError(f"--noise-range: {type(self).__name__} has noise levels of its own")
        if self.certainty is not None and not self.forces_certainty:
            raise DlmBridgeError(f"--certainty-weight: {type(self).__name__} has losses besides that of its masks")
        for name, known in (("loss_weighting", self.weightings), ("loss_normalisation", self.normalisations)):
            if getattr(self, name) not in known:
                raise DlmBridgeError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: {type(self).__name__} takes {', '.join(known)}"
                )

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        """Constructor arguments from a model's configuration. Raises DlmBridgeError where one is missing."""
        return {}

    def noise(
        self,
        input_ids: torch.Tensor,
        uniforms: Uniforms,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        commit_steps: torch.Tensor | None = None,
    ) -> NoisyBatch:
        """Mask a clean batch.

        Args:
            input_ids: [B, L] clean tokens.
            uniforms: of the same B and L.
            labels: [B, L], -100 (`IGNORE_INDEX`) where a position is never masked and not counted, else the target.
            attention_mask: [B, L], zero at padding, which is never masked and not counted.
            documents: [B, L] int, of packed rows: a number for each document, equal at its tokens and other than its
                neighbours'. Each is noised, positioned and attended as if it stood alone, at its own `document_level`.
            commit_steps: [B, L] int, the step of a recorded trajectory that committed each token, -1 where none did.
        """
        uniforms = uniforms.to(input_ids.device)
        real = None if attention_mask is None else attention_mask.to(input_ids.device).bool()
        if self.length_variation > 0:
            real = self._truncate(uniforms, input_ids.shape[1], real)
        counted = torch.ones_like(input_ids, dtype=torch.bool) if real is None else real
        if labels is not None:
            counted = counted & (labels != IGNORE_INDEX)
        numbers = None if documents is None else documents.to(input_ids.device)
        targets = input_ids if labels is None else labels
        steps = None if commit_steps is None else commit_steps.to(input_ids.device).long()
        noisy = self.corrupt(CleanBatch(input_ids, targets, counted, real, numbers, steps), uniforms)
        return noisy if self.certainty is None else replace(noisy, certainty=self.certainty)

    @property
    def model_config(self) -> dict[str, Any]:
        """What the config of a model that is trained so says of its noise, for samplers and evaluation."""
        return {"noise_process": self.noise_process}

    @property
    def mask_token(self) -> int | None:
        """The mask token, which no data may have; None for a model without one, or with one that texts contain."""
        return None if self.ordinary_mask or self.mask_token_id < 0 else self.mask_token_id

    @abc.abstractmethod
    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        """The noisy batch of a clean one."""

    def loss_sum(self, logits_MV: torch.Tensor, noisy: NoisyBatch) -> torch.Tensor:
        """[K] the weighted losses summed over the positions, in fp32. Zero, with a graph, where M is 0."""
        losses_M = position_losses(logits_MV.float(), noisy.targets, noisy.noise, noisy.certainty)
        if noisy.terms is None:
            return (losses_M * noisy.weights).sum()[None]
        weights_M = noisy.weights
        if noisy.rows is not None:
            weights_M = balanced_weights(weights_M, losses_M, noisy.terms, noisy.rows, len(noisy.input_ids))
        losses_M = losses_M * weights_M
        return torch.stack([losses_M[noisy.terms == term].sum() for term in range(len(noisy.normaliser))])

    def _truncate(self, uniforms: Uniforms, length: int, real: torch.Tensor | None) -> torch.Tensor | None:
        """Positions left after the length variation; None where no row is truncated and none was padded."""
        cut_B = uniforms.cut < self.length_variation
        if not bool(cut_B.any()):
            return real
        lengths_B = torch.where(cut_B, 1 + (uniforms.cut_length * length).long().clamp(max=length - 1), length)
        kept = torch.arange(length, device=lengths_B.device) < lengths_B[:, None]
        return kept if real is None else kept & real

    def mask_probability(self, clean: CleanBatch, uniforms: Uniforms) -> torch.Tensor:
        """[B, L] the masking probability of each sequence, p = (1 - eps) t + eps."""
        return self.probability(clean.noise_levels(uniforms.level)).expand_as(clean.input_ids)

    def probability(self, levels: torch.Tensor) -> torch.Tensor:
        """The masking probabilities of noise levels t, which are uniform on [0, 1)."""
        low, high = (self.eps, 1) if self.noise_range is None else self.noise_range
        return (high - low) * levels + low

    def sample_mask(
        self, clean: CleanBatch, p_BL: torch.Tensor, uniforms: Uniforms, candidates: torch.Tensor
    ) -> torch.Tensor:
        """[B, L] bool: each position of `candidates` with its probability."""
        mask = (uniforms.token < p_BL) & candidates
        if self.loss_weighting == "fraction":
            mask = mask | (
                (clean.count_per_document(mask) == 0) & clean.lowest_per_document(uniforms.token, candidates)
            )
        return mask

    def position_weights(
        self, clean: CleanBatch, p_BL: torch.Tensor, mask: torch.Tensor, candidates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, L] fp32 weights of the positions in `mask`, which are some of `candidates`, and the normaliser [1]."""
        if self.loss_weighting == "fraction":
            p_BL = clean.count_per_document(mask) / clean.count_per_document(candidates)
        weights_BL = torch.ones_like(p_BL) if self.loss_weighting == "uniform" else 1 / p_BL
        return self.normalise_weights(clean, weights_BL, mask, candidates)

    def normalise_weights(
        self, clean: CleanBatch, weights_BL: torch.Tensor, mask: torch.Tensor, candidates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights under `loss_normalisation`, and the normaliser [1]."""
        if self.loss_normalisation == "sequences":
            return weights_BL / clean.count_per_document(candidates), total(clean.num_documents(candidates))
        return weights_BL, total(candidates if self.loss_normalisation == "tokens" else mask)

    def counted_positions(self, mask: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """`NoisyBatch.counted` of one stream."""
        return mask if self.loss_normalisation == "predicted" else candidates

    def attention_inputs(self, clean: CleanBatch) -> dict[str, Any]:
        """Attention mask and position ids as fields of a batch of the noisy tokens alone."""
        if not clean.packed:
            return {"attention_mask": clean.real, "mask_descriptor": None, "position_ids": None}
        rule = MaskDescriptor.causal if "causal" in self.attention_patterns else MaskDescriptor.bidirectional
        return {
            "attention_mask": clean.real,
            "mask_descriptor": rule(clean.mask_documents),
            "position_ids": clean.positions,
        }


def total(value: torch.Tensor) -> torch.Tensor:
    """A sum as one element of a normaliser."""
    return value.sum().double()[None]


def diffusion_loss(
    forward: Callable[..., torch.Tensor],
    objective: Objective,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    generator: torch.Generator,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The loss of one clean batch, a scalar: what `model(input_ids, labels=..., generator=...)` returns.

    Args:
        forward: called as forward(input_ids=..., attention_mask=..., position_ids=..., logits_to_keep=mask, **kwargs),
            gives the logits [M, V] of the positions in `mask`.
        labels: [B, L] clean tokens, -100 where a position is never masked and not counted.
        generator: where the noise comes from.
        attention_mask: [B, L], zero at padding; or a 4-D mask, with padding only in `labels`.

    Raises:
        DlmBridgeError: an own 4-D mask or own positions, where the objective makes its own or moves tokens.
    """
    own_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 4 else None
    if objective.streams == 2 and (own_mask is not None or position_ids is not None):
        raise DlmBridgeError(
            f"{type(objective).__name__} makes the mask and the positions of its two streams itself: pass a 2-D "
            "attention_mask and no position_ids"
        )
    if objective.resizes and (own_mask is not None or position_ids is not None):
        raise DlmBridgeError(f"{type(objective).__name__} moves tokens: pass a 2-D attention_mask and no position_ids")
    rows, length = input_ids.shape
    replaces = objective.noise_process != "mask"
    uniforms = Uniforms.drawn(generator, rows, length, replaces=replaces, spans=objective.resizes)
    noisy = objective.noise(input_ids, uniforms, labels, None if own_mask is not None else attention_mask)
    logits_MV = forward(
        input_ids=noisy.input_ids,
        attention_mask=noisy.model_mask() if own_mask is None else own_mask,
        position_ids=noisy.position_ids if position_ids is None else position_ids,
        logits_to_keep=noisy.mask,
        **kwargs,
    )
    return mean_loss(objective.loss_sum(logits_MV, noisy), noisy)


def mean_loss(sums_K: torch.Tensor, noisy: NoisyBatch) -> torch.Tensor:
    """The loss of one batch alone, from its sums; zero where there is nothing to predict."""
    return (sums_K / divisors(noisy.normaliser)).sum()


def divisors(normaliser_K: torch.Tensor) -> torch.Tensor:
    """What sums are divided by, in fp32: a sum over nothing stays zero."""
    return torch.where(normaliser_K > 0, normaliser_K, 1.0).float()


def weighted_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    loss_weights: torch.Tensor,
    logits_to_keep: int | torch.Tensor = 0,
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss of a batch that `DiffusionCollator` has noised, a scalar.

    Args:
        logits: [B, S, V], or [M, V] of the positions in a boolean `logits_to_keep`.
        labels: [B, S] the token that each position's logits predict, -100 where a position does not count. A label
            whose weight is zero only counts.
        loss_weights: [B, S] fp32.
        num_items: the divisor; the number of labels where None.
    """
    if isinstance(logits_to_keep, torch.Tensor) and logits_to_keep.dtype == torch.bool:
        kept_BS = logits_to_keep
    elif logits.shape[:2] == labels.shape:
        kept_BS = loss_weights != 0
        logits = logits[kept_BS]
    else:
        raise DlmBridgeError("loss_weights need the logits of every position, or a boolean logits_to_keep [B, S]")
    losses = F.cross_entropy(logits.float(), labels[kept_BS], reduction="none", ignore_index=IGNORE_INDEX)
    divisor = labels.ne(IGNORE_INDEX).sum().clamp(min=1) if num_items is None else num_items
    return (losses * loss_weights[kept_BS]).sum() / divisor
