"""WeDLM, Qwen2 or Qwen3 adapted to diffusion with causal attention: spec, mapping.

Source: Tencent/WeDLM (hf_compat, the engine, the trainer), arXiv 2512.22737.
"""

from __future__ import annotations

from typing import Any

from dlm_bridge.mapping.rules import Dims, Mapping
from dlm_bridge.models.decoder_mapping import (
    SUPPORTED_VALUES,
    TIED_HEAD,
    decoder_dims,
    decoder_rules,
    decoder_settings,
    require_values,
)
from dlm_bridge.models.families import FamilySpec

DEFAULTS = {"max_position_embeddings": 32768}


def _facts(config: dict[str, Any]) -> frozenset[str]:
    named = {"qkv_bias": config.get("attention_bias", True), "qk_norm": config.get("qk_norm", False)}
    return frozenset(fact for fact, holds in named.items() if holds)


def dims(config: dict[str, Any]) -> Dims:
    require_values(config, {key: value for key, value in SUPPORTED_VALUES.items() if key != "attention_bias"})
    return decoder_dims(config, _facts(config))


def transformer(config: dict[str, Any]) -> dict[str, Any]:
    return decoder_settings({**DEFAULTS, **config}, _facts(config))


MAPPING = Mapping(rules=decoder_rules(), dims=dims, transformer=transformer, passthrough=TIED_HEAD)


SPEC = FamilySpec(
    name="wedlm",
    title="WeDLM",
    hub_ids=(
        "tencent/WeDLM-7B-Base",
        "tencent/WeDLM-7B-Instruct",
        "tencent/WeDLM-8B-Base",
        "tencent/WeDLM-8B-Instruct",
    ),
    architectures=("WeDLMForCausalLM",),
    model_type="wedlm",
    config_class="dlm_bridge.models.modeling_wedlm:WeDLMConfig",
    model_class="dlm_bridge.models.modeling_wedlm:WeDLMForCausalLM",
    mapping=MAPPING,
    auto_classes=("AutoModelForCausalLM",),
    attention_pattern="causal",  # inputs order known tokens before masks; position ids give their places
    mask_token_id=151665,
    objective="wedlm",
    sampler={"algorithm": "wedlm"},
    checked_against="the public hf_compat/modeling_wedlm.py",
)
