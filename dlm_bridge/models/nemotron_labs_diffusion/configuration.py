"""Nemotron-Labs-Diffusion's configuration: Ministral-3's keys, and those of its diffusion modes."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Ministral3Config

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.nemotron_labs_diffusion.mapping import REQUIRED
from dlm_bridge.models.nemotron_labs_diffusion.spec import SPEC
from dlm_bridge.models.spec import FamilySpec
from dlm_bridge.models.standard import require

PARADIGMS = ("bidirectional", "autoregressive", "block_diff")


class NemotronLabsDiffusionConfig(HubConfig, Ministral3Config):
    """Field names and defaults are those of the public configuration_nemotron_labs_diffusion.py, with the published
    mask token in place of its -1."""

    model_type = "nemotron_labs_diffusion"
    family: ClassVar[FamilySpec] = SPEC
    is_causal: ClassVar[bool] = False  # masks of the autoregressive mode are made by the model

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
        require({key: getattr(self, key) for key in REQUIRED}, REQUIRED)
        if self.dlm_paradigm not in PARADIGMS:
            raise DlmBridgeError(f"config.json: dlm_paradigm {self.dlm_paradigm!r} is none of {', '.join(PARADIGMS)}")
        super().__post_init__(**kwargs)
