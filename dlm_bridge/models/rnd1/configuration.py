"""RND1's configuration: Qwen3-MoE's keys, the mask token and the number of denoising steps."""

from __future__ import annotations

from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import Qwen3MoeConfig

from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.rnd1.spec import SPEC
from dlm_bridge.models.spec import FamilySpec


@strict  # anew, because false is a value of fields that are numbers in Qwen3-MoE's
class RND1Config(HubConfig, Qwen3MoeConfig):
    """Field names and defaults are those of the public configuration_rnd.py."""

    model_type = "rnd1"
    family: ClassVar[FamilySpec] = SPEC
    is_causal: ClassVar[bool] = False
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    default_theta = 1000000.0

    num_hidden_layers: int = 48
    head_dim: int = 128
    norm_topk_prob: bool = True
    max_position_embeddings: int = 40960
    use_cache: bool = False
    sliding_window: int | bool | None = None
    num_diffusion_steps: int = 256
    mask_token_id: int | None = 151669
    eos_token_id: int | list[int] | None = 151645
    pad_token_id: int | None = 151643
