"""iLLaDA on transformers' Llama body with bidirectional attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM

from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.illada import REQUIRED, SPEC


class ILLaDAConfig(HubConfig, LlamaConfig):
    """Config of the published models (RMSNorm, plain RoPE, no dropout). Other options are refused."""

    model_type = "illada"
    family = SPEC
    required_values = REQUIRED

    use_cache: bool = False
    layer_norm_eps: float | None = None
    resid_pdrop: float = 0.0
    mask_token_id: int | None = 5


class ILLaDAForCausalLM(DiffusionLM, LlamaForCausalLM):
    """`logits[i]` predicts token i. (The loss of the original code shifts `labels`, which is wrong.)"""

    config_class = ILLaDAConfig
    family = SPEC
