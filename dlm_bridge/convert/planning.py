"""Plan of a conversion from headers alone: every tensor, its dtype and its place, cost and report."""

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
from dlm_bridge.convert.formats.legacy_writer import KEY_STYLES
from dlm_bridge.convert.manifest import MANIFEST
from dlm_bridge.convert.optimizer_state import OptimizerState, is_optimizer_key
from dlm_bridge.convert.run_settings import VOCAB_DIVISIBLE_BY
from dlm_bridge.convert.streaming import BAND
from dlm_bridge.convert.workers import Progress, check_processes, in_flight, worker_count
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.files.atomic import check_output
from dlm_bridge.files.reading import gc_paused
from dlm_bridge.mapping.dtypes import dtype_name, promote
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.mapping.rules import ParamMapping

_KINDS = [load_kind(place) for place, _ in KINDS]
FORMATS = tuple(sorted((kind.format for kind in _KINDS if kind.writable), reverse=True))
SHARD_SIZE = 5_000_000_000  # bytes; where neither a shard map nor --shard-size says more
FIRST_ITERATION = "iter_0000000"
ASSUMED_SPEED = 1e9  # bytes a second, for the time that a dry run tells: a copy on a local solid-state disk
_INTERPRETER = 400 << 20  # bytes of a process that has imported torch


@dataclass
class ConversionReport:
    """`files` maps every weight file below the output to its bytes; `seconds` is None for a plan that was not run."""

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
    key_style: str | None = None  # of the legacy format
    side_files: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    derived: list[dict[str, Any]] = field(default_factory=list)  # key, value, origin, assumed: of a derived config
    largest_tensor: int = 0  # bytes
    workers: int = 1  # threads, of each process
    processes: int = 1
    peak_memory: int = 0  # bytes of the process, at the most
    estimated_seconds: float = 0.0  # at planning.ASSUMED_SPEED
    dry_run: bool = False
    seconds: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class MegatronFormat:
    """Options of the written Megatron checkpoint: `--format`, `--key-style`, `--run-config`, `--weights-only`."""

    name: str = "torch_dist"
    key_style: str = "te"  # the legacy format's
    run_config: bool = False  # write Megatron Bridge's run_config.yaml as well
    weights_only: bool = False  # leave an optimizer's state out

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise DlmBridgeError(f"--format {self.name}: choose one of {', '.join(FORMATS)}")
        if self.key_style not in KEY_STYLES:
            raise DlmBridgeError(f"--key-style {self.key_style}: choose one of {', '.join(KEY_STYLES)}")
        if self.key_style != "te" and self.name != "torch":
            raise DlmBridgeError(f"--key-style {self.key_style} is the legacy format's: add --format torch")

    def vocab_multiple(self, given: int | None, layout: Layout) -> int | None:
        """What the vocabulary's rows are rounded up to: in the legacy format as Megatron-LM pads them, so that every
        rank has as many. Raises DlmBridgeError."""
        if self.name != "torch":
            return given
        if given is not None and given % layout.tp:
            raise DlmBridgeError(
                f"--vocab-multiple {given}: --format torch needs one that --tp {layout.tp} divides, since every rank "
                "has as many rows"
            )
        return VOCAB_DIVISIBLE_BY * layout.tp if given is None else given


@dataclass(frozen=True)
class Options:
    """Options of every conversion. `dtype` None keeps the stored dtypes."""

    dtype: torch.dtype | None = None
    workers: int | None = None
    overwrite: bool = False
    dry_run: bool = False
    progress: Progress | None = None
    resume: bool = False  # go on from what an earlier, killed run to the same output has done
    megatron: MegatronFormat = field(default_factory=MegatronFormat)  # what `write_megatron` writes
    processes: int = 1  # each with `workers` threads
    accept_changed_tensors: bool = False  # convert a source that is not as recorded when it was written

    def __post_init__(self) -> None:
        check_processes(self.processes)


@dataclass(frozen=True)
class MegatronOutput:
    """A Megatron checkpoint before any tensor is read. `params` have the vocabulary padded; `dtypes` go by key."""

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
    """A Hub folder before any tensor is read."""

    report: ConversionReport
    specs: dict[str, TensorSpec]
    shards: list[ShardFile]


@gc_paused()
def plan_megatron(
    source: Checkpoint, output: Path, layout: Layout, options: Options, vocab_multiple: int | None
) -> MegatronOutput:
    """Raises DlmBridgeError for a source that is not whole or not of its family, a layout that does not fit the model,
    and a refused output."""
    if source.mapping.hub_only:
        raise DlmBridgeError(f"{source.where}: {source.mapping.hub_only}")
    _check_output(source, output, options)
    notes = source.check()
    layout.check(source.dims)
    for rule in dict.fromkeys(param.rule for param in source.params):
        rule.check_tp(layout.expert_tp if "{expert}" in rule.megatron else layout.tp, source.dims)
    same_format = source.format == options.megatron.name == "torch_dist"  # the legacy format pads by itself
    if vocab_multiple is None and same_format and source.manifest is not None:
        vocab_multiple = source.manifest.vocab_multiple
    vocab_multiple = options.megatron.vocab_multiple(vocab_multiple, layout)
    params = _padded_params(source, vocab_multiple)
    specs = _target_specs(source, options.dtype)
    dtypes = _key_dtypes(source.params, specs)
    iteration = source.iteration or FIRST_ITERATION
    if iteration != "release" and not re.fullmatch(r"iter_\d{7,}", iteration):
        iteration = FIRST_ITERATION  # the folder of an iteration that was saved under a name of its own
    number = 0 if iteration == "release" else int(iteration.removeprefix("iter_"))
    state = None if options.megatron.weights_only else source.optimizer_state(params, options.megatron.name)
    kind = next(kind for kind in _KINDS if kind.format == options.megatron.name)
    request = OutputRequest(source, params, layout, dtypes, number, options.megatron.key_style, state)
    files, writer = kind.plan_output(request)
    report = _report("reshard" if source.iteration else "import", source, output, specs, options)
    report.format, report.layout, report.vocab_multiple = options.megatron.name, layout.as_dict(), vocab_multiple
    report.key_style = options.megatron.key_style if options.megatron.name == "torch" else None
    report.files = {f"{iteration}/{file}": size for file, size in sorted(files.items())}
    report.bytes = sum(files.values())
    report.notes += notes + _widened(source.params, specs, dtypes) + _spelling_note(source)
    report.notes += _dropped_note(source) if state is None else [state.note]
    shards = source.hub.shards
    if shards:
        _check_shard_map(source.where, shards, source.hub_names())
    pairs = zip(source.params, params, strict=True)
    _tell_cost(
        report, [task_bytes(param, source, specs, dtypes[padded.megatron_key]) for param, padded in pairs], options
    )
    return MegatronOutput(report, specs, params, dtypes, writer, iteration, number, state)


@gc_paused()
def plan_hub(source: Checkpoint, output: Path, options: Options, shard_size: int | None) -> HubOutput:
    """Raises DlmBridgeError as `plan_megatron` does, and for a shard map that does not fit the model."""
    _check_output(source, output, options)
    notes = source.check()
    specs = _target_specs(source, options.dtype)
    plans = _shard_plans(source, specs, shard_size)
    report = _report("export", source, output, specs, options)
    report.files = {plan.file: plan.nbytes for plan in plans}
    report.bytes = sum(report.files.values())
    report.notes += notes + _dropped_note(source) + _spelling_note(source)
    sizes = [task_bytes(param, source, specs, specs[param.hub_names[0]][0]) for param in source.params]
    _tell_cost(report, sizes, options)
    return HubOutput(report, specs, plans)


def _check_output(source: Checkpoint, output: Path, options: Options) -> None:
    """Raise DlmBridgeError for a refused output. One that a resume finds may be its own, as the plan will show."""
    if not (options.resume and (output / MANIFEST).is_file()):
        check_output(output, source.folders(), options.overwrite)


def _spelling_note(source: Checkpoint) -> list[str]:
    if source.family.hub_spelling(source.hub.config) == source.hub.config:
        return []
    return ["config.json has the Hub's keys, which every reader knows, in the place of those that transformers saves"]


def _dropped_note(source: Checkpoint) -> list[str]:
    """What a report says of a training state that does not go with the weights."""
    state = source.training_state()
    if not any(map(is_optimizer_key, state)):
        return []
    return [f"weights only: {len(state)} tensors and objects of training state are not carried over"]


def _tell_cost(report: ConversionReport, sizes: Sequence[int], options: Options) -> None:
    """Peak memory of a process and time; `sizes` are the bytes that each task holds."""
    together = sum(heapq.nlargest(worker_count(options.workers), sizes))
    report.peak_memory = _INTERPRETER + min(together, in_flight(sizes))
    report.estimated_seconds = report.bytes / ASSUMED_SPEED


def _padded_params(source: Checkpoint, vocab_multiple: int | None) -> list[ParamMapping]:
    """The source's params, with the vocabulary's rows rounded up to a multiple. Raises DlmBridgeError."""
    if vocab_multiple is None:
        return source.params
    if vocab_multiple < 1:
        raise DlmBridgeError(f"--vocab-multiple must be at least 1, not {vocab_multiple}")
    dims = replace(source.dims, vocab=-(-source.dims.vocab // vocab_multiple) * vocab_multiple)
    return [ParamMapping(param.rule, dims, param.layer, param.expert) for param in source.params]


def _target_specs(source: Checkpoint, dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    """dtype and shape of every Hub tensor after the cast."""
    specs = {name: source.spec(name) for name in source.hub_names()}
    own = {name for param in source.params if param.rule.own_dtype for name in param.hub_names}

    def target(name: str, stored: torch.dtype) -> torch.dtype:
        if dtype is None:
            return stored
        return promote([dtype, stored]) if name in own else dtype

    return {name: (target(name, stored), shape) for name, (stored, shape) in specs.items()}


def _key_dtypes(params: Sequence[ParamMapping], specs: dict[str, TensorSpec]) -> dict[str, torch.dtype]:
    """Megatron key -> the dtype that holds all of its Hub tensors: layers stacked in one tensor share one dtype."""
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
        f"{key}: tensors of mixed dtypes share it, stored as {dtype_name(dtype)} without loss (export narrows back)"
        for key, dtype in mixed.items()
    ]


def _report(
    action: str, source: Checkpoint, output: Path, specs: dict[str, TensorSpec], options: Options
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
        workers=worker_count(options.workers),
        processes=options.processes,
        dry_run=options.dry_run,
    )


def task_bytes(param: ParamMapping, source: Checkpoint, specs: dict[str, TensorSpec], dtype: torch.dtype) -> int:
    """Upper bound of the bytes that a parameter's task holds: a few bands; or its slice, and one Hub tensor or one
    rank's part beside it."""
    widest = max(dtype.itemsize, *(source.spec(name)[0].itemsize for name in param.hub_names))
    whole = prod(param.megatron_shape) * widest * 3 // 2
    if not can_stream(param, source, specs, dtype):
        return whole
    row = prod(param.megatron_shape[1:]) * widest
    return min(whole, 3 * max(BAND, row))


def can_stream(param: ParamMapping, source: Checkpoint, specs: dict[str, TensorSpec], dtype: torch.dtype) -> bool:
    """Whether a parameter's rows go straight from file to file: all its tensors are read and written in this dtype,
    and its slice lies in whole rows or columns."""
    same = all(source.spec(name)[0] == specs[name][0] == dtype for name in param.hub_names)
    return same and source.streams(param)


def _shard_plans(source: Checkpoint, specs: dict[str, TensorSpec], shard_size: int | None) -> list[ShardFile]:
    """The safetensors files to write: by size where asked, else the Hub's own map, else by the Hub's default size.

    Raises DlmBridgeError for a shard map that does not name the model's tensors, each once, in plain files.
    """
    names = source.hub_names()
    if shard_size is not None and shard_size < 1:
        raise DlmBridgeError(f"--shard-size must be at least one byte, not {shard_size}")
    if shard_size is not None or not source.hub.shards:
        return plan_by_size({name: specs[name] for name in names}, shard_size or SHARD_SIZE)
    _check_shard_map(source.where, source.hub.shards, names)
    return plan_like(source.hub.shards, specs)


def _check_shard_map(where: str, shards: Sequence[ShardRecord], names: Sequence[str]) -> None:
    """Raise DlmBridgeError unless the map names exactly `names` and stays inside the folder."""
    listed = [name for shard in shards for name in shard.tensors]
    if sorted(listed) != sorted(names):
        odd = sorted(set(listed) ^ set(names)) or sorted(name for name in set(listed) if listed.count(name) > 1)
        raise DlmBridgeError(f"{where}: shard map and model do not agree on tensor {odd[0]}: give --shard-size")
    for shard in shards:
        path = PurePosixPath(shard.file)
        if path.is_absolute() or ".." in path.parts or "\\" in shard.file or path.suffix != ".safetensors":
            raise DlmBridgeError(f"{where}: its shard map names the file '{shard.file}', outside the output")
