"""iLLaDA on transformers' Llama body with bidirectional attention: config and model."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM

from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig
from dlm_bridge.models.illada import REQUIRED, SPEC


class ILLaDAConfig(HubConfig, LlamaConfig):
    """The published models have RMSNorm, plain RoPE and no dropout; the original code's other options are refused."""

    model_type = "illada"
    family = SPEC
    required_values = REQUIRED

    use_cache: bool = False
    layer_norm_eps: float | None = None
    resid_pdrop: float = 0.0
    mask_token_id: int | None = 5


class ILLaDAForCausalLM(DiffusionLM, LlamaForCausalLM):
    """`logits[i]` predicts token i; the original code's own loss over `labels` shifts them, which is wrong here."""

    config_class = ILLaDAConfig
    family = SPEC
