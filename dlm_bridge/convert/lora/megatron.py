"""LoRA adapters as torch_dist checkpoints with the keys of Megatron Bridge's PEFT: writer and reader.

Megatron Bridge names the tensors after the linear layer: `...linear_proj.adapter.linear_in.weight` is A [rank,
columns], `linear_out.weight` is B [rows, rank]. Query, key and value are one linear layer in Megatron, gate and up
another. Canonical LoRA has an adapter for each part (`adapter.adapter_q.linear_in.weight`). Fused LoRA has one per
layer, which is equivalent only if the parts share A. The rows of a fused B are those of the fused weight, so the
mapping's own rule permutes them. Tensor parallelism shards B by rows. It shards A by its rank, or by columns if the
layer's input is sharded.

Each routed expert has its own adapter, as in PEFT's stacks, and its gate and up projections share A in both styles.
The keys are `...experts.experts.linear_fc1.adapter.linear_in.weight`, with the expert as an axis. Megatron Bridge has
one adapter for all experts of a layer, which is a different model.

DoRA adds a magnitude per Hub weight in both styles, sharded like the layer's rows. Its key is Megatron Bridge's,
`adapter.weight_magnitude`, or `adapter.adapter_q.weight_magnitude` if a layer has several.

Rows are in the order of the unsharded weight. Megatron Bridge splits the B of a canonical gate or up adapter into two
halves per rank, as if it contained both, so that the same tensor means other rows with tensor parallelism. These two
adapters can be exchanged with Megatron Bridge at tensor parallel size 1, all others at any size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints.huggingface import HUB_FOLDER, copy_files, list_side_files
from dlm_bridge.convert.checkpoints.megatron import is_extra_state, iteration_folder
from dlm_bridge.convert.checkpoints.torch_dist import TorchDistReader, TorchDistWriter, plan_torch_dist
from dlm_bridge.convert.lora.peft import (
    AdapterInfo,
    LoraAdapter,
    LoraFactor,
    body_names,
    check_all_layers,
    check_shapes,
    factor_suffix,
    plain_config,
)
from dlm_bridge.convert.lora.tensors import STYLES, AdapterTensor, Style, adapter_tensors, possible_tensors
from dlm_bridge.convert.manifest import ChangedFile
from dlm_bridge.convert.optimizer_state import is_training_state
from dlm_bridge.convert.run_settings import RUN_CONFIG, find_run_config, read_run_config
from dlm_bridge.convert.streaming import digest, tensor_bands
from dlm_bridge.errors import CheckpointError, SettingError, first_of
from dlm_bridge.files.atomic import atomic_output
from dlm_bridge.files.reading import read_json
from dlm_bridge.hub import ADAPTER_CONFIG, TRACKER
from dlm_bridge.mapping.dtypes import WEIGHT_DTYPES, dtype_name
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.settings import check_choice

ADAPTER_MANIFEST = "dlm_bridge_adapter.json"
_ITERATION = "iter_0000000"
_VERSION = 1
_MANIFEST_TYPES = {
    "rank": int, "alpha": float, "megatron_alpha": float, "modules": dict, "adapter_config": dict, "dtype": str,
    "tensors": dict,
}  # fmt: skip


@dataclass
class AdapterReport:
    """Report of an adapter's conversion."""

    source: str
    output: str
    base: str
    style: str
    rank: int
    alpha: float
    tensors: int
    parameters: int
    dtype: str
    layout: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Report as a dict of JSON values."""
        return asdict(self)


def write_megatron_adapter(
    adapter: LoraAdapter,
    base: Checkpoint,
    output: Path,
    layout: Layout,
    style: str = "auto",
    overwrite: bool = False,
    accept_changed_tensors: bool = False,
) -> AdapterReport:
    """Write an adapter as Megatron adapter weights.

    Args:
        layout: parallel layout of the output.
        style: "canonical", "fused", or "auto": fused if the weights of every fused layer share A, else canonical.

    Raises:
        CheckpointError: the adapter cannot be stored in Megatron's layout.
        LayoutError: the model does not fit `layout`.
        SettingError: `style` does not fit the adapter, or the output exists.
        ChangedTensorsError: the adapter differs from its recorded digests and `accept_changed_tensors` is not set.
    """
    facts = adapter.facts
    adapter.check_unchanged(accept_changed_tensors)
    if reason := base.mapping.hub_only or base.mapping.engine_lacks:
        raise SettingError("base", f"{base.where}: {reason}")
    layout.check(base.dims)
    check_all_layers(base, facts.modules, facts.where)
    chosen = _style(adapter, base, style)
    pieces = adapter_tensors(base, facts.modules, facts.rank, chosen, facts.where, facts.dora)
    for rule, dims in {(piece.param.rule, piece.param.dims) for piece in pieces}:
        rule.check_tp(layout.tp, dims)
    dtypes = {piece.param.megatron_key: facts.dtype_of(piece.part) for piece in pieces}
    plan = plan_torch_dist([piece.param for piece in pieces], layout, dtypes)
    sources = [*base.folders(), *([facts.folder] if facts.folder else [])]
    with atomic_output(output, sources, overwrite, sum(plan.files.values())) as folder:
        writer = TorchDistWriter(folder / _ITERATION, plan)
        digests = {}
        for piece in pieces:
            tensors = _factor_tensors(adapter, piece)
            for name, tensor in zip(piece.param.hub_names, tensors, strict=True):
                digests[name] = digest(tensor)
            bands = tensor_bands(piece.param.to_megatron(tensors).contiguous())
            writer.note(piece.param, writer.write(piece.param, bands))
        writer.finish(0)
        (folder / HUB_FOLDER).mkdir()
        if facts.folder is not None:
            copy_files(facts.folder, facts.files, folder / HUB_FOLDER)
        manifest = {
            **adapter_manifest(
                base, facts.rank, facts.alpha, facts.scale, facts.dtype, facts.modules, facts.config, chosen
            ),
            "layout": layout.as_dict(),
            "tensors": digests,
        }
        (folder / ADAPTER_MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        (folder / TRACKER).write_text("0")
    return AdapterReport(
        source=facts.where,
        output=str(output),
        base=base.where,
        style=chosen,
        rank=facts.rank,
        alpha=facts.scale * facts.rank,
        tensors=len({piece.param.megatron_key for piece in pieces}),
        parameters=sum(prod(piece.param.megatron_shape) for piece in pieces),
        dtype=dtype_name(facts.dtype),
        layout=layout.as_dict(),
    )


def adapter_manifest(
    base: Checkpoint,
    rank: int,
    alpha: float,
    scale: float,
    dtype: torch.dtype,
    modules: dict[str, str],
    config: dict[str, Any],
    style: Style = "canonical",
    fingerprint: str | None = None,
) -> dict[str, Any]:
    """Contents of ADAPTER_MANIFEST without digests of tensors. `fingerprint` is the base's."""
    return {
        "format_version": _VERSION,
        "family": base.family.name,
        "base": base.hub.source,
        "fingerprint": fingerprint,
        "style": style,
        "rank": rank,
        "alpha": alpha,
        # Megatron's scale is alpha / rank; this alpha gives the same product, also for rank-stabilised LoRA.
        "megatron_alpha": scale * rank,
        "dtype": dtype_name(dtype),
        "modules": modules,
        "adapter_config": config,
        "tensors": {},
    }


def is_megatron_adapter(path: Path) -> bool:
    """True if a folder is this package's adapter, or a Megatron checkpoint that may be Megatron Bridge's adapter."""
    return (path / ADAPTER_MANIFEST).is_file() or (path / TRACKER).is_file() or (path / ".metadata").is_file()


class MegatronAdapter(LoraAdapter):
    """Adapter checkpoint of `base`, written by this package or by Megatron Bridge (with alpha in run_config.yaml).

    Raises:
        CheckpointError: incomplete, another model's, or with tensors that are not an adapter's.
    """

    def __init__(self, path: Path, base: Checkpoint) -> None:
        folder = iteration_folder(path)
        where = str(path)
        self._reader = TorchDistReader(folder)
        manifest = read_adapter_manifest(path)
        known = {key: tensor for key, tensor in self._reader.contents.tensors.items() if not is_training_state(key)}
        rank = _rank(known, where)
        self._places: dict[tuple[str, LoraFactor], tuple[AdapterTensor, int]] = {}
        used: dict[str, Style] = {}
        for style, factor in possible_tensors(base, rank):
            key = factor.param.megatron_key
            if key not in known:
                continue
            self._check(factor, where, base.where)
            used[key] = style
            for number, weight in enumerate(factor.weights):
                self._places[weight, factor.part] = (factor, 0 if factor.shared else number)
        extra = known.keys() - used.keys()
        objects = [
            key for key in self._reader.contents.objects if not is_extra_state(key) and not is_training_state(key)
        ]
        if extra or objects:
            raise CheckpointError(
                where, f"{first_of([*extra, *objects])} is not an adapter weight of a {base.family.name} model"
            )
        weights = list(dict.fromkeys(weight for weight, _ in self._places))
        self.style: Style = "fused" if "fused" in used.values() else "canonical"
        magnitudes = {factor.param.megatron_key for factor, _ in self._places.values() if factor.part == "magnitude"}
        dtypes = {known[key].dtype for key in used.keys() - magnitudes}
        own_dtypes = {known[key].dtype for key in magnitudes}
        if len(dtypes) != 1 or len(own_dtypes) > 1 or None in dtypes | own_dtypes:
            raise CheckpointError(where, "its tensors have several dtypes")
        magnitude_dtype = own_dtypes.pop() if own_dtypes else None
        self.facts = _facts(path, folder, manifest, base, rank, weights, dtypes.pop(), magnitude_dtype)
        for weight in weights:
            missing = [part for part in self.facts.factors if (weight, part) not in self._places]
            if missing:
                raise CheckpointError(where, f"{factor_suffix(missing[0])} of {weight} is missing")
            (rows, columns) = base.spec(weight)[1]
            check_shapes(base, weight, (rank, columns), (rows, rank), rank, where)
        self._recorded = {} if manifest is None else manifest["tensors"]

    def changed(self) -> list[ChangedFile]:
        found: dict[str, str] = {}
        for (weight, part), (factor, number) in self._places.items():
            found[factor.param.hub_names[number]] = digest(self.tensor(weight, part))
        return [
            ChangedFile(name, "differs from its recorded digest", recorded, found.get(name))
            for name, recorded in self._recorded.items()
            if found.get(name) != recorded
        ]

    def tensor(self, weight: str, part: LoraFactor) -> torch.Tensor:
        factor, number = self._places[weight, part]
        param = factor.param
        stack = tuple(index for index, _ in param.stack)
        return param.to_hub(self._reader.read(param.megatron_key, stack, param.megatron_shape))[number].contiguous()

    def _check(self, factor: AdapterTensor, where: str, base: str) -> None:
        param = factor.param
        wanted = (*(size for _, size in param.stack), *param.megatron_shape)
        found = self._reader.tensor(param.megatron_key).shape
        if found != wanted:
            raise CheckpointError(
                where,
                f"tensor {param.megatron_key} has shape {list(found)}, an adapter of {base} has {list(wanted)}: it is "
                "another model's",
            )
        self._reader.check_tiled(param.megatron_key)


def _style(adapter: LoraAdapter, base: Checkpoint, asked: str) -> Style:
    check_choice("style", asked, STYLES)
    if asked == "canonical":
        return "canonical"
    for param in base.params:
        changed = [name for name in param.hub_names if name in adapter.facts.modules]
        if len(param.hub_names) < 2 or not changed:
            continue
        reason = None
        if len(changed) < len(param.hub_names):
            missing = next(name for name in param.hub_names if name not in changed)
            reason = f"does not change {missing}"
        else:
            first, *others = (adapter.tensor(name, "A") for name in changed)
            if not all(torch.equal(first, other) for other in others):
                reason = f"has different A for {' and '.join(changed)}"
        if reason and asked == "fused":
            raise SettingError("style", f"fused, but {adapter.facts.where} {reason}: use `style=canonical`")
        if reason:
            return "canonical"
    return "fused"


def _factor_tensors(adapter: LoraAdapter, piece: AdapterTensor) -> list[torch.Tensor]:
    """Hub tensors of a Megatron adapter tensor."""
    weights = piece.weights[:1] if piece.shared else piece.weights
    return [adapter.tensor(weight, piece.part) for weight in weights]


def _rank(known: dict[str, Any], where: str) -> int:
    inner = [tensor.shape for key, tensor in known.items() if key.endswith(".linear_in.weight")]
    ranks = {shape[-2] for shape in inner if len(shape) >= 2}
    if len(ranks) != 1:
        what = f"adapters of ranks {sorted(ranks)}: only one rank is supported" if inner else "no adapter weight"
        raise CheckpointError(where, f"has {what}")
    return int(ranks.pop())


def _facts(
    path: Path,
    folder: Path,
    manifest: dict[str, Any] | None,
    base: Checkpoint,
    rank: int,
    weights: Iterable[str],
    dtype: torch.dtype | None,
    magnitude_dtype: torch.dtype | None,
) -> AdapterInfo:
    assert dtype is not None
    if manifest is None:
        alpha = _bridge_alpha(folder, path)
        modules = {name: body.removesuffix(".weight") for name, body in body_names(base.family, weights).items()}
        config = plain_config(rank, alpha, modules.values(), base.hub.source.get("name"))
        return AdapterInfo(str(path), rank, alpha, alpha / rank, dtype, modules, config)
    dora = bool(manifest["adapter_config"].get("use_dora"))
    if manifest["rank"] != rank or set(manifest["modules"]) != set(weights) or dora != (magnitude_dtype is not None):
        raise CheckpointError(path / ADAPTER_MANIFEST, "does not match the weights")
    hub = path / HUB_FOLDER
    files = list_side_files(hub, set()).kept if hub.is_dir() else ()
    return AdapterInfo(
        where=str(path),
        rank=rank,
        alpha=manifest["alpha"],
        scale=manifest["megatron_alpha"] / rank,
        dtype=WEIGHT_DTYPES.get(manifest["dtype"], dtype),
        modules=manifest["modules"],
        config=manifest["adapter_config"],
        folder=hub if ADAPTER_CONFIG in files else None,
        files=files,
        magnitude_dtype=magnitude_dtype,
    )


def read_adapter_manifest(folder: Path) -> dict[str, Any] | None:
    """Manifest of this package's adapters; None for others. Raises CheckpointError for a damaged one."""
    path = folder / ADAPTER_MANIFEST
    try:
        value = read_json(path)
    except FileNotFoundError:
        return None
    wrong = ["format_version"] if value.get("format_version") != _VERSION else []
    wrong += [key for key, kind in _MANIFEST_TYPES.items() if not isinstance(value.get(key), kind)]
    if wrong:
        raise CheckpointError(path, f"is not an adapter manifest of version {_VERSION}: '{wrong[0]}' is wrong")
    return value


def _bridge_alpha(folder: Path, path: Path) -> float:
    """`peft.alpha` of Megatron Bridge's run_config.yaml."""
    file = find_run_config(path, folder)
    if file is None:
        raise CheckpointError(
            path, f"has neither {ADAPTER_MANIFEST} nor {RUN_CONFIG}, so the adapter's scale is not known"
        )
    peft = read_run_config(file, "peft", "alpha")
    if not isinstance(peft["alpha"], int | float) or "DoRA" in str(peft.get("_target_", "")):
        raise CheckpointError(file, f"only LoRA is supported, not {peft.get('_target_')} of alpha {peft['alpha']!r}")
    return float(peft["alpha"])
