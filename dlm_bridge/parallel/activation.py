"""Transformer Engine's activation function as a part of megatron-core's feed-forward."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


class TransformerEngineActivation:
    """What megatron-core builds for `use_te_activation_func`, without a state of its own.

    A class, because megatron-core takes a function in a layer's description for the activation itself.
    """

    def __new__(cls, config: Any) -> Any:
        return stateless(_operation(config))


def _operation(config: Any) -> nn.Module:
    from megatron.core.extensions.transformer_engine import TEActivationOp

    operation: nn.Module = TEActivationOp(config)
    return operation


def stateless(module: nn.Module) -> nn.Module:
    """Let a module without parameters have nothing to save.

    megatron-core 0.16.1 asks every module of a feed-forward for its `sharded_state_dict`, which Transformer Engine's
    operations do not have; what they call their extra state is that of a quantisation that is never asked of them, and
    a checkpoint would have to have it in order to be loaded.
    """
    module.__class__ = _stateless(type(module))  # type: ignore[arg-type]  # mypy's own view of types as keys
    return module


@cache
def _stateless(kind: type[nn.Module]) -> type[nn.Module]:
    def sharded_state_dict(self: nn.Module, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    body = {
        "sharded_state_dict": sharded_state_dict,
        # torch compares these with its own to see whether there is a state.
        "get_extra_state": nn.Module.get_extra_state,
        "set_extra_state": nn.Module.set_extra_state,
    }
    return type(kind.__name__, (kind,), body)
