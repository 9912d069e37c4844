"""Acme: config and model, Qwen2's body with bidirectional attention."""

from transformers import Qwen2Config, Qwen2ForCausalLM

from acme_dlm.acme import SPEC
from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.hub_config import HubConfig


class AcmeConfig(HubConfig, Qwen2Config):
    model_type = "acme"
    family = SPEC
    is_causal = False

    mask_token_id: int | None = 99


class AcmeLM(DiffusionLM, Qwen2ForCausalLM):
    config_class = AcmeConfig
    family = SPEC
