"""Fast-dLLM v2's configuration: Qwen2's keys and `bd_size`, the block size."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Qwen2Config

from dlm_bridge.models.fast_dllm_v2.spec import SPEC
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.spec import FamilySpec
from dlm_bridge.models.standard import require


class Fast_dLLM_QwenConfig(HubConfig, Qwen2Config):  # noqa: N801 (the Hub's name)
    """`bd_size` reads and writes as `block_size` too, the name that it has in the other families."""

    model_type = "Fast_dLLM_Qwen"
    family: ClassVar[FamilySpec] = SPEC
    is_causal: ClassVar[bool] = False
    attribute_map: ClassVar[dict[str, str]] = {"block_size": "bd_size"}

    bd_size: int = 32
    mask_token_id: int | None = 151665

    def __post_init__(self, **kwargs: Any) -> None:
        require({"use_sliding_window": self.use_sliding_window}, {"use_sliding_window": False})
        super().__post_init__(**kwargs)
