"""Lets Megatron Bridge 0.6.2 convert on a machine without a GPU: bridge_exchange.py imports it first with --on-cpu.

Packages that need a GPU, or belong to other models, are replaced by empty stand-ins for Megatron Bridge's own modules.
megatron-core is not given them and does without. Models are built from megatron-core's local layers, whose keys in a
checkpoint are those of Transformer Engine's, and processes talk through gloo. Calls of CUDA's driver are left out.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import os
import socket
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

REPLACED = ("flashinfer", "nvidia_resiliency_ext", "open_clip", "qwen_vl_utils", "timm", "transformer_engine")


class Absent(type):
    """Metaclass of what a stand-in has: classes whose attributes are such classes, for annotations and as bases."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(name, (), {})

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class StandIn(types.ModuleType):
    """A module that has every name."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins where the packages are not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if replaced(name) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: its names are made when they are asked for."""


def replaced(name: str) -> bool:
    return name.partition(".")[0] in REPLACED


def install() -> None:
    """Change this process so that `megatron.bridge` can be imported and used."""
    import_statement, import_module = builtins.__import__, importlib.import_module

    def for_bridge(
        name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
    ) -> Any:
        asks = (globals or {}).get("__name__", "")
        if level == 0 and replaced(name) and not asks.startswith("megatron.bridge"):
            raise ModuleNotFoundError(name)
        return import_statement(name, globals, locals, fromlist, level)

    def by_name(name: str, package: str | None = None) -> types.ModuleType:
        if replaced(name):
            raise ModuleNotFoundError(name)
        return import_module(name, package)

    builtins.__import__, importlib.import_module = for_bridge, by_name
    sys.meta_path.append(Finder())

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    init_process_group = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *_, **__: init_process_group("gloo")
    for name in ("set_device", "set_rng_state", "synchronize"):
        setattr(torch.cuda, name, lambda *_: None)  # a function each: torch.compile's rules are by function
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    torch.nn.Module.cuda = lambda self, *_: self
    on_device = torch.tensor

    def tensor(*values: Any, **options: Any) -> torch.Tensor:
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return on_device(*values, **options)

    torch.tensor = tensor

    from megatron.bridge.diffusion.models.llada15 import llada15_provider
    from megatron.bridge.diffusion.models.nemotron_labs_diffusion import nemotron_labs_diffusion_provider
    from megatron.bridge.models import gpt_provider
    from megatron.bridge.utils import fusions
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    # Attention after the projections has no weights; theirs is Transformer Engine's, or makes masks on a GPU.
    llada15_provider.LLaDA15TEDotProductAttention = DotProductAttention
    nemotron_labs_diffusion_provider.NemotronLabsDiffusionAttention = DotProductAttention

    # Other modules have imported both by name, so the functions stay and their code is replaced.
    gpt_provider.transformer_engine_layer_spec.__code__ = gpt_provider.local_layer_spec.__code__
    fusions.can_enable_gradient_accumulation_fusion.__code__ = (lambda: False).__code__


install()
