"""A live megatron-core GPTModel with the bridge's weights in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dlm_bridge.convert.layout import Layout
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel import groups, platform
from dlm_bridge.parallel.config import ModelConfig, model_config
from dlm_bridge.parallel.core import GPTModel, parallel_state
from dlm_bridge.parallel.layer_spec import block_spec
from dlm_bridge.parallel.weights import check_carried, check_coverage, load

if TYPE_CHECKING:
    from dlm_bridge.bridge import Bridge


def build_megatron_model(
    bridge: Bridge, layout: Layout, dtype: torch.dtype | None = None, **overrides: Any
) -> list[GPTModel]:
    """This rank's virtual-pipeline chunks as megatron-core GPTModels, with the bridge's weights loaded.

    Every process of the layout calls it; process groups are initialised where they are not yet. Each rank reads only
    the tensors of its own pipeline stages. A model takes `(input_ids [B, S], position_ids [B, S], attention_mask)`
    and returns logits [B, S, V / tp] on its last stage; the vocabulary is padded to a multiple of tp, and a token's
    logits beyond the true vocabulary mean nothing.

    `dtype` None keeps the stored dtype. `overrides` are fields of megatron-core's TransformerConfig, such as
    `sequence_parallel=True`. Raises DlmBridgeError where the layout does not fit the model or the processes, or where
    a tensor is missing, left over, mis-shaped or of another dtype.
    """
    config = model_config(
        bridge.mapping, bridge.config, bridge.dims, layout, dtype or _stored_dtype(bridge), **overrides
    )
    hub_names = set(bridge.hub_names())
    check_coverage(bridge.mapping, bridge.dims, hub_names)
    groups.initialize(layout)
    if parallel_state.is_pipeline_first_stage():
        check_carried(bridge.mapping, bridge.dims, hub_names, bridge.read)
    chunks = [
        _chunk(config, layout, bridge.family.topology, vp_stage if layout.vp > 1 else None)
        for vp_stage in range(layout.vp)
    ]
    load(chunks, bridge.mapping, bridge.dims, bridge.read, cast=dtype is not None)
    return chunks


def _stored_dtype(bridge: Bridge) -> torch.dtype:
    """The dtype of the smallest tensor; that all others share it is checked while they are loaded."""
    links = bridge.mapping.links(bridge.dims)
    sizes = {
        name: torch.Size(shape).numel()
        for link in links
        for name, shape in zip(link.hub_names, link.hub_shapes, strict=True)
    }
    name = min(sizes, key=lambda name: sizes[name])
    dtype = bridge.read(name).dtype
    if not dtype.is_floating_point:
        raise DlmBridgeError(f"{name} is stored as {dtype}, which is no dtype of a weight")
    return dtype


def _chunk(config: ModelConfig, layout: Layout, topology: str, vp_stage: int | None) -> GPTModel:
    """One virtual stage, its parameters still empty."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config.transformer,
        block_spec(config.transformer, topology, vp_stage),
        vocab_size=config.vocab,
        max_sequence_length=config.max_sequence_length,
        pre_process=stage == 0 and not vp_stage,
        post_process=stage == layout.pp - 1 and vp_stage in (None, layout.vp - 1),
        share_embeddings_and_output_weights=config.tied,
        position_embedding_type="rope",
        rotary_base=config.rotary_base,
        vp_stage=vp_stage,
    )
    return model.to(platform.current().device())
