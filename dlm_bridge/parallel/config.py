"""megatron-core's TransformerConfig and GPTModel arguments for a family's mapping, its sizes and a Layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from dlm_bridge.errors import LayoutError, SettingError
from dlm_bridge.mapping.layout import CP_COMMUNICATION, ContextParallelConfig, Layout
from dlm_bridge.mapping.rules import Dims, Mapping
from dlm_bridge.parallel import mcore_compat, platform, self_attention
from dlm_bridge.parallel.core import MLATransformerConfig, TransformerConfig, named_refusals, quick_gelu

# Keys of `Mapping.transformer` that are arguments of GPTModel, not fields of TransformerConfig.
MODEL_ARGUMENTS = (
    "max_sequence_length",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
)
ACTIVATIONS = {"silu": torch.nn.functional.silu, "quick_gelu": quick_gelu}  # by name in a mapping
# Prefixes of attributes that are set on a TransformerConfig beside its fields. GPTModel reads the YaRN ones.
YARN, BLOCK_ROUTING = "yarn_", "block_routing_"
ROTARY_ATTRIBUTES = (YARN, self_attention.PREFIX)
ATTRIBUTES = (*ROTARY_ATTRIBUTES, BLOCK_ROUTING)


@dataclass(frozen=True)
class GPTModelConfig:
    """Arguments of a GPTModel."""

    transformer: TransformerConfig
    arguments: dict[str, Any]  # the others: sizes, tied embeddings, rotary embedding


def model_config(
    mapping: Mapping,
    config: dict[str, Any],
    dims: Dims,
    layout: Layout,
    dtype: torch.dtype,
    parallel: ContextParallelConfig | None = None,
    **overrides: Any,
) -> GPTModelConfig:
    """Derive megatron-core's configuration.

    Args:
        config: contents of the Hub's config.json.
        overrides: TransformerConfig fields, which take precedence.

    Raises:
        LayoutError: the layout does not fit the model.
        SettingError: megatron-core lacks a field or refuses its value, or cannot represent the model.
    """
    parallel = parallel or ContextParallelConfig()
    layout.check(dims)
    parallel.check(dims, layout)
    predicting = overrides.get("mtp_num_layers")
    if predicting not in (None, dims.mtp):
        raise SettingError(
            "mtp_num_layers", f"{predicting}, but the model has {dims.mtp} multi-token prediction layers"
        )
    described = mapping.settings(config)
    if described.get("add_bias_linear") and dims.experts and layout.expert_tp > 1:
        raise LayoutError(
            "etp",
            f"{layout.expert_tp} with a model whose experts have biases, which megatron-core does not shard: use 1",
        )
    kind = MLATransformerConfig if described.get("multi_latent_attention") else TransformerConfig
    known = {field.name for field in fields(kind)}
    # MLATransformerConfig has some of these fields itself.
    model = {name: described.pop(name) for name in MODEL_ARGUMENTS if name in described and name not in known}
    attributes = {name: described.pop(name) for name in list(described) if name.startswith(ATTRIBUTES)}
    arguments = {
        "num_layers": dims.layers,
        "hidden_size": dims.hidden,
        "ffn_hidden_size": dims.ffn,
        "num_attention_heads": dims.heads,
        "num_query_groups": dims.groups,
        "kv_channels": dims.head_dim,
        "activation_func": _activation(described.pop("activation_func", "silu"), overrides),
        # megatron-core's default is 0.1; none of the public models was trained with dropout.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        mcore_compat.GRAPHED_MODULES: [],  # the whole layer; megatron-core's own default is deprecated
        **_parallel_arguments(dims, layout, parallel, predicting or 0),
        # Every parameter is loaded afterwards. Initialisation stays on: without it megatron-core does not set the
        # attributes that its gradient norm and optimizer read (`tensor_model_parallel`).
        "init_method": leave_empty,
        "output_layer_init_method": leave_empty,
        "embedding_init_method": leave_empty,
        **described,
        **overrides,
    }
    with named_refusals():  # an unknown field is a TypeError
        transformer = kind(**arguments)
    for name, value in attributes.items():
        setattr(transformer, name, value)
    _check_attention(transformer, parallel)
    if getattr(transformer, BLOCK_ROUTING + "capacity", 0):
        _check_block_routing(transformer, parallel)
    vocab = -(-dims.vocab // layout.tp) * layout.tp  # padded: every rank has the same number of rows
    sizes = {"vocab_size": vocab, "share_embeddings_and_output_weights": dims.tied}
    return GPTModelConfig(transformer, {"position_embedding_type": "rope", **model, **sizes})


def _activation(name: str, overrides: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """An activation function. megatron-core compiles its own, which takes seconds per shape on a CPU and saves little
    there; its fused layers compare the function with the compiled one."""
    compiled = platform.current().name != "cpu" or overrides.get("bias_activation_fusion")
    return ACTIVATIONS[name] if compiled else inspect.unwrap(ACTIVATIONS[name])


def leave_empty(tensor: torch.Tensor) -> torch.Tensor:
    """No-op initialisation: the values are loaded."""
    return tensor


def _parallel_arguments(
    dims: Dims, layout: Layout, parallel: ContextParallelConfig, predicting: int
) -> dict[str, Any]:
    """TransformerConfig's fields for a layout; `predicting` is the number of trained multi-token prediction layers."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "context_parallel_size": parallel.cp,
        "cp_comm_type": CP_COMMUNICATION[parallel.cp_comm_type],
        "hierarchical_context_parallel_sizes": list(parallel.hierarchical_cp_sizes or ()) or None,
        # megatron-core requires it to train experts under tensor parallelism.
        "sequence_parallel": dims.experts > 0 and layout.tp > 1,
        "pipeline_model_parallel_layout": _pipeline(layout, dims.layers, predicting),
        # Interleaved stages send forward and backward messages at once. Batched, which is the default, two stages
        # that are neighbours on both sides would confuse them.
        "overlap_p2p_comm": layout.vp > 1,
        "batch_p2p_comm": layout.vp == 1,
    }


def _check_attention(transformer: TransformerConfig, parallel: ContextParallelConfig) -> None:
    """Refuse what megatron-core would compute wrong, or refuse only in the first step."""
    latent, tp = transformer.multi_latent_attention, transformer.tensor_model_parallel_size
    if transformer.apply_rope_fusion and (latent or any(name.startswith(YARN) for name in vars(transformer))):
        ignored = "position ids in latent attention" if latent else "YaRN's scale"
        raise SettingError("apply_rope_fusion", f"the fused rotary kernel ignores {ignored}: set it to False")
    if latent and tp > 1 and not transformer.sequence_parallel:
        raise LayoutError(
            "tp",
            f"{tp} with `sequence_parallel=False`: megatron-core then omits part of latent attention's gradient",
        )
    if transformer.fused_single_qkv_rope and self_attention.scales_queries(transformer):
        raise SettingError(
            "fused_single_qkv_rope", "the kernel ignores this model's query scale by position: set it to False"
        )
    if transformer.window_size is not None and parallel.cp > 1 and parallel.cp_comm_type not in ("a2a", "allgather"):
        raise LayoutError(
            "cp_comm_type",
            f"{parallel.cp_comm_type} does not support this model's sliding window: use allgather or a2a",
        )


def _check_block_routing(transformer: TransformerConfig, parallel: ContextParallelConfig) -> None:
    """Refuse settings that LLaDA2.2's router, which routes a block's tokens together, does not support."""
    if parallel.cp > 1:
        raise LayoutError("cp", f"{parallel.cp} would split the blocks of tokens that this model routes: use 1")
    if transformer.recompute_granularity == "selective" and {"moe", "mlp"} & {*(transformer.recompute_modules or ())}:
        raise SettingError(
            "recompute_modules",
            "moe with a model whose routers depend on their layer's attention mask: use `recompute=full`",
        )
    if transformer.moe_router_load_balancing_type != "none" or transformer.moe_expert_capacity_factor is not None:
        raise SettingError(
            "moe_aux_loss_coeff",
            "it and expert capacity factors are not defined for a model that routes blocks of tokens",
        )


def _pipeline(layout: Layout, layers: int, predicting: int) -> list[list[str]] | None:
    """`layout.stages` in megatron-core's terms: the virtual stages in the order of their layers, with `predicting`
    multi-token prediction layers on the last."""
    if layout.pp == 1:
        return None
    stages = layout.stages(layers)
    rows = [["decoder"] * len(stages[pp][vp]) for vp in range(layout.vp) for pp in range(layout.pp)]
    rows[0].insert(0, "embedding")
    rows[-1] += ["mtp"] * predicting + ["loss"]
    return rows
