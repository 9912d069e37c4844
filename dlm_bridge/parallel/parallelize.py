"""A live megatron-core model with a checkpoint's weights: configuration, process groups, layer specs, models,
weights."""

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

    Every process of the layout calls it; process groups are initialised where they are not yet. Each rank reads only
    the tensors of its own pipeline stages. Inputs and outputs of a model are those of `BridgeGPTModel.forward`. The
    vocabulary is padded to a multiple of tp; padded columns enter no softmax. Multi-token prediction layers are left
    out, unless `mtp_num_layers` is their number: they add to the loss in training, and do nothing else. Parameters
    carry the attributes that megatron-core's data parallelism and optimizers read.

    Args:
        dtype: as of `Bridge.to_megatron`; None keeps the stored one. Tensors with a dtype of their own (a router in
            fp32) keep it.
        parallel: context parallelism; None for none.
        load_weights: False for a training checkpoint that megatron-core loads afterwards: shapes and dtypes are set,
            values are zero.
        unallocated: leave the layers' parameters without memory and values, for each model's `absent.fill`.
        value_head: a value model: with a head of one number, zeros, in place of the output layer.
        overrides: fields of megatron-core's TransformerConfig, such as `sequence_parallel=True`.

    Raises DlmBridgeError where the layout does not fit the model or the processes, or where a tensor is missing, left
    over, mis-shaped or (without `dtype`) of another dtype than the rest.
    """
    check_source(checkpoint)
    params_dtype = parse_dtype(dtype) or stored_dtype(checkpoint)
    config = model_config(
        checkpoint.mapping, checkpoint.config, checkpoint.dims, layout, params_dtype, parallel, **overrides
    )
    groups.initialize(layout, parallel=parallel, graphs=config.transformer.cuda_graph_impl != "none")
    arguments = config.arguments
    if value_head:  # which leaves a tied embedding to itself
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
    """Tell megatron-core which parameters are experts', which it knows only where --ep is above 1: their gradients
    would be summed over the data parallel ranks of the others, which hold other shards."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False
