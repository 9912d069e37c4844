"""SDAR-MoE's configuration: Qwen3-MoE's keys, the block size and the mask token."""

from __future__ import annotations

from typing import ClassVar

from transformers import Qwen3MoeConfig

from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.sdar_moe.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


class SDARMoeConfig(HubConfig, Qwen3MoeConfig):
    """The checkpoints leave `block_size` and `mask_token_id` out or not; a -b8 to -b64 variant must say its own
    (`from_pretrained(..., block_size=32)`)."""

    model_type = "sdar_moe"
    family: ClassVar[FamilySpec] = SPEC
    is_causal: ClassVar[bool] = False
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    default_theta = 1000000.0

    head_dim: int = 128
    norm_topk_prob: bool = True
    use_cache: bool = False
    block_size: int = 4
    mask_token_id: int | None = 151669
