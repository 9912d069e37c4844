"""A live megatron-core GPTModel with the bridge's weights in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dlm_bridge.convert.layout import Layout
from dlm_bridge.convert.tensors import parse_dtype
from dlm_bridge.parallel import groups, platform
from dlm_bridge.parallel.config import ModelConfig, model_config
from dlm_bridge.parallel.core import GPTModel, parallel_state
from dlm_bridge.parallel.layer_spec import block_spec
from dlm_bridge.parallel.weights import check_source, load, stored_dtype

if TYPE_CHECKING:
    from dlm_bridge.bridge import Bridge


def build_megatron_model(
    bridge: Bridge, layout: Layout, dtype: str | torch.dtype | None = None, **overrides: Any
) -> list[GPTModel]:
    """This rank's virtual-pipeline chunks as megatron-core GPTModels, with the bridge's weights loaded.

    Every process of the layout calls it; process groups are initialised where they are not yet. Each rank reads only
    the tensors of its own pipeline stages. A model takes `(input_ids [B, S], position_ids [B, S], attention_mask)`
    and returns logits [B, S, V / tp] on its last stage; the vocabulary is padded to a multiple of tp, and a token's
    logits beyond the true vocabulary mean nothing. The mask of a block-causal model is made by
    `parallel.attention.attention_mask`. Rotary embeddings count positions from 0 whatever `position_ids` say.

    `dtype` (as of `Bridge.to_megatron`) None keeps the stored one. `overrides` are fields of megatron-core's
    TransformerConfig, such as `sequence_parallel=True`. Raises DlmBridgeError where the layout does not fit the model
    or the processes, or where a tensor is missing, left over, mis-shaped or (without `dtype`) of another dtype than
    the rest.
    """
    checkpoint = bridge.checkpoint
    check_source(checkpoint)
    wanted = parse_dtype(dtype) or stored_dtype(checkpoint)
    config = model_config(bridge.mapping, bridge.config, bridge.dims, layout, wanted, **overrides)
    groups.initialize(layout)
    chunks = [
        _chunk(config, layout, bridge.family.topology, vp_stage if layout.vp > 1 else None)
        for vp_stage in range(layout.vp)
    ]
    load(chunks, checkpoint)
    return chunks


def _chunk(config: ModelConfig, layout: Layout, topology: str, vp_stage: int | None) -> GPTModel:
    """One virtual stage, its parameters still empty."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config.transformer,
        block_spec(config.transformer, topology, vp_stage),
        pre_process=stage == 0 and not vp_stage,
        post_process=stage == layout.pp - 1 and vp_stage in (None, layout.vp - 1),
        vp_stage=vp_stage,
        **config.arguments,
    )
    return model.to(platform.current().device())
