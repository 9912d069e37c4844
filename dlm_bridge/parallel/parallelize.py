"""A live megatron-core GPTModel with a checkpoint's weights: configuration, process groups, layer spec, model, weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dlm_bridge.mapping.dtypes import parse_dtype
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.parallel import groups, platform
from dlm_bridge.parallel.config import GPTModelConfig, model_config
from dlm_bridge.parallel.context_parallel import ContextParallelConfig
from dlm_bridge.parallel.core import parallel_state
from dlm_bridge.parallel.gpt import BridgeGPTModel
from dlm_bridge.parallel.layer_spec import block_spec
from dlm_bridge.parallel.weights import check_source, load, stored_dtype

if TYPE_CHECKING:
    from dlm_bridge.bridge import Bridge


def build_megatron_model(
    bridge: Bridge,
    layout: Layout,
    dtype: str | torch.dtype | None = None,
    parallel: ContextParallelConfig | None = None,
    **overrides: Any,
) -> list[BridgeGPTModel]:
    """This rank's virtual-pipeline chunks as megatron-core GPTModels, with the bridge's weights loaded.

    Every process of the layout calls it; process groups are initialised where they are not yet. Each rank reads only
    the tensors of its own pipeline stages. What a model's call takes and gives is `gpt.LiveModel.forward`. The
    vocabulary is padded to a multiple of tp; padded columns enter no softmax. Multi-token prediction layers are left
    out. Parameters carry the attributes that megatron-core's data parallelism and optimizers go by.

    `dtype` (as of `Bridge.to_megatron`) None keeps the stored one; tensors with a dtype of their own (a router in
    fp32) keep it. `overrides` are fields of megatron-core's TransformerConfig, such as `sequence_parallel=True`.
    Raises DlmBridgeError where the layout does not fit the model or the processes, or where a tensor is missing, left
    over, mis-shaped or (without `dtype`) of another dtype than the rest.
    """
    chunks = _chunks(bridge, layout, dtype, parallel, overrides)
    load(chunks, bridge.checkpoint)
    return chunks


def build_model_to_resume(
    bridge: Bridge, layout: Layout, dtype: torch.dtype, parallel: ContextParallelConfig, **overrides: Any
) -> list[BridgeGPTModel]:
    """As `build_megatron_model` of a training run's own checkpoint, which megatron-core is going to load into the
    model: every parameter has its shape and dtype, and no weight is read twice."""
    chunks = _chunks(bridge, layout, dtype, parallel, overrides)
    load(chunks, bridge.checkpoint, values=False)
    return chunks


def _chunks(
    bridge: Bridge,
    layout: Layout,
    dtype: str | torch.dtype | None,
    parallel: ContextParallelConfig | None,
    overrides: dict[str, Any],
) -> list[BridgeGPTModel]:
    """This rank's virtual stages, their parameters still empty."""
    checkpoint = bridge.checkpoint
    check_source(checkpoint)
    wanted = parse_dtype(dtype) or stored_dtype(checkpoint)
    config = model_config(bridge.mapping, bridge.config, bridge.dims, layout, wanted, parallel, **overrides)
    groups.initialize(layout, parallel=parallel)
    return [_chunk(config, layout, bridge, vp_stage if layout.vp > 1 else None) for vp_stage in range(layout.vp)]


def _chunk(config: GPTModelConfig, layout: Layout, bridge: Bridge, vp_stage: int | None) -> BridgeGPTModel:
    """One virtual stage, its parameters still empty."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = BridgeGPTModel(
        config.transformer,
        block_spec(config.transformer, bridge.family.attention_pattern, vp_stage),
        pre_process=stage == 0 and not vp_stage,
        post_process=stage == layout.pp - 1 and vp_stage in (None, layout.vp - 1),
        vp_stage=vp_stage,
        vocab=bridge.dims.vocab,
        **config.arguments,
    )
    if layout.expert_tp != layout.tp:
        # megatron-core tells experts from the rest by this only where --ep is above 1; without it their gradients
        # would be summed over the data parallel ranks of the rest, which hold other shards.
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.allreduce = False
    return model.to(platform.current().device())
