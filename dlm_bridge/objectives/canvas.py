"""DiffusionGemma's objective: a canvas of partly random tokens behind clean ones, and the encoder's next tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dlm_bridge.attention_mask import AttentionPattern
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.objectives.base import Normalisation, Objective, Weighting, total
from dlm_bridge.objectives.batches import CleanBatch, NoisyBatch, shift_left
from dlm_bridge.objectives.noise import Uniforms

SELECTED, CONDITIONED = 0, 1  # columns of `Uniforms.block`: which canvas, and whether it is self-conditioned


@dataclass(frozen=True)
class CanvasDiffusion(Objective):
    """DiffusionGemma's fine-tuning, as NeMo Automodel trains it (recipes/dllm, mode block_diffusion).

    The answer of a row, from its first counted token to the row's last real one, is cut into canvases of `block_size`
    tokens, and one of them is drawn for each row and step. With t ~ U(eps, 1), each of its counted tokens is replaced
    by a uniform random one with probability t. The encoder reads the clean row causally; the decoder reads the canvas
    in both directions, and of the encoder only what stands before it. The loss is

        mean CE of all counted tokens of the canvases + encoder_weight x mean CE of the encoder's next tokens,

    of prompt and answer alike. With probability `self_conditioning` the decoder first predicts the canvas without
    gradients, and is given that prediction.

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
        size = getattr(config, "canvas_length", None)
        if size is None:
            raise DlmBridgeError("the model's config has no canvas_length: set it in config.json")
        return {"block_size": size, "vocabulary_size": config.get_text_config().vocab_size}

    def corrupt(self, clean: CleanBatch, uniforms: Uniforms) -> NoisyBatch:
        if clean.packed:
            raise DlmBridgeError("DiffusionGemma's rows hold one text each: leave --packing and documents out")
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
        # A row without an answer does not exist (padding of an evaluation): nothing of it is counted.
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
