"""Dream on transformers' Qwen2 body with bidirectional attention: config, model and tokenizer."""

# mypy: disable-error-code="arg-type, assignment, misc, override"

from __future__ import annotations

from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from dlm_bridge.models.diffusion_lm import DiffusionLM
from dlm_bridge.models.dream import SPEC
from dlm_bridge.models.hub_config import HubConfig


class DreamConfig(HubConfig, Qwen2Config):
    """Config with the fields and defaults of the public configuration_dream.py."""

    model_type = "Dream"
    family = SPEC

    use_cache: bool = False
    mask_token_id: int | None = 151666
    pad_token_id: int | None = 151643


class DreamTokenizer(Qwen2Tokenizer):
    """Qwen2's tokenizer under the Hub's class name, which `save_pretrained` stores."""


class DreamModel(DiffusionLM, Qwen2ForCausalLM):
    """`logits[i]` predicts token i + 1 (`family.shift`), as in the original."""

    config_class = DreamConfig
    family = SPEC
