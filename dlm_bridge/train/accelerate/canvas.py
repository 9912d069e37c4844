"""DiffusionGemma under Accelerate: its encoder and decoder in one forward pass, and the loss of both.

Encoder and decoder share their weights, which get gradients of the decoder's loss from both: the encoder's keys and
values, which the decoder reads, have gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from dlm_bridge.attention.masks import mask_for_implementation
from dlm_bridge.generation.gemma import cache_of, is_gemma
from dlm_bridge.generation.runtime.runner import unwrapped
from dlm_bridge.objectives.losses import log_sum_exps
from dlm_bridge.train.accelerate.transforms import LossHead
from dlm_bridge.train.config import TrainConfig, refuse

CHUNK = 512  # number of positions whose logits are in memory at a time


def prepare_canvas_model(model: Any, config: TrainConfig) -> None:
    """Freeze the routers of DiffusionGemma, as its recipes do, and its vision tower, which is unused. Other models are
    not changed. Raises SettingError for settings with which it cannot be trained."""
    if not is_gemma(model):
        return
    backend, shared = config.engine.attention_backend, "DiffusionGemma's encoder and decoder share their weights"
    refuse(
        (config.parallel.shards, "sharding", f"fsdp: {shared}, which FSDP2 would shard twice: use data parallelism"),
        (backend not in (None, "sdpa", "eager"), "attention_backend",
         f"{backend}: DiffusionGemma's masks need sdpa or eager"),
        (config.precision.precision == "fp8", "precision", f"fp8: {shared}, which would be cast twice: use bf16"),
    )  # fmt: skip
    encoder = model.model.encoder
    frozen = [encoder.vision_tower, encoder.embed_vision]
    frozen += [layer.router for tower in (encoder.language_model, model.model.decoder) for layer in tower.layers]
    for module in frozen:
        module.requires_grad_(False)


def encoder_masks(real_BL: torch.Tensor | None, positions_BL: torch.Tensor, window: int) -> dict[str, torch.Tensor]:
    """[B, 1, L, L] bool masks of the encoder by layer type: causal, and causal within the sliding window. Padding, at
    the end of a row, attends to itself only."""
    behind = positions_BL[:, :, None] - positions_BL[:, None, :]
    full = behind >= 0
    if real_BL is not None:
        full = full & (real_BL[:, None, :] | (behind == 0))
    return {"full_attention": full[:, None], "sliding_attention": (full & (behind < window))[:, None]}


def decoder_masks(
    real_BL: torch.Tensor | None, positions_BL: torch.Tensor, positions_BC: torch.Tensor, window: int
) -> dict[str, torch.Tensor]:
    """[B, 1, C, L + C] bool masks of the decoder: a canvas attends to itself and to the encoder's positions before its
    first token, in sliding layers to the last `window` - 1 of them, as in sampling."""
    batch, size = positions_BC.shape
    length, first_B11 = positions_BL.shape[1], positions_BC[:, :1, None]
    before = (positions_BL[:, None, :] < first_B11).expand(batch, size, length)
    ends_B11 = length if real_BL is None else real_BL.sum(dim=1)[:, None, None]
    own = (positions_BC[:, None, :] < ends_B11) | torch.eye(size, dtype=torch.bool, device=positions_BC.device)
    own = own.expand(batch, size, size)
    near = before & (positions_BL[:, None, :] > first_B11 - window)
    masks = {"full_attention": before, "sliding_attention": near}
    return {kind: torch.cat([mask, own], dim=2)[:, None] for kind, mask in masks.items()}


class CanvasHead(LossHead):
    """Loss of DiffusionGemma for an input [clean | canvas] (`CanvasDiffusion`), with the soft cap of its logits.
    Replaces the forward pass of the model; calls outside of `loss` run the model's own."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.is_fused = True  # with the soft cap
        self.base = unwrapped(model)
        self.own_forward = model.forward
        model.forward = self._model_forward

    def _model_forward(self, *arguments: Any, **inputs: Any) -> Any:
        if self._positions is None:
            return self.own_forward(*arguments, **inputs)
        return self._canvas_forward(**inputs)

    def _canvas_forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        self_conditioned: torch.Tensor,
        use_cache: bool = False,
    ) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        towers, config = self.base.model, self.base.config.get_text_config()
        length = input_ids.shape[1] - self.canvas_length
        clean_BL, canvas_BC = input_ids[:, :length], input_ids[:, length:]
        positions_BL, positions_BC = position_ids[:, :length], position_ids[:, length:]
        window, kind = config.sliding_window, self.base.config._attn_implementation

        def given(masks: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: mask_for_implementation(mask, kind, self.base.dtype) for name, mask in masks.items()}

        cache = DynamicCache()  # complete sequences, because each canvas has its own window
        encoded_BLH = towers.encoder(
            input_ids=clean_BL,
            attention_mask=given(encoder_masks(attention_mask, positions_BL, window)),
            position_ids=positions_BL,
            **cache_of(towers.encoder, cache),
        ).last_hidden_state
        inputs: dict[str, Any] = {
            "decoder_input_ids": canvas_BC,
            "decoder_attention_mask": given(decoder_masks(attention_mask, positions_BL, positions_BC, window)),
            "decoder_position_ids": positions_BC,
            **cache_of(towers.decoder, cache),
        }
        with torch.no_grad():
            first_BCV = self._capped(towers.decoder(**inputs).last_hidden_state)
        decoded_BCH = towers.decoder(
            **inputs, self_conditioning_logits=first_BCV, self_conditioning_mask=self_conditioned
        ).last_hidden_state
        loss: Any = self.base.lm_head(torch.cat([encoded_BLH, decoded_BCH], dim=1))
        return CausalLMOutput(logits=loss)

    @property
    def canvas_length(self) -> int:
        return int(self.base.config.canvas_length)

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._positions is None:
            return self.logits(hidden)
        positions = self._positions
        hidden_MH = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions.positions)
        found = []
        for start in range(0, len(hidden_MH), CHUNK):
            part = slice(start, start + CHUNK)
            here: Any = checkpoint(self._losses, hidden_MH[part], positions.targets[part], use_reentrant=False)
            found.append(here)
        sums = positions.sums(*torch.cat(found, dim=1))
        self._sums = sums.detach()
        return sums.sum()

    def _losses(self, hidden_MH: torch.Tensor, targets_M: torch.Tensor) -> torch.Tensor:
        """[2, M] cross-entropies and log-sum-exps."""
        logits_MV = self._capped(hidden_MH)
        return torch.stack([F.cross_entropy(logits_MV, targets_M, reduction="none"), log_sum_exps(logits_MV, None)])

    def _capped(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits with the soft cap."""
        cap = self.base.config.get_text_config().final_logit_softcapping
        logits = self.logits(hidden).float()
        return logits if cap is None else cap * torch.tanh(logits / cap)


def loss_head(model: Any) -> LossHead:
    """Construct the loss head of a Hub model."""
    return CanvasHead(model) if is_gemma(model) else LossHead(model)
