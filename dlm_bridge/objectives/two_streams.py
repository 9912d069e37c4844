"""Objectives over a clean and a noisy stream: block diffusion, its hybrids with next-token prediction, canvases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dlm_bridge.attention.masks import AttentionPattern, MaskDescriptor, StreamPattern
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.lazy_import import LazyModule
from dlm_bridge.objectives.base import Normalisation, Objective, Weighting, total
from dlm_bridge.objectives.batches import CleanBatch, NoisyBatch, shift_left
from dlm_bridge.objectives.noise import Uniforms

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch", globals())

# Columns of `Uniforms.block` for `CanvasDiffusion`: selection of the canvas, and its self-conditioning.
SELECTED, CONDITIONED = 0, 1


@dataclass(frozen=True)
class TwoStreamObjective(Objective):
    """Objective over [noisy | clean]: 2L tokens with position ids 0..L-1 in each stream, and blocks of `block_size`
    that start at a document's first token. Masks have their loss in the noisy stream."""

    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("block_causal",)
    streams: ClassVar[int] = 2
    tokens_read: ClassVar[int] = 2
    noisy_stream: ClassVar[StreamPattern] = "block"  # attention within a noisy block
    clean_stream: ClassVar[StreamPattern] = "block"  # attention within the clean stream

    block_size: int = 32

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        return {"block_size": required(config, "block_size")}

    def attention_inputs(self, clean: CleanBatch, order: torch.Tensor | None = None) -> dict[str, Any]:
        """Attention mask and position ids of both streams, as fields of a batch. `order` [B, L] is the clean position
        of each noisy token, permuted within its block."""
        documents, positions = clean.mask_documents, clean.positions
        noisy_documents, noisy_positions = documents, positions
        if order is not None:
            documents = documents.expand_as(order)
            noisy_documents = documents.gather(1, order)
            noisy_positions = positions.expand_as(order).gather(1, order)
        mask_descriptor = MaskDescriptor.two_streams(
            documents, positions, self.block_size, self.noisy_stream, self.clean_stream, noisy_documents
        )
        return {
            "attention_mask": clean.real,
            "mask_descriptor": mask_descriptor,
            "position_ids": torch.cat([noisy_positions, positions.expand_as(noisy_positions)], dim=1),
        }

    def block_levels(self, uniforms: Uniforms, clean: CleanBatch) -> torch.Tensor:
        """[B, L] noise level of each position's block."""
        return uniforms.block.gather(1, clean.blocks(self.block_size))


@dataclass(frozen=True)
class BlockDiffusion(TwoStreamObjective):
    """SDAR's objective (its public training code; the two streams are BD3-LM's, arXiv 2503.09573), also used by LLaDA2
    and DreamReasoner according to their reports.

    t per sequence (or per block), p = (1 - eps) t + eps; each position is masked with probability p; the loss is the
    cross-entropy at the masked positions over p, summed and divided by the number of counted positions.

    With `noise_range` (0.3, 0.8), `loss_weighting` "uniform" and `loss_normalisation` "predicted" it is LLaDA2's fine-
    tuning in dFactory (tasks/train_llada2_bd.py, 92b6890): the mean cross-entropy of the masked positions.

    dLLM's bd3lm checkpoints are A2D models trained with it; their config.json has a `block_size`.
    """

    also: ClassVar[tuple[str, ...]] = ("a2d_qwen3", "a2d_qwen2", "a2d_llama")

    level: Literal["sequence", "block"] = "sequence"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level == "block" and self.loss_weighting == "fraction":
            raise SettingError("loss_weighting", "fraction needs one noise level per sequence: use `objective=block`")

    def mask_probability(self, clean: CleanBatch, uniforms: Uniforms) -> torch.Tensor:
        """[B, L] masking probability of each sequence, or of each block."""
        if self.level == "block":
            return self.probability(self.block_levels(uniforms, clean))
        return super().mask_probability(clean, uniforms)

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        p_BL = self.mask_probability(clean, uniforms)
        mask = self.sample_mask(clean, p_BL, uniforms, clean.counted)
        weights_BL, normaliser = self.position_weights(clean, p_BL, mask, clean.counted)
        none = torch.zeros_like(mask)
        return NoisyBatch(
            input_ids=torch.cat([torch.where(mask, self.mask_token_id, clean.input_ids), clean.input_ids], dim=1),
            **self.attention_inputs(clean),
            mask=torch.cat([mask, none], dim=1),
            counted=torch.cat([self.counted_positions(mask, clean.counted), none], dim=1),
            targets=clean.targets[mask],
            weights=weights_BL[mask],
            normaliser=normaliser,
        )


@dataclass(frozen=True)
class ComplementaryBlockDiffusion(TwoStreamObjective):
    """Fast-dLLM v2's objective (arXiv 2509.26328 and its public modeling.py).

    t per block, p = (1 - eps) t + eps; each sequence becomes two rows with complementary masks; the loss is the mean
    cross-entropy of all masked positions, without weights, from the noisy logits one position earlier. The first token
    of a block is predicted by the noisy block before it; the first token of a document is never masked.
    """

    shift: ClassVar[bool] = True
    tokens_read: ClassVar[int] = 4
    weightings: ClassVar[tuple[Weighting, ...]] = ("uniform",)
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted", "sequences")

    loss_weighting: Weighting = "uniform"
    loss_normalisation: Normalisation = "predicted"

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        p_BL = self.probability(self.block_levels(uniforms, clean))
        predicted = clean.counted & clean.preceded
        below = uniforms.token < p_BL
        mask = torch.cat([below & predicted, ~below & predicted])
        # The two rows of a sequence mask each predicted position once.
        weights_BL, normaliser = self.position_weights(clean, p_BL, predicted, predicted)
        keep = torch.cat([shift_left(mask), torch.zeros_like(mask)], dim=1)
        twice = clean.repeated(2)
        return NoisyBatch(
            input_ids=torch.cat([torch.where(mask, self.mask_token_id, twice.input_ids), twice.input_ids], dim=1),
            **self.attention_inputs(twice),
            mask=keep,
            counted=keep,
            targets=twice.targets[mask],
            weights=weights_BL.repeat(2, 1)[mask],
            normaliser=normaliser,
        )


@dataclass(frozen=True)
class NemotronDiffusion(TwoStreamObjective):
    """Nemotron-Labs-Diffusion's objective, in its three published forms.

    Block diffusion with one t per sequence, except that the clean stream is causal, and its logits[i] also predict
    token i + 1. With M masks, a = `diffusion_weight`, b = `ar_weight`, D the sum of CE/p over the masks and A the sum
    of CE over the next tokens, the loss depends on `divisors`:

    - "weighted", (a D + b A) / (M + b L), with L counted tokens and b L rounded down for each sequence: the model's
      own modeling_nemotron_labs_diffusion.py, where a is 1 if `dlm_loss_weight` is null, as in the published configs;
    - "predictions", (a D + b A) / (M + number of next tokens): the forward step of Megatron-Bridge's recipe, a = 0.3;
    - "separate", a D / M + b A / L: NeMo Automodel's fine-tuning (HybridDiffusionLLMLoss), a = 0.3.

    Terms: 0 the masks, 1 the next tokens.
    """

    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("bidirectional",)
    families: ClassVar[tuple[str, ...]] = ("nemotron_labs_diffusion", "nemotron")
    forces_certainty: ClassVar[bool] = False
    loss_fraction: ClassVar[float] = 1.5
    terms: ClassVar[int] = 2
    clean_stream: ClassVar[StreamPattern] = "causal"
    weightings: ClassVar[tuple[Weighting, ...]] = ("level", "uniform")
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted",)

    loss_normalisation: Normalisation = "predicted"
    diffusion_weight: float = 1.0
    ar_weight: float = 1.0
    divisors: Literal["weighted", "predictions", "separate"] = "weighted"

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        weights = {"diffusion_weight": config.dlm_loss_weight, "ar_weight": config.ar_loss_weight}
        return super().settings(config) | {key: value for key, value in weights.items() if value is not None}

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        p_BL = self.mask_probability(clean, uniforms)
        mask = (uniforms.token < p_BL) & clean.counted
        following = next_tokens(clean)
        keep = torch.cat([mask, following], dim=1)
        is_clean = torch.cat([torch.zeros_like(mask), torch.ones_like(mask)], dim=1)[keep]
        weights_BL = self.diffusion_weight * self.position_weights(clean, p_BL, mask, clean.counted)[0]
        weights_BS = torch.cat([weights_BL, torch.full_like(p_BL, self.ar_weight)], dim=1)
        return NoisyBatch(
            input_ids=torch.cat([torch.where(mask, self.mask_token_id, clean.input_ids), clean.input_ids], dim=1),
            **self.attention_inputs(clean),
            mask=keep,
            counted=torch.cat([mask, clean.counted.roll(-1, dims=1)], dim=1),  # contains `following`; L positions
            targets=torch.cat([clean.targets, shift_left(clean.targets)], dim=1)[keep],
            weights=weights_BS[keep],
            terms=is_clean.long(),
            normaliser=self._normaliser(clean, total(mask), total(following)),
        )

    def _normaliser(self, clean: CleanBatch, masks: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """[2] summands of both terms' divisors."""
        if self.divisors == "separate":
            return torch.cat([masks, total(clean.counted)])
        if self.divisors == "predictions":
            return (masks + following).repeat(2)
        counts = torch.zeros_like(clean.documents).scatter_add(1, clean.documents, clean.counted.long())
        return (masks + total((self.ar_weight * counts.double()).floor())).repeat(2)


@dataclass(frozen=True)
class IDLMDiffusion(TwoStreamObjective):
    """I-DLM's all-masked objective (arXiv 2604.11035) as NeMo Automodel trains it (components/loss/dllm_loss.py:
    IDLMLoss, 36044ad).

    Every counted position of the noisy stream is masked; a mask attends to the masks before it in its block and to the
    clean blocks before it, the clean stream is causal, and logits[i] predict token i + 1 in both. The loss is the mean
    over the counted tokens of CE in the noisy stream + clean_weight x CE in the clean stream.

    With `auto_balance`, which the authors and Automodel recommend for blocks of 3, the ratio of the two sums of a row,
    without a gradient, replaces `clean_weight`. (Theirs is the ratio of a micro-batch, which is one row in both
    recipes.)
    """

    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("causal",)
    shift: ClassVar[bool] = True
    families: ClassVar[tuple[str, ...]] = ("idlm",)
    noise_ranges: ClassVar[bool] = False
    forces_certainty: ClassVar[bool] = False
    samples_clean_stream: ClassVar[bool] = True
    loss_fraction: ClassVar[float] = 2.0
    terms: ClassVar[int] = 2
    noisy_stream: ClassVar[StreamPattern] = "causal"
    clean_stream: ClassVar[StreamPattern] = "causal"
    weightings: ClassVar[tuple[Weighting, ...]] = ("uniform",)
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted",)

    loss_weighting: Weighting = "uniform"
    loss_normalisation: Normalisation = "predicted"
    clean_weight: float = 0.2
    auto_balance: bool = False

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        following = next_tokens(clean)
        keep = torch.cat([following, following], dim=1)
        is_clean = torch.cat([torch.zeros_like(following), torch.ones_like(following)], dim=1)[keep]
        return NoisyBatch(
            input_ids=torch.cat([clean.input_ids.masked_fill(clean.counted, self.mask_token_id), clean.input_ids], 1),
            **self.attention_inputs(clean),
            mask=keep,
            counted=keep,
            targets=shift_left(clean.targets).repeat(1, 2)[keep],
            weights=torch.where(is_clean, 1.0 if self.auto_balance else self.clean_weight, 1.0),
            terms=is_clean.long(),
            rows=keep.nonzero()[:, 0] if self.auto_balance else None,
            normaliser=total(following).repeat(2),
        )


@dataclass(frozen=True)
class WeDLMDiffusion(TwoStreamObjective):
    """WeDLM's objective (the public fine-tuning code, arXiv 2512.22737).

    p ~ U(0, 1) per block, and round(n p) of its n counted positions are masked; the noisy tokens of a block are
    ordered visible first, masks last, each with its own position id, with causal attention among them and to the clean
    blocks before it; the clean stream is causal. A mask's logits predict its own token. The loss is (weighted mean of
    CE of the masks, weights 1/p + ar_weight x mean CE of the next tokens) / (1 + ar_weight).
    """

    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("causal",)
    families: ClassVar[tuple[str, ...]] = ("wedlm",)
    own_positions: ClassVar[bool] = True
    forces_certainty: ClassVar[bool] = False
    noise_ranges: ClassVar[bool] = False
    exact_block_masks: ClassVar[bool] = True
    loss_fraction: ClassVar[float] = 1.5
    terms: ClassVar[int] = 2
    noisy_stream: ClassVar[StreamPattern] = "causal"
    clean_stream: ClassVar[StreamPattern] = "causal"
    weightings: ClassVar[tuple[Weighting, ...]] = ("level", "uniform")
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted",)

    eps: float = 1e-8
    loss_normalisation: Normalisation = "predicted"
    ar_weight: float = 1.0

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        size = getattr(config, "block_size", None)  # the published configs have none; 32 is the trainer's
        return {} if size is None else {"block_size": size}

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        blocks = clean.blocks(self.block_size)
        p_BL = self.block_levels(uniforms, clean).clamp(min=self.eps)
        mask = self._mask_exact_count(clean.counted, blocks, p_BL, uniforms.token)
        # Within a block: visible tokens, then masks, then padding.
        kind = torch.where(clean.real_mask, mask.long(), 2)
        order = (3 * blocks + kind).argsort(dim=1, stable=True)
        noisy = torch.where(mask, self.mask_token_id, clean.input_ids).gather(1, order)
        masks, following = mask.gather(1, order), next_tokens(clean)
        keep = torch.cat([masks, following], dim=1)
        weights_BL = self.position_weights(clean, p_BL, mask, clean.counted)[0].gather(1, order)
        weights_BS = torch.cat([weights_BL, torch.full_like(p_BL, self.ar_weight)], dim=1) / (1 + self.ar_weight)
        terms_BS = torch.cat([torch.zeros_like(order), torch.ones_like(order)], dim=1)
        return NoisyBatch(
            input_ids=torch.cat([noisy, clean.input_ids], dim=1),
            **self.attention_inputs(clean, order),
            mask=keep,
            counted=keep,
            targets=torch.cat([clean.targets.gather(1, order), shift_left(clean.targets)], dim=1)[keep],
            weights=weights_BS[keep],
            terms=terms_BS[keep],
            normaliser=torch.cat([total(weights_BL[masks]), total(following)]),
        )

    @staticmethod
    def _mask_exact_count(
        counted: torch.Tensor, blocks: torch.Tensor, p_BL: torch.Tensor, token_BL: torch.Tensor
    ) -> torch.Tensor:
        """[B, L] bool: in each block, the round(n p) of its n counted positions with the lowest numbers."""
        sizes = torch.zeros_like(blocks).scatter_add(1, blocks, counted.long()).gather(1, blocks)
        wanted = (sizes * p_BL).round().long()
        # Sort by block, then counted before not counted, then by number; blocks are already in order.
        by_block = (2 * blocks + (~counted).long() + token_BL.double()).argsort(dim=1)
        rank = by_block.argsort(dim=1) - torch.searchsorted(blocks.contiguous(), blocks.contiguous())
        return counted & (rank < wanted)


@dataclass(frozen=True)
class CanvasDiffusion(Objective):
    """DiffusionGemma's fine-tuning objective in NeMo Automodel (recipes/dllm, mode block_diffusion).

    The answer of a row, from its first counted token to the row's last real token, is split into canvases of
    `block_size` tokens, one of which is drawn for each row and step. With t ~ U(eps, 1), each of its counted tokens is
    replaced by a uniform random token with probability t. The encoder reads the clean row causally; the decoder
    attends to the whole canvas, and to the encoder's tokens before it. The loss is

        mean CE of all counted tokens of the canvases + encoder_weight x mean CE of the encoder's next tokens,

    where the encoder's next tokens include the prompt. With probability `self_conditioning` the decoder first predicts
    the canvas without gradients, and is conditioned on that prediction.

    The input is [clean | canvas], L + block_size tokens. Terms: 0 the canvases, 1 the encoder.
    """

    attention_patterns: ClassVar[tuple[AttentionPattern, ...]] = ("block_causal",)
    families: ClassVar[tuple[str, ...]] = ("diffusion_gemma",)
    masks: ClassVar[bool] = False
    forces_certainty: ClassVar[bool] = False
    streams: ClassVar[int] = 2
    tokens_read: ClassVar[int] = 2
    terms: ClassVar[int] = 2
    loss_fraction: ClassVar[float] = 1.0
    answer_blocks: ClassVar[bool] = True
    weightings: ClassVar[tuple[Weighting, ...]] = ("uniform",)
    normalisations: ClassVar[tuple[Normalisation, ...]] = ("predicted",)

    loss_weighting: Weighting = "uniform"
    loss_normalisation: Normalisation = "predicted"
    block_size: int = 256
    vocabulary_size: int = 262_144
    encoder_weight: float = 1.0
    self_conditioning: float = 0.5

    @classmethod
    def settings(cls, config: Any) -> dict[str, Any]:
        size = required(config, "canvas_length")
        return {"block_size": size, "vocabulary_size": config.get_text_config().vocab_size}

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        if clean.packed:
            raise SettingError("packing", "DiffusionGemma supports one text per row: disable packing")
        assert uniforms.replacement is not None, "Uniforms.drawn needs replaces=True"
        length = clean.input_ids.shape[1]
        ends_B1 = clean.real_mask.sum(dim=1, keepdim=True)
        answers_B1 = torch.where(clean.counted.any(dim=1), clean.counted.int().argmax(dim=1), ends_B1[:, 0])[:, None]
        canvases_B1 = ((ends_B1 - answers_B1 + self.block_size - 1) // self.block_size).clamp(min=1)
        drawn_B1 = (uniforms.block[:, SELECTED, None] * canvases_B1).long().clamp(max=canvases_B1 - 1)
        first_B1 = answers_B1 + drawn_B1 * self.block_size
        places_BC = first_B1 + torch.arange(self.block_size, device=clean.input_ids.device)
        exists_BC = places_BC < ends_B1
        index_BC = places_BC.clamp(max=length - 1)
        counted_BC = clean.counted.gather(1, index_BC) & exists_BC
        replaced_BC = (uniforms.token < self.mask_probability(clean, uniforms)).gather(1, index_BC) & counted_BC
        random_BL = (uniforms.replacement.double() * self.vocabulary_size).long().clamp(max=self.vocabulary_size - 1)
        tokens_BC = torch.where(replaced_BC, random_BL.gather(1, index_BC), clean.input_ids.gather(1, index_BC))
        # A row without an answer pads an evaluation batch: none of its tokens count.
        following_BL = shift_left(clean.preceded) & clean.counted.any(dim=1, keepdim=True)
        keep = torch.cat([following_BL, counted_BC], dim=1)
        targets_BS = torch.cat([shift_left(clean.input_ids), clean.targets.gather(1, index_BC)], dim=1)
        is_encoder = torch.zeros_like(keep, dtype=torch.long)
        is_encoder[:, :length] = 1
        terms = is_encoder[keep]
        return NoisyBatch(
            input_ids=torch.cat([clean.input_ids, tokens_BC], dim=1),
            attention_mask=clean.real,
            mask_descriptor=None,
            position_ids=torch.cat([clean.positions.expand(len(places_BC), -1), places_BC], dim=1),
            mask=keep,
            counted=keep,
            targets=targets_BS[keep],
            weights=torch.where(terms == 1, self.encoder_weight, 1.0),
            normaliser=torch.cat([total(counted_BC), total(following_BL)]),
            terms=terms,
            self_conditioned=uniforms.block[:, min(CONDITIONED, length - 1)] < self.self_conditioning,
        )


def required(config: Any, key: str) -> Any:
    """Value of a model's configuration. Raises CheckpointError if it is missing."""
    if getattr(config, key, None) is None:
        raise CheckpointError("config.json", f"no {key}: set it")
    return getattr(config, key)


def next_tokens(clean: CleanBatch) -> torch.Tensor:
    """[B, L] bool: positions of the clean stream whose next token is counted and predicted."""
    return shift_left(clean.counted & clean.preceded)
