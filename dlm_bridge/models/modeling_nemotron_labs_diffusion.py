"""Nemotron-Labs-Diffusion on transformers' Ministral-3 body (YaRN, queries scaled by position): config and model.

`config.dlm_paradigm` selects the attention pattern, also on a live model:

- "bidirectional": every token attends to every token; `logits[i]` predicts token i. This is the denoiser.
- "autoregressive": causal attention; `logits[i]` predicts token i + 1.
- "block_diff": training pass over noisy and clean tokens, with the caller's mask.

The published sampler denoises a block with attention within the block and to a causally computed prefix: a
"bidirectional" pass with `attention_mask=causal_mask(real, draft_start)` (dlm_bridge.attention.masks).
"""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers import Ministral3Config, Ministral3ForCausalLM

from dlm_bridge.attention.masks import causal_mask
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.models.diffusion_lm import DiffusionLM, register_hub_names
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.nemotron_labs_diffusion import REQUIRED, SPEC

PARADIGMS = ("bidirectional", "autoregressive", "block_diff")


class NemotronLabsDiffusionConfig(HubConfig, Ministral3Config):
    """Config with the fields and defaults of the public configuration_nemotron_labs_diffusion.py, except for the mask
    token, which is -1 there."""

    model_type = "nemotron_labs_diffusion"
    family = SPEC
    required_values = REQUIRED

    pad_token_id: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    mask_token_id: int | None = 100
    dlm_paradigm: str = "bidirectional"
    block_size: int = 32
    dlm_loss_weight: float | None = None
    ar_loss_weight: float = 1.0
    dp_varying_mask_ratio: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.dlm_paradigm not in PARADIGMS:
            raise CheckpointError(
                "config.json", f"dlm_paradigm {self.dlm_paradigm!r} is not one of {', '.join(PARADIGMS)}"
            )
        super().__post_init__(**kwargs)


RENAMES = ((r"^encoder\.", "model."), (r"^diffusion_head\.", "lm_head."))


class NemotronLabsDiffusionModel(DiffusionLM, Ministral3ForCausalLM):
    """Model with output layer, as loaded by `AutoModel` on the Hub."""

    config_class = NemotronLabsDiffusionConfig
    config: NemotronLabsDiffusionConfig
    family = SPEC
    # Read by PEFT: published adapters have the module names of the original class.
    _checkpoint_conversion_mapping: ClassVar[dict[str, str]] = dict(RENAMES)

    def _mask_and_positions(
        self, tokens: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        own = attention_mask is not None and attention_mask.dim() == 4
        if not own and self.config.dlm_paradigm == "block_diff":
            raise SettingError(
                "attention_mask",
                "must be a 4-D mask over [noisy | clean] tokens with dlm_paradigm 'block_diff'; or set "
                "model.config.dlm_paradigm = 'bidirectional'",
            )
        if not own and self.config.dlm_paradigm == "autoregressive":
            whole = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
            attention_mask = causal_mask(whole if attention_mask is None else attention_mask)
        return super()._mask_and_positions(tokens, attention_mask, position_ids)


register_hub_names(NemotronLabsDiffusionModel, RENAMES)
