"""megatron-core's TransformerConfig and GPTModel arguments, from a family's mapping, its sizes and a Layout."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.layout import CP_COMMUNICATION, ContextParallelConfig, Layout
from dlm_bridge.mapping.rules import Dims, Mapping
from dlm_bridge.parallel import self_attention
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
ACTIVATIONS = {"silu": torch.nn.functional.silu, "quick_gelu": quick_gelu}  # by their names in a mapping
# Prefixes of attributes that are set on a TransformerConfig, which has no such fields: GPTModel reads the first ones.
YARN, BLOCK_ROUTING = "yarn_", "block_routing_"
ROTARY_ATTRIBUTES = (YARN, self_attention.PREFIX)
ATTRIBUTES = (*ROTARY_ATTRIBUTES, BLOCK_ROUTING)


@dataclass(frozen=True)
class GPTModelConfig:
    """Arguments of a GPTModel."""

    transformer: TransformerConfig
    arguments: dict[str, Any]  # GPTModel's own: sizes, tied embeddings, rotary embedding


def model_config(
    mapping: Mapping,
    config: dict[str, Any],
    dims: Dims,
    layout: Layout,
    dtype: torch.dtype,
    parallel: ContextParallelConfig | None = None,
    **overrides: Any,
) -> GPTModelConfig:
    """Derive megatron-core's configuration; `overrides` are TransformerConfig fields and win.

    `config` is the Hub's config.json. Raises DlmBridgeError for a layout that does not fit the model and for a key
    that megatron-core does not know.
    """
    parallel = parallel or ContextParallelConfig()
    layout.check(dims)
    parallel.check(dims, layout)
    predicting = overrides.get("mtp_num_layers")
    if predicting not in (None, dims.mtp):
        raise DlmBridgeError(f"mtp_num_layers {predicting}: the model has {dims.mtp} multi-token prediction layers")
    if mapping.hub_only:
        raise DlmBridgeError(f"megatron-core cannot hold this model: {mapping.hub_only}")
    described = mapping.settings(config)
    if described.get("add_bias_linear") and dims.experts and layout.expert_tp > 1:
        raise DlmBridgeError(
            f"--etp {layout.expert_tp}: this model's experts have biases, which megatron-core does not split: use "
            "--etp 1"
        )
    kind = MLATransformerConfig if described.get("multi_latent_attention") else TransformerConfig
    known = {field.name for field in fields(kind)}
    # A configuration of latent attention has some of them itself.
    model = {name: described.pop(name) for name in MODEL_ARGUMENTS if name in described and name not in known}
    attributes = {name: described.pop(name) for name in list(described) if name.startswith(ATTRIBUTES)}
    arguments = {
        "num_layers": dims.layers,
        "hidden_size": dims.hidden,
        "ffn_hidden_size": dims.ffn,
        "num_attention_heads": dims.heads,
        "num_query_groups": dims.groups,
        "kv_channels": dims.head_dim,
        "activation_func": ACTIVATIONS[described.pop("activation_func", "silu")],
        # megatron-core's default is 0.1; none of the public models was trained with dropout.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "cuda_graph_scope": [],  # the whole layer; megatron-core's own default warns that it is deprecated
        **_parallel_arguments(dims, layout, parallel, predicting or 0),
        # Every parameter is loaded afterwards. Initialisation stays on, because with it off megatron-core leaves
        # out the attributes that its gradient norm and optimizer go by (`tensor_model_parallel`).
        "init_method": leave_empty,
        "output_layer_init_method": leave_empty,
        "embedding_init_method": leave_empty,
        **described,
        **overrides,
    }
    if unknown := sorted(arguments.keys() - known):
        raise DlmBridgeError(f"megatron-core's TransformerConfig has no field '{unknown[0]}'")
    with named_refusals():
        transformer = kind(**arguments)
    for name, value in attributes.items():
        setattr(transformer, name, value)
    _check_attention(transformer, parallel)
    if getattr(transformer, BLOCK_ROUTING + "capacity", 0):
        _check_block_routing(transformer, parallel)
    vocab = -(-dims.vocab // layout.tp) * layout.tp  # every rank has as many rows
    sizes = {"vocab_size": vocab, "share_embeddings_and_output_weights": dims.tied}
    return GPTModelConfig(transformer, {"position_embedding_type": "rope", **model, **sizes})


def leave_empty(tensor: torch.Tensor) -> torch.Tensor:
    """An initialisation that does nothing: the values are loaded."""
    return tensor


def _parallel_arguments(
    dims: Dims, layout: Layout, parallel: ContextParallelConfig, predicting: int
) -> dict[str, Any]:
    """TransformerConfig's fields for a layout, and for so many multi-token prediction layers that are trained."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp if layout.vp > 1 else None,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        "context_parallel_size": parallel.cp,
        "cp_comm_type": CP_COMMUNICATION[parallel.cp_comm_type],
        "hierarchical_context_parallel_sizes": list(parallel.hierarchical_cp_sizes or ()) or None,
        # megatron-core trains experts under tensor parallelism only so.
        "sequence_parallel": dims.experts > 0 and layout.tp > 1,
        "pipeline_model_parallel_layout": _pipeline(layout, dims.layers, predicting),
        # Interleaved stages send forwards and backwards at once. In one batch, which is the default, two stages that
        # are each other's neighbour on both sides would take the one for the other.
        "overlap_p2p_comm": layout.vp > 1,
        "batch_p2p_comm": layout.vp == 1,
    }


def _check_attention(transformer: TransformerConfig, parallel: ContextParallelConfig) -> None:
    """Refuse what megatron-core would compute wrong, or refuse in the first step only."""
    if transformer.apply_rope_fusion and any(name.startswith(YARN) for name in vars(transformer)):
        raise DlmBridgeError("the fused rotary kernel ignores YaRN's scale: set apply_rope_fusion to false")
    if transformer.multi_latent_attention:
        _check_latent_attention(transformer)
    if transformer.fused_single_qkv_rope and self_attention.scales_queries(transformer):
        raise DlmBridgeError(
            "the fused kernel of query, key and value rotates queries that this model scales by their position: "
            "set fused_single_qkv_rope to false"
        )
    if transformer.window_size is not None and parallel.cp > 1 and parallel.cp_comm_type not in ("a2a", "allgather"):
        raise DlmBridgeError(
            f"--cp {parallel.cp}: {parallel.cp_comm_type} knows no sliding window, which this model has: use "
            "--cp-comm-type allgather or a2a"
        )


def _check_block_routing(transformer: TransformerConfig, parallel: ContextParallelConfig) -> None:
    """Refuse what LLaDA2.2's router, which sees a block's tokens together, cannot do."""
    if parallel.cp > 1:
        raise DlmBridgeError(
            f"--cp {parallel.cp}: this model routes blocks of tokens, which ranks would cut: use --cp 1"
        )
    if transformer.recompute_granularity == "selective" and {"moe", "mlp"} & {*(transformer.recompute_modules or ())}:
        raise DlmBridgeError(
            "--recompute-modules moe: this model's router goes by what its layer attends to: use --recompute full"
        )
    if transformer.moe_router_load_balancing_type != "none" or transformer.moe_expert_capacity_factor is not None:
        raise DlmBridgeError(
            "--moe-aux-loss-coeff and expert capacity factors are not for a model that routes blocks of tokens"
        )


def _check_latent_attention(transformer: TransformerConfig) -> None:
    if transformer.apply_rope_fusion:
        raise DlmBridgeError(
            "the fused rotary kernel of latent attention takes no positions: set apply_rope_fusion to false"
        )
    tp = transformer.tensor_model_parallel_size
    if tp > 1 and not transformer.sequence_parallel:
        raise DlmBridgeError(
            f"--tp {tp} without sequence parallelism: megatron-core then leaves out a part of the gradient of latent "
            "attention: leave out --no-sequence-parallel"
        )


def _pipeline(layout: Layout, layers: int, predicting: int) -> list[list[str]] | None:
    """`layout.stages` in megatron-core's terms: the virtual stages in the order of their layers, and so many
    multi-token prediction layers on the last."""
    if layout.pp == 1:
        return None
    stages = layout.stages(layers)
    rows = [["decoder"] * len(stages[pp][vp]) for vp in range(layout.vp) for pp in range(layout.pp)]
    rows[0].insert(0, "embedding")
    rows[-1] += ["mtp"] * predicting + ["loss"]
    return rows
