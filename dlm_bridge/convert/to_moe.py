"""Upcycling: conversion of a dense Hub checkpoint to a mixture of experts with the same logits.

Every expert is a copy of the dense MLP (Komatsuzaki et al., arXiv 2212.05055). With granularity G an MLP is split
along its width into G experts, which share a row of the router, so that a token is routed to all of them or none
(virtual groups: He et al., arXiv 2410.07524). The weights of a token's experts sum to 1, so the experts' output
matrices are multiplied by G to make the sum of a copy's experts equal the dense MLP.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoints.huggingface import ConvertedCheckpoint, HubCheckpoint, open_hub
from dlm_bridge.convert.planning import ConversionReport
from dlm_bridge.convert.settings import UpcycleSettings, settings_from, takes
from dlm_bridge.convert.transfer import write_hub
from dlm_bridge.errors import SettingError
from dlm_bridge.models.derived import forms_of
from dlm_bridge.models.families import family_by_name
from dlm_bridge.models.initialisation import Normal, initialise, initializer_range
from dlm_bridge.settings import check_minimum

_MLP = re.compile(r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class _ExpertNames:
    """A family's names for experts."""

    block: str  # prefix of a layer's experts and router
    matrices: dict[str, str]
    experts: str  # config key of their number
    width: str  # config key of their width
    fixed: dict[str, Any]  # further config keys


_EXPERT_NAMES = {
    "qwen3_moe": _ExpertNames(
        "mlp.",
        {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
        "num_experts",
        "moe_intermediate_size",
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "mixtral": _ExpertNames(
        "block_sparse_moe.",
        {"gate": "w1", "up": "w3", "down": "w2"},
        "num_local_experts",
        "intermediate_size",
        {},
    ),
}
# Families with experts whose other tensors are the same, by dense family.
_PAIRS = {"qwen3": "qwen3_moe", "llama": "mixtral", "mistral": "mixtral"}
# Defaults of the dense classes that differ in the classes with experts.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"max_position_embeddings": 32768},
    "llama": {"max_position_embeddings": 2048, "sliding_window": None},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
}


@dataclass(frozen=True)
class Upcycling:
    """Conversion of a dense family to `target`."""

    dense: str  # autoregressive family with the source's tensors
    sparse: str  # autoregressive family with the target's tensors
    target: str


def targets() -> dict[str, Upcycling]:
    """Conversion by dense family. A diffusion model keeps its attention pattern and shift."""
    found = {}
    for dense, sparse in _PAIRS.items():
        found[dense] = Upcycling(dense, sparse, sparse)
        forms = forms_of(family_by_name(sparse))
        for form, name in forms_of(family_by_name(dense)).items():
            found[name] = Upcycling(dense, sparse, forms[form])
    return found


@takes(UpcycleSettings)
def upcycle(
    source: str | os.PathLike[str], output: str | os.PathLike[str], experts: int, **settings: Any
) -> ConversionReport:
    """Convert a dense checkpoint to a mixture of experts with the same logits.

    Routers are randomly initialised with the config's `initializer_range`.

    Args:
        source: Hub folder or Hub id.
        output: Hub folder to write.
        experts: number of copies of each MLP.
        settings: fields of `UpcycleSettings`.

    Raises:
        SettingError: the source's family has no counterpart with experts, a number is refused, or the output exists.
        CheckpointError: the source is damaged.
    """
    chosen = settings_from(UpcycleSettings, **settings)
    opened = open_hub(source, chosen)
    known = targets()
    if opened.family.name not in known:
        raise SettingError(
            "source",
            f"{opened.where}: {opened.family.name} has no counterpart with experts: supported are "
            f"{', '.join(sorted(known))}",
        )
    _check_sizes(experts, chosen, opened)
    checkpoint = _Upcycled(opened, known[opened.family.name], experts, chosen)
    report = write_hub(checkpoint, Path(output), chosen)
    report.action = "upcycle"
    sizes = checkpoint.dims
    report.notes += [
        f"{checkpoint.family.title}: {sizes.experts} experts of width {sizes.moe_ffn} per layer, "
        f"{chosen.top_k * chosen.granularity} per token; logits equal the dense model's until you train",
        "routers are randomly initialised",
        *opened.notes,
    ]
    return report


def _check_sizes(experts: int, settings: UpcycleSettings, source: HubCheckpoint) -> None:
    check_minimum("experts", experts, 2)
    if settings.top_k > experts:
        raise SettingError("top_k", f"must be at most `experts={experts}`, not {settings.top_k}")
    granularity, width = settings.granularity, source.dims.ffn
    if granularity & (granularity - 1) or width % granularity:
        raise SettingError(
            "granularity", f"must be a power of two that divides the MLP's width of {width}, not {granularity}"
        )
    if source.config.get("use_sliding_window"):
        raise SettingError(
            "source",
            f"{source.where} has use_sliding_window, which the families with experts do not support per layer",
        )


class _Upcycled(ConvertedCheckpoint):
    """Model with the source's tensors, in which experts and a router replace each MLP."""

    def __init__(self, source: HubCheckpoint, conversion: Upcycling, experts: int, settings: UpcycleSettings) -> None:
        granularity = settings.granularity
        self._names, self._granularity, self._seed = _EXPERT_NAMES[conversion.sparse], granularity, settings.seed
        target = family_by_name(conversion.target)
        names = self._names
        config = {
            **_config(source, conversion.dense),
            "architectures": [target.architectures[0]],
            "model_type": target.model_type,
            **names.fixed,
            names.experts: experts * granularity,
            "num_experts_per_tok": settings.top_k * granularity,
            names.width: source.dims.ffn // granularity,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
        }
        super().__init__(source, target, config)
        self._origin: dict[str, tuple[str, int]] = {}  # dense matrix and part of it, by expert's matrix
        self._first: dict[str, str] = {}  # first expert's matrix by dense matrix
        self._routers: set[str] = set()
        self._stored = {}
        omitted = {name for name, entry in source.passthrough.items() if not entry.in_model}
        for name in source.reader.names:
            if match := _MLP.fullmatch(name):
                self._add_experts(name, int(match[1]), match[2], experts)
            elif name not in omitted:
                self._stored[name] = source.spec(name)

    def _add_experts(self, name: str, layer: int, matrix: str, copies: int) -> None:
        dtype, (rows, columns) = self._source.spec(name)
        shape = (rows, columns // self._granularity) if matrix == "down" else (rows // self._granularity, columns)
        block = f"model.layers.{layer}.{self._names.block}"
        for expert in range(copies * self._granularity):
            own = f"{block}experts.{expert}.{self._names.matrices[matrix]}.weight"
            self._stored[own], self._origin[own] = (dtype, shape), (name, expert % self._granularity)
            self._first.setdefault(name, own)
        if matrix == "gate":
            self._stored[f"{block}gate.weight"] = (dtype, (copies * self._granularity, columns))
            self._routers.add(f"{block}gate.weight")

    def _recorded_as(self, name: str) -> str:
        return self._first.get(name, name)

    def _tensor(self, name: str) -> torch.Tensor:
        if name in self._origin:
            dense, part = self._origin[name]
            whole = self._source.reader.read(dense)
            if self._first[dense] == name:
                self._note(name, whole)
            if dense.endswith("down_proj.weight"):
                return whole.chunk(self._granularity, dim=1)[part].contiguous() * self._granularity
            return whole.chunk(self._granularity)[part].contiguous()
        if name in self._routers:
            return self._router(name)
        return self._source.reader.read(name)

    def _router(self, name: str) -> torch.Tensor:
        dtype, (rows, hidden) = self._stored[name]
        normal = Normal(initializer_range(self.config))
        copies = initialise(name, (rows // self._granularity, hidden), normal, self._seed)
        return copies.repeat_interleave(self._granularity, dim=0).to(dtype)


def _config(source: HubCheckpoint, dense: str) -> dict[str, Any]:
    """config.json of the source, with the defaults that differ in the class with experts."""
    sizes = source.dims
    omitted = ("auto_map", "_name_or_path", "layer_types", "max_window_layers", "pretraining_tp")
    config = {key: value for key, value in source.config.items() if key not in omitted}
    defaults = {"rms_norm_eps": 1e-6, "tie_word_embeddings": sizes.tied, **_DEFAULTS[dense]}
    if "rope_parameters" not in config:
        defaults["rope_theta"] = 10000.0
    return {**defaults, **config, "num_key_value_heads": sizes.groups, "head_dim": sizes.head_dim}
