"""The autoregressive families' facts. Every one is a class of transformers, found by its name in `architectures`."""

from __future__ import annotations

from typing import Any

from dlm_bridge.models.spec import FamilySpec


def _spec(
    name: str, title: str, hub_ids: tuple[str, ...], prefix: str, model_type: str, mapping: str, **facts: Any
) -> FamilySpec:
    """`prefix` is that of transformers' classes: "Llama" for LlamaConfig and LlamaForCausalLM."""
    return FamilySpec(
        name=name,
        title=title,
        hub_ids=hub_ids,
        architectures=(f"{prefix}ForCausalLM",),
        model_type=model_type,
        config_class=f"transformers:{prefix}Config",
        model_class=f"transformers:{prefix}ForCausalLM",
        mapping=f"dlm_bridge.models.autoregressive.{mapping}",
        initialisation="dlm_bridge.models.initialisation:normal",
        auto_classes=(),  # transformers' own entries stay as they are
        kind="autoregressive",
        topology="causal",
        shift=True,
        objective="causal",
        checked_against=f"transformers' own {prefix}ForCausalLM",
        **facts,
    )


SPECS: tuple[FamilySpec, ...] = (
    _spec(
        "llama",
        "Llama 2, 3, 3.1, 3.2, 3.3",
        ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"),
        "Llama",
        "llama",
        "dense:LLAMA",
    ),
    _spec(
        "qwen2",
        "Qwen2, Qwen2.5",
        ("Qwen/Qwen2-7B", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Coder-7B"),
        "Qwen2",
        "qwen2",
        "dense:QWEN2",
    ),
    _spec("qwen3", "Qwen3", ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B"), "Qwen3", "qwen3", "dense:QWEN3"),
    _spec(
        "mistral",
        "Mistral 7B, Mistral Nemo",
        ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-v0.3", "mistralai/Mistral-Nemo-Base-2407"),
        "Mistral",
        "mistral",
        "dense:MISTRAL",
    ),
    _spec(
        "qwen3_moe",
        "Qwen3-MoE",
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
        "Qwen3Moe",
        "qwen3_moe",
        "experts:QWEN3_MOE",
    ),
    _spec(
        "mixtral",
        "Mixtral",
        ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-v0.1"),
        "Mixtral",
        "mixtral",
        "experts:MIXTRAL",
        lora_targets=("q_proj", "k_proj", "v_proj", "o_proj"),
    ),
    _spec(
        "glm4_moe",
        "GLM-4.5, GLM-4.6",
        ("zai-org/GLM-4.5", "zai-org/GLM-4.5-Air", "zai-org/GLM-4.6"),
        "Glm4Moe",
        "glm4_moe",
        "glm4_moe:MAPPING",
    ),
    _spec(
        "olmoe",
        "OLMoE (Hub side only)",
        ("allenai/OLMoE-1B-7B-0924", "allenai/OLMoE-1B-7B-0125"),
        "Olmoe",
        "olmoe",
        "experts:OLMOE",
        training=("accelerate",),  # whole rows are normalised
    ),
    _spec(
        "deepseek_v3",
        "DeepSeek-V3, DeepSeek-R1",
        ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-R1"),
        "DeepseekV3",
        "deepseek_v3",
        "deepseek_v3:MAPPING",
        lora_targets=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ),
)
