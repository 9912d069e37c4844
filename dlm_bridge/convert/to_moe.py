"""Upcycling: a dense Hub checkpoint becomes one with experts, which computes the same before it is trained.

Every expert is a copy of the dense MLP (Komatsuzaki et al., arXiv 2212.05055). With a granularity G an MLP is cut
along its width into G experts, and the G experts of a copy share a row of the router, so that a token that chooses one
chooses all of them (virtual groups: He et al., arXiv 2410.07524). The weights of a token's chosen experts add up to 1;
their output matrices are therefore G times the dense one's, which makes the sum of a copy's experts the dense MLP.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoints.huggingface import HubCheckpoint, MadeOfHub, open_hub
from dlm_bridge.convert.planning import ConversionReport
from dlm_bridge.convert.settings import HubSettings
from dlm_bridge.convert.transfer import write_hub
from dlm_bridge.convert.workers import Progress
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.models.derived import forms_of
from dlm_bridge.models.families import family_by_name
from dlm_bridge.models.initialisation import Normal, initialise, initializer_range

_MLP = re.compile(r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.weight")
SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class _Spelling:
    """How a family with experts names them, and the keys of its config.json."""

    block: str
    matrices: dict[str, str]
    experts: str
    width: str
    fixed: dict[str, Any]


_SPELLINGS = {
    "qwen3_moe": _Spelling(
        "mlp.",
        {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
        "num_experts",
        "moe_intermediate_size",
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "mixtral": _Spelling(
        "block_sparse_moe.",
        {"gate": "w1", "up": "w3", "down": "w2"},
        "num_local_experts",
        "intermediate_size",
        {},
    ),
}
# The dense family and the one with experts whose other tensors are the same.
_PAIRS = {"qwen3": "qwen3_moe", "llama": "mixtral", "mistral": "mixtral"}
# What configs may leave out, and the classes with experts have another default for.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"max_position_embeddings": 32768},
    "llama": {"max_position_embeddings": 2048, "sliding_window": None},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096},
}


@dataclass(frozen=True)
class Upcycling:
    """A way from a dense family to `target`. `dense` and `sparse` are the autoregressive families whose tensors the
    two have."""

    dense: str
    sparse: str
    target: str


def targets() -> dict[str, Upcycling]:
    """What each dense family becomes. A diffusion model keeps its attention pattern and shift."""
    found = {}
    for dense, sparse in _PAIRS.items():
        found[dense] = Upcycling(dense, sparse, sparse)
        forms = forms_of(family_by_name(sparse))
        for form, name in forms_of(family_by_name(dense)).items():
            found[name] = Upcycling(dense, sparse, forms[form])
    return found


def upcycle(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    experts: int,
    top_k: int = 2,
    *,
    granularity: int = 1,
    seed: int = 0,
    shard_size: int | str | None = SHARD_SIZE,
    revision: str | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    accept_changed_tensors: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Write the checkpoint with experts that the dense `source` (a Hub folder or id) becomes.

    Args:
        experts: copies of each MLP.
        top_k: copies that a token goes through.
        granularity: experts that each copy is cut into, a power of two, so that scaling is exact in every dtype. The
            model has `experts * granularity` experts, `top_k * granularity` of them for a token.
        seed: of the routers, which are noise of the config's `initializer_range`, drawn from (seed, tensor name).
        shard_size: the largest weight file, in bytes or as "5GB".

    Raises:
        DlmBridgeError: a family without one with experts to become, numbers that do not fit, a source that is not
            whole, a refused output.
    """
    opened = open_hub(os.fspath(source), revision)
    known = targets()
    if opened.family.name not in known:
        raise DlmBridgeError(
            f"{opened.where}: no family with experts has the attention of {opened.family.name}: known are "
            f"{', '.join(sorted(known))}"
        )
    way = known[opened.family.name]
    _check_sizes(experts, top_k, granularity, opened)
    checkpoint = _Upcycled(opened, way, experts, top_k, granularity, seed)
    settings = HubSettings(
        shard_size=shard_size,
        workers=workers,
        overwrite=overwrite,
        dry_run=dry_run,
        progress=progress,
        accept_changed_tensors=accept_changed_tensors,
    )
    report = write_hub(checkpoint, Path(output), settings)
    report.action = "upcycle"
    sizes = checkpoint.dims
    report.notes += [
        f"{checkpoint.family.title}: {sizes.experts} experts of width {sizes.moe_ffn} a layer, {top_k * granularity} "
        "for a token; until it is trained it computes what the dense model computes",
        "routers are noise",
        *opened.notes,
    ]
    return report


def _check_sizes(experts: int, top_k: int, granularity: int, source: HubCheckpoint) -> None:
    if experts < 2:
        raise DlmBridgeError(f"--experts {experts}: a model with experts has at least 2 copies of each MLP")
    if not 1 <= top_k <= experts:
        raise DlmBridgeError(f"--top-k {top_k}: a token goes through 1 to {experts} copies (--experts)")
    if granularity < 1 or granularity & (granularity - 1):
        raise DlmBridgeError(f"--granularity {granularity} is not a power of two, by which weights scale exactly")
    if source.dims.ffn % granularity:
        raise DlmBridgeError(f"--granularity {granularity} does not divide the MLP's width of {source.dims.ffn}")
    if source.config.get("use_sliding_window"):
        raise DlmBridgeError(
            f"{source.where}: config.json: use_sliding_window: layers with experts have no window of their own"
        )


class _Upcycled(MadeOfHub):
    """The source's tensors, with each MLP as experts and a router beside them."""

    def __init__(
        self, source: HubCheckpoint, way: Upcycling, experts: int, top_k: int, granularity: int, seed: int
    ) -> None:
        self._spelling, self._granularity, self._seed = _SPELLINGS[way.sparse], granularity, seed
        target = family_by_name(way.target)
        spelling = self._spelling
        config = {
            **_config(source, way.dense),
            "architectures": [target.architectures[0]],
            "model_type": target.model_type,
            **spelling.fixed,
            spelling.experts: experts * granularity,
            "num_experts_per_tok": top_k * granularity,
            spelling.width: source.dims.ffn // granularity,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
        }
        super().__init__(source, target, config)
        self._origin: dict[str, tuple[str, int]] = {}  # an expert's matrix -> the dense one, and its part of that
        self._first: dict[str, str] = {}  # the dense matrix -> the first that is made of it
        self._routers: set[str] = set()
        self._stored = {}
        left = {name for name, entry in source.passthrough.items() if not entry.in_model}
        for name in source.reader.names:
            if match := _MLP.fullmatch(name):
                self._add_experts(name, int(match[1]), match[2], experts)
            elif name not in left:
                self._stored[name] = source.spec(name)

    def _add_experts(self, name: str, layer: int, matrix: str, copies: int) -> None:
        dtype, (rows, columns) = self._source.spec(name)
        shape = (rows, columns // self._granularity) if matrix == "down" else (rows // self._granularity, columns)
        block = f"model.layers.{layer}.{self._spelling.block}"
        for expert in range(copies * self._granularity):
            own = f"{block}experts.{expert}.{self._spelling.matrices[matrix]}.weight"
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
        noise = Normal(initializer_range(self.config))
        copies = initialise(name, (rows // self._granularity, hidden), noise, self._seed)
        return copies.repeat_interleave(self._granularity, dim=0).to(dtype)


def _config(source: HubCheckpoint, dense: str) -> dict[str, Any]:
    """The source's keys. Those that it leaves out, and that the class with experts has another default for, are
    written out."""
    sizes = source.dims
    left = ("auto_map", "_name_or_path", "layer_types", "max_window_layers", "pretraining_tp")
    config = {key: value for key, value in source.config.items() if key not in left}
    defaults = {"rms_norm_eps": 1e-6, "tie_word_embeddings": sizes.tied, **_DEFAULTS[dense]}
    if "rope_parameters" not in config:
        defaults["rope_theta"] = 10000.0
    return {**defaults, **config, "num_key_value_heads": sizes.groups, "head_dim": sizes.head_dim}
