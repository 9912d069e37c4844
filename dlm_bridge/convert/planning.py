"""Conversion planning from headers only: tensors, dtypes, output files, cost and report."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import Checkpoint, CheckpointWriter, OutputRequest, TensorSpec, spec_bytes
from dlm_bridge.convert.checkpoints import KINDS, load_kind
from dlm_bridge.convert.formats.hub_weights import ShardFile, ShardRecord, plan_by_size, plan_like
from dlm_bridge.convert.manifest import MANIFEST
from dlm_bridge.convert.optimizer_state import OptimizerState, is_optimizer_key
from dlm_bridge.convert.run_settings import VOCAB_DIVISIBLE_BY
from dlm_bridge.convert.settings import ConversionSettings, HubSettings, MegatronSettings
from dlm_bridge.convert.streaming import BAND
from dlm_bridge.convert.workers import in_flight, worker_count
from dlm_bridge.errors import CheckpointError, counted
from dlm_bridge.files.atomic import check_output
from dlm_bridge.files.reading import gc_paused
from dlm_bridge.mapping.dtypes import dtype_name, promote
from dlm_bridge.mapping.rules import ParamMapping

SHARD_SIZE = 5_000_000_000  # bytes; default without a shard map and `shard_size`
FIRST_ITERATION = "iter_0000000"
ASSUMED_SPEED = 1e9  # bytes/s, for the time estimate of a dry run: a copy on a local solid-state disk
_INTERPRETER = 400 << 20  # bytes of a process that has imported torch


@dataclass
class ConversionReport:
    """Report of a conversion. `files` maps the weight files of the output to their sizes in bytes; `seconds` is None
    for a dry run."""

    action: str  # "import", "export" or "reshard"
    source: str
    output: str
    family: str
    format: str
    dtype: str
    tensors: int
    parameters: int
    bytes: int
    files: dict[str, int]
    layout: dict[str, Any] | None = None
    vocab_multiple: int | None = None
    key_style: str | None = None  # legacy format only
    mcore: str | None = None  # torch_dist only
    side_files: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    derived: list[dict[str, Any]] = field(default_factory=list)  # derived config: key, value, origin, assumed
    largest_tensor: int = 0  # bytes
    workers: int = 1  # threads per process
    processes: int = 1
    peak_memory: int = 0  # bytes per process, upper bound
    estimated_seconds: float = 0.0  # at planning.ASSUMED_SPEED
    dry_run: bool = False
    seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dict of plain values."""
        return asdict(self)


@dataclass(frozen=True)
class MegatronOutput:
    """Planned Megatron checkpoint, before any tensor is read. `params` have the padded vocabulary; `dtypes` maps
    Megatron keys to dtypes."""

    report: ConversionReport
    specs: dict[str, TensorSpec]
    params: list[ParamMapping]
    dtypes: dict[str, torch.dtype]
    writer: Callable[[Path], CheckpointWriter]
    iteration: str
    number: int
    state: OptimizerState | None = None


@dataclass(frozen=True)
class HubOutput:
    """Planned Hub folder, before any tensor is read."""

    report: ConversionReport
    specs: dict[str, TensorSpec]
    shards: list[ShardFile]


@gc_paused()
def plan_megatron(source: Checkpoint, output: Path, settings: MegatronSettings) -> MegatronOutput:
    """Plan a Megatron checkpoint.

    Raises:
        CheckpointError: the source is incomplete or does not match its family.
        LayoutError: the model does not fit the layout.
        SettingError: the output is refused.
    """
    if source.mapping.hub_only:
        raise CheckpointError(source.where, source.mapping.hub_only)
    layout = settings.layout
    _check_output(source, output, settings)
    notes = source.check()
    layout.check(source.dims)
    for rule in dict.fromkeys(param.rule for param in source.params):
        rule.check_tp(layout.expert_tp if "{expert}" in rule.megatron else layout.tp, source.dims)
    vocab_multiple = settings.vocab_multiple
    if vocab_multiple is None and settings.format == "torch":  # as Megatron-LM: every rank has the same number of rows
        vocab_multiple = VOCAB_DIVISIBLE_BY * layout.tp
    elif vocab_multiple is None and settings.format == source.format and source.manifest is not None:
        vocab_multiple = source.manifest.vocab_multiple
    params = _padded_params(source, vocab_multiple)
    specs = _target_specs(source, settings.cast_dtype)
    dtypes = _key_dtypes(source.params, specs)
    iteration = source.iteration or FIRST_ITERATION
    if iteration != "release" and not re.fullmatch(r"iter_\d{7,}", iteration):
        iteration = FIRST_ITERATION  # the source's folder has another name
    number = 0 if iteration == "release" else int(iteration.removeprefix("iter_"))
    state = None if settings.weights_only else source.optimizer_state(params, settings.format)
    kind = next(kind for kind in (load_kind(place) for place, _ in KINDS) if kind.format == settings.format)
    request = OutputRequest(source, params, layout, dtypes, number, settings.key_style, settings.mcore, state)
    files, writer = kind.plan_output(request)
    report = _report("reshard" if source.iteration else "import", source, output, specs, settings)
    report.format, report.layout, report.vocab_multiple = settings.format, layout.as_dict(), vocab_multiple
    report.key_style = settings.key_style if settings.format == "torch" else None
    report.mcore = settings.mcore if settings.format == "torch_dist" else None
    report.files = {f"{iteration}/{file}": size for file, size in sorted(files.items())}
    report.bytes = sum(files.values())
    report.notes += notes + _widened(source.params, specs, dtypes) + _spelling_note(source)
    report.notes += _dropped_note(source) if state is None else [state.note]
    shards = source.hub.shards
    if shards:
        _check_shard_map(source.where, shards, source.hub_names())
    pairs = zip(source.params, params, strict=True)
    _tell_cost(
        report, [task_bytes(param, source, specs, dtypes[padded.megatron_key]) for param, padded in pairs], settings
    )
    return MegatronOutput(report, specs, params, dtypes, writer, iteration, number, state)


@gc_paused()
def plan_hub(source: Checkpoint, output: Path, settings: HubSettings) -> HubOutput:
    """Plan a Hub folder. Raises the errors of `plan_megatron`, and CheckpointError for a shard map that does not fit
    the model."""
    _check_output(source, output, settings)
    notes = source.check()
    specs = _target_specs(source, settings.cast_dtype)
    plans = _shard_plans(source, specs, settings.shard_bytes)
    report = _report("export", source, output, specs, settings)
    report.files = {plan.file: plan.nbytes for plan in plans}
    report.bytes = sum(report.files.values())
    report.notes += notes + _dropped_note(source) + _spelling_note(source)
    sizes = [task_bytes(param, source, specs, specs[param.hub_names[0]][0]) for param in source.params]
    _tell_cost(report, sizes, settings)
    return HubOutput(report, specs, plans)


def _check_output(source: Checkpoint, output: Path, settings: ConversionSettings) -> None:
    """Raise SettingError for a refused output. With `resume`, an existing output may be the conversion's own, which is
    checked after planning."""
    if not (settings.resume and (output / MANIFEST).is_file()):
        check_output(output, source.folders(), settings.overwrite)


def _spelling_note(source: Checkpoint) -> list[str]:
    if source.family.hub_spelling(source.hub.config) == source.hub.config:
        return []
    return ["config.json has the Hub's original keys in place of the keys that transformers saves"]


def _dropped_note(source: Checkpoint) -> list[str]:
    """Report note about training state that is not converted."""
    state = source.training_state()
    if not any(map(is_optimizer_key, state)):
        return []
    items = counted(len(state), "item of training state is", "items of training state are")
    return [f"weights only: {items} not converted"]


def _tell_cost(report: ConversionReport, sizes: Sequence[int], settings: ConversionSettings) -> None:
    """Estimate peak memory per process and time. `sizes`: bytes that each task holds in memory."""
    together = sum(heapq.nlargest(worker_count(settings.workers), sizes))
    report.peak_memory = _INTERPRETER + min(together, in_flight(sizes))
    report.estimated_seconds = report.bytes / ASSUMED_SPEED


def _padded_params(source: Checkpoint, vocab_multiple: int | None) -> list[ParamMapping]:
    """Parameters of the source with the vocabulary padded to a multiple."""
    if vocab_multiple is None:
        return source.params
    dims = replace(source.dims, vocab=-(-source.dims.vocab // vocab_multiple) * vocab_multiple)
    return [ParamMapping(param.rule, dims, param.layer, param.expert) for param in source.params]


def _target_specs(source: Checkpoint, dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    """Dtype and shape of every Hub tensor after the cast."""
    specs = {name: source.spec(name) for name in source.hub_names()}
    own = {name for param in source.params if param.rule.own_dtype for name in param.hub_names}

    def target(name: str, stored: torch.dtype) -> torch.dtype:
        if dtype is None:
            return stored
        return promote([dtype, stored]) if name in own else dtype

    return {name: (target(name, stored), shape) for name, (stored, shape) in specs.items()}


def _key_dtypes(params: Sequence[ParamMapping], specs: dict[str, TensorSpec]) -> dict[str, torch.dtype]:
    """Map each Megatron key to a dtype that represents all of its Hub tensors: layers stacked in one tensor share one
    dtype."""
    groups: dict[str, dict[torch.dtype, None]] = {}
    for param in params:
        groups.setdefault(param.megatron_key, {}).update({specs[name][0]: None for name in param.hub_names})
    return {key: promote(list(dtypes)) for key, dtypes in groups.items()}


def _widened(
    params: Sequence[ParamMapping], specs: dict[str, TensorSpec], dtypes: dict[str, torch.dtype]
) -> list[str]:
    mixed = {
        param.megatron_key: dtypes[param.megatron_key]
        for param in params
        if any(specs[name][0] != dtypes[param.megatron_key] for name in param.hub_names)
    }
    return [
        f"{key}: combines tensors of mixed dtypes, stored as {dtype_name(dtype)} without loss (export restores them)"
        for key, dtype in mixed.items()
    ]


def _report(
    action: str, source: Checkpoint, output: Path, specs: dict[str, TensorSpec], settings: ConversionSettings
) -> ConversionReport:
    hub = source.hub
    return ConversionReport(
        action=action,
        source=source.where,
        output=str(output),
        family=source.family.name,
        format="huggingface",
        dtype=" + ".join(sorted({dtype_name(dtype) for dtype, _ in specs.values()})),
        tensors=len(specs),
        parameters=sum(prod(shape) for name, (_, shape) in specs.items() if name not in source.passthrough),
        bytes=0,
        files={},
        side_files=sorted({*hub.files, *hub.texts}),
        left_out=list(hub.excluded),
        derived=[asdict(row) for row in hub.derived],
        largest_tensor=max(map(spec_bytes, specs.values())),
        workers=worker_count(settings.workers),
        processes=settings.processes,
        dry_run=settings.dry_run,
    )


def task_bytes(param: ParamMapping, source: Checkpoint, specs: dict[str, TensorSpec], dtype: torch.dtype) -> int:
    """Upper bound of the memory of a parameter's task in bytes: a few bands if it is streamed, otherwise its slice and
    one Hub tensor or one rank's part."""
    widest = max(dtype.itemsize, *(source.spec(name)[0].itemsize for name in param.hub_names))
    whole = prod(param.megatron_shape) * widest * 3 // 2
    if not can_stream(param, source, specs, dtype):
        return whole
    row = prod(param.megatron_shape[1:]) * widest
    return min(whole, 3 * max(BAND, row))


def can_stream(param: ParamMapping, source: Checkpoint, specs: dict[str, TensorSpec], dtype: torch.dtype) -> bool:
    """True if a parameter can be streamed from file to file: all its tensors are read and written in this dtype, and
    they are whole rows or columns of its slice."""
    same = all(source.spec(name)[0] == specs[name][0] == dtype for name in param.hub_names)
    return same and source.streams(param)


def _shard_plans(source: Checkpoint, specs: dict[str, TensorSpec], shard_size: int | None) -> list[ShardFile]:
    """Plan the safetensors files: by `shard_size` if given, else by the Hub's shard map, else by the default size.

    Raises CheckpointError for a shard map that does not list each tensor of the model once, in plain files.
    """
    names = source.hub_names()
    if shard_size is not None or not source.hub.shards:
        return plan_by_size({name: specs[name] for name in names}, shard_size or SHARD_SIZE)
    _check_shard_map(source.where, source.hub.shards, names)
    return plan_like(source.hub.shards, specs)


def _check_shard_map(where: str, shards: Sequence[ShardRecord], names: Sequence[str]) -> None:
    """Raise CheckpointError unless the map lists exactly `names` and all files are inside the folder."""
    listed = [name for shard in shards for name in shard.tensors]
    if sorted(listed) != sorted(names):
        odd = sorted(set(listed) ^ set(names)) or sorted(name for name in set(listed) if listed.count(name) > 1)
        raise CheckpointError(where, f"shard map and model do not agree on tensor {odd[0]}: set `shard_size`")
    for shard in shards:
        path = PurePosixPath(shard.file)
        if path.is_absolute() or ".." in path.parts or "\\" in shard.file or path.suffix != ".safetensors":
            raise CheckpointError(where, f"its shard map names the file '{shard.file}', outside the output")
