"""SDAR's configuration: Qwen3's keys, the block size and the mask token."""

from __future__ import annotations

from typing import ClassVar

from transformers import Qwen3Config

from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.sdar.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


class SDARConfig(HubConfig, Qwen3Config):
    """The chat checkpoints leave `block_size` and `mask_token_id` out or not; the -b8 to -b64 variants must say theirs
    (`from_pretrained(..., block_size=32)`)."""

    model_type = "sdar"
    family: ClassVar[FamilySpec] = SPEC
    is_causal: ClassVar[bool] = False

    use_cache: bool = False
    block_size: int = 4
    mask_token_id: int | None = 151669
