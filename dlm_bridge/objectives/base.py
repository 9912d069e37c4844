"""Base class of training objectives (noise, loss weights, normalisers), and the loss of one batch."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dlm_bridge.attention.masks import AttentionPattern, MaskDescriptor
from dlm_bridge.errors import SettingError
from dlm_bridge.lazy_import import LazyModule
from dlm_bridge.objectives.batches import IGNORE_INDEX, CleanBatch, NoisyBatch
from dlm_bridge.objectives.losses import Certainty, balanced_weights, position_losses
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.settings import check_choice

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F  # noqa: N812
else:
    torch = LazyModule("torch", globals())
    F = LazyModule("torch.nn.functional", globals(), "F")

Weighting = Literal["level", "fraction", "uniform", "linear", "cart", "bound", "clipped", "dynamic"]
Normalisation = Literal["tokens", "sequences", "predicted"]
NoiseName = Literal["mask", "uniform", "hybrid"]


@dataclass(frozen=True)
class Objective(abc.ABC):
    """Training objective: turns clean tokens and random numbers into a noisy batch, and computes the loss of its
    logits.

    Class attributes describe the objective's capabilities; engines, planning and evaluation read them.

    Args:
        mask_token_id: the mask token.
        eps: lowest probability of masking.
        length_variation: fraction of the sequences that are truncated to a length uniform on 1..L.
        loss_weighting: weight of a masked position: "level", 1 / p, where p is its probability of being masked;
            "fraction", one over the masked fraction of its document, which then has at least one mask (MegaDLMs);
            "uniform", 1; "linear", 1 - p.
        loss_normalisation: divisor of the weighted sum over the global batch: "tokens", the number of positions that
            count; "predicted", the number of positions with a loss; "sequences", the number of documents, where each
            weight is divided by the number of positions that count in its document (as in LLaDA's fine-tuning, the
            mean over answers of any length).
        noise_range: lowest and highest probability of masking, in place of `eps` and 1.
        certainty: adds certainty-forcing to the loss of each position, with the same weight.
        ordinary_mask: texts may contain the mask token, which is noised and predicted like any other token; only
            `corrupt` knows which positions are masks.
    """

    # Supported models. With another attention pattern or shift, a model would be sampled differently than trained.
    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    shift: ClassVar[bool] = False  # logits[i - 1] predicts token i
    families: ClassVar[tuple[str, ...]] = ()  # families and forms that support it; (): no restriction
    also: ClassVar[tuple[str, ...]] = ()  # families of another attention pattern that also support it
    masks: ClassVar[bool] = True  # False: no mask token is needed
    noise_ranges: ClassVar[bool] = True  # False: `noise_range` is not supported
    forces_certainty: ClassVar[bool] = True  # False: `certainty` is not supported
    noise_process: ClassVar[NoiseName] = "mask"  # how tokens are corrupted
    trajectories: ClassVar[bool] = False  # True: needs the commit step of each token
    resizes: ClassVar[bool] = False  # True: tokens move within a row, and a row contains one text
    streams: ClassVar[int] = 1  # 2 for [noisy | clean], in blocks of `block_size`, with its own mask and position ids
    own_positions: ClassVar[bool] = False  # True: position ids differ from row to row
    exact_block_masks: ClassVar[bool] = False  # True: masks round(n p) tokens of a block, not each with probability p
    answer_blocks: ClassVar[bool] = False  # True: blocks are counted from a row's first counted token
    samples_clean_stream: ClassVar[bool] = False  # True: text is sampled from the clean stream, token by token
    terms: ClassVar[int] = 1  # K, the number of loss terms; each has its own divisor
    tokens_read: ClassVar[int] = 1  # input tokens of the model per token of a sequence
    loss_fraction: ClassVar[float] = 0.5  # expected number of positions with a loss per token
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
        name = type(self).__name__
        if self.noise_range is not None and not self.noise_ranges:
            raise SettingError("noise_range", f"{name} has its own noise levels")
        if self.certainty is not None and not self.forces_certainty:
            raise SettingError("certainty_weight", f"{name} has losses besides that of its masks")
        check_choice("loss_weighting", self.loss_weighting, self.weightings)
        check_choice("loss_normalisation", self.loss_normalisation, self.normalisations)

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        """Constructor arguments from a model's configuration. Raises CheckpointError if one is missing."""
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
        """Corrupt a clean batch.

        Args:
            input_ids: [B, L] clean tokens.
            uniforms: random numbers with the same B and L.
            labels: [B, L] targets; -100 (`IGNORE_INDEX`) at positions that are never masked and not counted.
            attention_mask: [B, L], zero at padding, which is never masked and not counted.
            documents: [B, L] int, for packed rows: an id per document, which differs from its neighbours' ids. Noise,
                positions and attention of each document are as if it were alone, with its own `document_level`.
            commit_steps: [B, L] int, the step of a recorded trajectory that committed each token; -1: none.
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
        """Entries for the config of the trained model that describe its noise, for samplers and evaluation."""
        return {"noise_process": self.noise_process}

    @property
    def mask_token(self) -> int | None:
        """The mask token, which training data must not contain. None for a model without a mask token, or whose mask
        token is an ordinary token."""
        return None if self.ordinary_mask or self.mask_token_id < 0 else self.mask_token_id

    @abc.abstractmethod
    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        """Create the noisy batch from a clean one."""

    def loss_sum(self, logits_MV: torch.Tensor, noisy: NoisyBatch) -> torch.Tensor:
        """[K] weighted losses, summed over positions in fp32. If M is 0, zeros that are connected to the graph."""
        return self.weighted_sums(
            position_losses(logits_MV.float(), noisy.targets, noisy.noise, noisy.certainty), noisy
        )

    def weighted_sums(self, losses_M: torch.Tensor, noisy: NoisyBatch) -> torch.Tensor:
        """[K] sums of the losses of a batch's positions, weighted."""
        if noisy.terms is None:
            return (losses_M * noisy.weights).sum()[None]
        weights_M = noisy.weights
        if noisy.rows is not None:
            weights_M = balanced_weights(weights_M, losses_M, noisy.terms, noisy.rows, len(noisy.input_ids))
        losses_M = losses_M * weights_M
        return torch.stack([losses_M[noisy.terms == term].sum() for term in range(len(noisy.normaliser))])

    def _truncate(self, uniforms: Uniforms, length: int, real: torch.Tensor | None) -> torch.Tensor | None:
        """Real positions after length variation; None if no row is truncated or padded."""
        cut_B = uniforms.cut < self.length_variation
        if not bool(cut_B.any()):
            return real
        lengths_B = torch.where(cut_B, 1 + (uniforms.cut_length * length).long().clamp(max=length - 1), length)
        kept = torch.arange(length, device=lengths_B.device) < lengths_B[:, None]
        return kept if real is None else kept & real

    def mask_probability(self, clean: CleanBatch, uniforms: Uniforms) -> torch.Tensor:
        """[B, L] masking probability of each sequence, p = (1 - eps) t + eps."""
        return self.probability(clean.noise_levels(uniforms.level)).expand_as(clean.input_ids)

    def probability(self, levels: torch.Tensor) -> torch.Tensor:
        """Masking probabilities for noise levels t, which are uniform on [0, 1)."""
        low, high = (self.eps, 1) if self.noise_range is None else self.noise_range
        return (high - low) * levels + low

    def sample_mask(
        self, clean: CleanBatch, p_BL: torch.Tensor, uniforms: Uniforms, candidates: torch.Tensor
    ) -> torch.Tensor:
        """[B, L] bool mask: each position of `candidates` is drawn with its probability."""
        mask = (uniforms.token < p_BL) & candidates
        if self.loss_weighting == "fraction":
            mask = mask | (
                (clean.count_per_document(mask) == 0) & clean.lowest_per_document(uniforms.token, candidates)
            )
        return mask

    def position_weights(
        self, clean: CleanBatch, p_BL: torch.Tensor, mask: torch.Tensor, candidates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, L] fp32 weights of the positions in `mask` (a subset of `candidates`), and the normaliser [1]."""
        if self.loss_weighting == "fraction":
            p_BL = clean.count_per_document(mask) / clean.count_per_document(candidates)
        weights_BL = torch.ones_like(p_BL) if self.loss_weighting == "uniform" else 1 / p_BL
        return self.normalise_weights(clean, weights_BL, mask, candidates)

    def normalise_weights(
        self, clean: CleanBatch, weights_BL: torch.Tensor, mask: torch.Tensor, candidates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights according to `loss_normalisation`, and the normaliser [1]."""
        if self.loss_normalisation == "sequences":
            return weights_BL / clean.count_per_document(candidates), total(clean.num_documents(candidates))
        return weights_BL, total(candidates if self.loss_normalisation == "tokens" else mask)

    def counted_positions(self, mask: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """`NoisyBatch.counted` for one stream."""
        return mask if self.loss_normalisation == "predicted" else candidates

    def attention_inputs(self, clean: CleanBatch) -> dict[str, Any]:
        """Attention mask and position ids for a batch with the noisy stream only, as fields of `NoisyBatch`."""
        if not clean.packed:
            return {"attention_mask": clean.real, "mask_descriptor": None, "position_ids": None}
        rule = MaskDescriptor.causal if "causal" in self.attention_patterns else MaskDescriptor.bidirectional
        return {
            "attention_mask": clean.real,
            "mask_descriptor": rule(clean.mask_documents),
            "position_ids": clean.positions,
        }


def total(value: torch.Tensor) -> torch.Tensor:
    """Sum as a normaliser [1], in float64."""
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
    """Loss of one clean batch, a scalar, as returned by `model(input_ids, labels=..., generator=...)`.

    Args:
        forward: called as forward(input_ids=..., attention_mask=..., position_ids=..., logits_to_keep=mask, **kwargs);
            returns the logits [M, V] at the positions in `mask`.
        labels: [B, L] clean tokens; -100 at positions that are never masked and not counted.
        generator: source of the noise.
        attention_mask: [B, L], zero at padding; or a 4-D mask, with padding only in `labels`.

    Raises:
        SettingError: a 4-D mask or position ids are passed, but the objective creates its own or moves tokens.
    """
    own_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 4 else None
    if (objective.streams == 2 or objective.resizes) and (own_mask is not None or position_ids is not None):
        name = type(objective).__name__
        raise SettingError("attention_mask", f"{name} creates its own masks: pass a 2-D mask and no `position_ids`")
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
    """Loss of a single batch from its sums; zero if there is nothing to predict."""
    return (sums_K / divisors(noisy.normaliser)).sum()


def divisors(normaliser_K: torch.Tensor) -> torch.Tensor:
    """Divisors of loss sums, in fp32; 1 for an empty sum, so that it stays zero."""
    return torch.where(normaliser_K > 0, normaliser_K, 1.0).float()


def weighted_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    loss_weights: torch.Tensor,
    logits_to_keep: int | torch.Tensor = 0,
    num_items: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss of a batch that `DiffusionCollator` has corrupted, a scalar.

    Args:
        logits: [B, S, V], or [M, V] at the positions in a boolean `logits_to_keep`.
        labels: [B, S] token that each position's logits predict; -100 at positions that do not count. A label with
            weight zero has no loss, but counts for the divisor.
        loss_weights: [B, S] fp32.
        num_items: the divisor; None: the number of labels.
    """
    if isinstance(logits_to_keep, torch.Tensor) and logits_to_keep.dtype == torch.bool:
        kept_BS = logits_to_keep
    elif logits.shape[:2] == labels.shape:
        kept_BS = loss_weights != 0
        logits = logits[kept_BS]
    else:
        raise SettingError("loss_weights", "need all logits, or a boolean `logits_to_keep` [B, S]")
    losses = F.cross_entropy(logits.float(), labels[kept_BS], reduction="none", ignore_index=IGNORE_INDEX)
    divisor = labels.ne(IGNORE_INDEX).sum().clamp(min=1) if num_items is None else num_items
    return (losses * loss_weights[kept_BS]).sum() / divisor
