"""Build a live megatron-core model: configuration, process groups, layer specs, modules, weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.mapping.dtypes import parse_dtype
from dlm_bridge.mapping.layout import ContextParallelConfig, Layout
from dlm_bridge.parallel import groups, platform
from dlm_bridge.parallel.config import model_config
from dlm_bridge.parallel.core import parallel_state
from dlm_bridge.parallel.gpt import BridgeGPTModel
from dlm_bridge.parallel.layer_spec import block_spec, prediction_spec
from dlm_bridge.parallel.mcore_patches.fsdp import unallocated_layers
from dlm_bridge.parallel.weights import check_source, load, stored_dtype


def build_megatron_model(
    checkpoint: Checkpoint,
    layout: Layout,
    dtype: str | torch.dtype | None = None,
    parallel: ContextParallelConfig | None = None,
    load_weights: bool = True,
    unallocated: bool = False,
    value_head: bool = False,
    **overrides: Any,
) -> list[BridgeGPTModel]:
    """This rank's virtual pipeline stages as megatron-core GPTModels, with the checkpoint's weights loaded.

    Every process of the layout calls it. Process groups are initialised unless they exist. Each rank reads only the
    tensors of its own pipeline stages. `BridgeGPTModel.forward` describes inputs and outputs. The vocabulary is padded
    to a multiple of tp; padded columns do not enter a softmax. Multi-token prediction layers are omitted unless
    `mtp_num_layers` is their number; they contribute only to the training loss. Parameters have the attributes that
    megatron-core's data parallelism and optimizers read.

    Args:
        dtype: as in `Bridge.to_megatron`; None keeps the stored dtype. Tensors with a dtype of their own (a router in
            fp32) keep it.
        parallel: context parallelism; None for none.
        load_weights: False for a training checkpoint that megatron-core loads afterwards: shapes and dtypes are set,
            values are zero.
        unallocated: leave the layers' parameters without memory, until each model's `absent.fill`.
        value_head: replace the output layer by a value head with one output, initialised with zeros.
        overrides: fields of megatron-core's TransformerConfig, such as `sequence_parallel=True`.

    Raises:
        LayoutError: the layout does not fit the model or the number of processes.
        CheckpointError: a tensor is missing, unknown, of the wrong shape, or differs from the copy that it must equal.
        SettingError: megatron-core refuses an override, or the stored dtypes differ and `dtype` is None.
    """
    check_source(checkpoint)
    params_dtype = parse_dtype(dtype) or stored_dtype(checkpoint)
    config = model_config(
        checkpoint.mapping, checkpoint.config, checkpoint.dims, layout, params_dtype, parallel, **overrides
    )
    groups.initialize(layout, parallel=parallel, graphs=config.transformer.cuda_graph_impl != "none")
    arguments = config.arguments
    if value_head:  # a tied embedding is then only the embedding
        arguments = {**arguments, "share_embeddings_and_output_weights": False}
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks: list[BridgeGPTModel] = []
    nbytes: dict[torch.Tensor, int] = {}
    pattern = checkpoint.family.attention_pattern
    for vp_stage in range(layout.vp) if layout.vp > 1 else [None]:
        last = stage == layout.pp - 1 and vp_stage in (None, layout.vp - 1)
        predicts = last and config.transformer.mtp_num_layers
        layers: AbstractContextManager[dict[torch.Tensor, int]]
        layers = unallocated_layers() if unallocated else nullcontext({})
        with layers as without:
            model = BridgeGPTModel(
                config.transformer,
                block_spec(config.transformer, pattern, vp_stage),
                pre_process=stage == 0 and not vp_stage,
                post_process=last,
                mtp_block_spec=prediction_spec(config.transformer, pattern) if predicts else None,
                vp_stage=vp_stage,
                vocab=checkpoint.dims.vocab,
                value_head=value_head,
                **arguments,
            )
        nbytes |= without
        if layout.expert_tp != layout.tp:
            _mark_expert_params(model)
        chunks.append(model.to(platform.current().device()))
    absent = load(chunks, checkpoint, load_weights, nbytes)
    if absent.loads:
        for model in chunks:
            model.absent = absent
    return chunks


def _mark_expert_params(model: BridgeGPTModel) -> None:
    """Mark the experts' parameters, which megatron-core does only for ep > 1. Otherwise it would sum their gradients
    over the data parallel ranks of dense parameters, which hold other shards."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
