"""The transformer layers of a model in megatron-core's terms: which modules, and which tokens attend to which."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel import platform
from dlm_bridge.parallel.core import (
    AttnMaskType,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_num_layers_to_build,
)

MASKS = {"bidirectional": AttnMaskType.no_mask}


def block_spec(config: TransformerConfig, topology: str, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage (virtual stage `vp_stage`) and the final norm.

    Transformer Engine's modules where it is installed and CUDA is the platform, else megatron-core's local ones.
    The mask type is set in the spec, because the local attention ignores the one that a call passes.
    Raises DlmBridgeError for a topology or a normalisation that the engine does not have.
    """
    if topology not in MASKS:
        raise DlmBridgeError(f"the Megatron engine has no {topology} attention, only {', '.join(MASKS)}")
    if config.normalization != "RMSNorm":
        raise DlmBridgeError(f"the Megatron engine has no {config.normalization}, only RMSNorm")
    if uses_transformer_engine():
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        norm = _transformer_engine_norm()
    else:
        layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
        norm = LocalRMSNorm
        layer.submodules.input_layernorm = norm
        layer.submodules.pre_mlp_layernorm = norm
    layer.submodules.self_attention.params["attn_mask_type"] = MASKS[topology]
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage), layer_norm=norm)


def uses_transformer_engine() -> bool:
    """Whether layers are made of Transformer Engine's modules."""
    return platform.current().name == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def _transformer_engine_norm() -> Any:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


class LocalRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, which megatron-core wraps too, but also for sequence parallelism: each rank then normalises its
    own tokens, and `weight.sequence_parallel` tells megatron-core to sum the gradient over tensor parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, device=platform.current().device(), dtype=config.params_dtype)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (unknown to torch)
