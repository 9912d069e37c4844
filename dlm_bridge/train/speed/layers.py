"""Decoder layers compiled one by one: one compilation serves them all, and norms, rotary and SwiGLU become kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats, by the class names in transformers' `_no_split_modules`."""
    names = {
        name
        for module in model.modules()
        if isinstance(listed := getattr(module, "_no_split_modules", None), list | tuple | set)
        for name in listed
    }
    return [module for module in model.modules() if type(module).__name__ in names]


def compile_layers(model: nn.Module) -> int:
    """Compile the forward of every decoder layer and of the norms outside of them; return how many layers there are.

    Only the forward itself: what others put around a layer, activation checkpointing and FSDP's hooks, stays outside
    and finds the module as it was. Layers have their weights as inputs of one graph, so that all of them run the code
    that the first one compiled. Call it before `fully_shard`.
    """
    layers = decoder_layers(model)
    inside = {module for layer in layers for module in layer.modules()}
    norms = [
        module for module in model.modules() if module not in inside and type(module).__name__.endswith("RMSNorm")
    ]
    for module in [*layers, *norms]:
        compiled: Any = torch.compile(module.forward)
        module.forward = compiled
    return len(layers)
