"""iLLaDA's configuration: Llama's keys, two dropout and norm keys of its own, the token ids."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import LlamaConfig

from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.illada.spec import SPEC
from dlm_bridge.models.spec import FamilySpec
from dlm_bridge.models.standard import require


class ILLaDAConfig(HubConfig, LlamaConfig):
    """The published models have RMSNorm, plain RoPE and no dropout; what the original code could do beside them is
    refused by name."""

    model_type = "illada"
    family: ClassVar[FamilySpec] = SPEC
    is_causal: ClassVar[bool] = False

    use_cache: bool = False
    layer_norm_eps: float | None = None
    resid_pdrop: float = 0.0
    mask_token_id: int | None = 5

    def __post_init__(self, **kwargs: Any) -> None:
        require(vars(self), {"layer_norm_eps": None, "resid_pdrop": 0.0})
        super().__post_init__(**kwargs)
