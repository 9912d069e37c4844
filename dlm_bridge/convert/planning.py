"""What a conversion will write, from headers alone: every tensor, its dtype and its place, and what that takes."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path

import torch

from dlm_bridge.convert.atomic import check_output
from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec
from dlm_bridge.convert.collector import collector_paused
from dlm_bridge.convert.forked import check_processes
from dlm_bridge.convert.formats.huggingface import ShardPlan
from dlm_bridge.convert.layout import Layout
from dlm_bridge.convert.mapping import Link
from dlm_bridge.convert.megatron_checkpoint import MegatronCheckpoint
from dlm_bridge.convert.moving import bytes_of, held
from dlm_bridge.convert.optimizer_state import OptimizerState, carried_note, left_out_note, optimizer_state
from dlm_bridge.convert.outputs import check_shard_map, shard_plans
from dlm_bridge.convert.pool import Progress, in_flight, worker_count
from dlm_bridge.convert.report import Report
from dlm_bridge.convert.target import MegatronFormat, Target, plan_target
from dlm_bridge.convert.tensors import dtype_name, promote
from dlm_bridge.errors import DlmBridgeError

FIRST_ITERATION = "iter_0000000"
ASSUMED_SPEED = 1e9  # bytes a second, for the time that a dry run tells: a copy on a local solid-state disk
_INTERPRETER = 400 << 20  # bytes of a process that has imported torch


@dataclass(frozen=True)
class Options:
    """What every conversion takes. `dtype` None keeps the stored dtypes."""

    dtype: torch.dtype | None = None
    workers: int | None = None
    overwrite: bool = False
    dry_run: bool = False
    progress: Progress | None = None
    resume: bool = False  # go on from what an earlier, killed run to the same output has done
    megatron: MegatronFormat = field(default_factory=MegatronFormat)  # what `write_megatron` writes
    processes: int = 1  # each with `workers` threads

    def __post_init__(self) -> None:
        check_processes(self.processes)


@dataclass(frozen=True)
class MegatronPlan:
    """A Megatron checkpoint before any tensor is read. `links` have the vocabulary padded; `dtypes` go by key."""

    report: Report
    specs: dict[str, TensorSpec]
    links: list[Link]
    dtypes: dict[str, torch.dtype]
    target: Target
    iteration: str
    number: int
    state: OptimizerState | None = None


@dataclass(frozen=True)
class HubPlan:
    """A Hub folder before any tensor is read."""

    report: Report
    specs: dict[str, TensorSpec]
    shards: list[ShardPlan]


@collector_paused()
def plan_megatron(
    source: Checkpoint, output: Path, layout: Layout, options: Options, vocab_multiple: int | None
) -> MegatronPlan:
    """Raises DlmBridgeError for a source that is not whole or not of its family, a layout that does not fit the model,
    and a refused output."""
    if source.mapping.hub_only:
        raise DlmBridgeError(f"{source.where}: {source.mapping.hub_only}")
    check_output(output, source.folders(), options.overwrite)
    notes = source.check()
    layout.check(source.dims)
    for rule in dict.fromkeys(link.rule for link in source.links):
        rule.check_tp(layout.expert_tp if "{expert}" in rule.megatron else layout.tp, source.dims)
    if vocab_multiple is None and isinstance(source, MegatronCheckpoint) and source.manifest is not None:
        asked_for = source.format == options.megatron.name == "torch_dist"  # the legacy format pads by itself
        vocab_multiple = source.manifest.vocab_multiple if asked_for else None
    vocab_multiple = options.megatron.vocab_multiple(vocab_multiple, layout)
    links = _padded_links(source, vocab_multiple)
    specs = _target_specs(source, options.dtype)
    dtypes = _key_dtypes(source.links, specs)
    from_megatron = isinstance(source, MegatronCheckpoint)
    iteration = source.iteration if isinstance(source, MegatronCheckpoint) else FIRST_ITERATION
    if iteration != "release" and not re.fullmatch(r"iter_\d{7,}", iteration):
        iteration = FIRST_ITERATION  # the folder of an iteration that was saved under a name of its own
    number = 0 if iteration == "release" else int(iteration.removeprefix("iter_"))
    state = None if options.megatron.weights_only else optimizer_state(source, links, options.megatron.name)
    target = plan_target(options.megatron, source, links, layout, dtypes, number, state)
    report = _report("reshard" if from_megatron else "import", source, output, specs, options)
    report.format, report.layout, report.vocab_multiple = options.megatron.name, layout.as_dict(), vocab_multiple
    report.key_style = options.megatron.key_style if options.megatron.name == "torch" else None
    report.files = {f"{iteration}/{file}": size for file, size in sorted(target.files.items())}
    report.bytes = sum(target.files.values())
    report.notes += notes + _widened(source.links, specs, dtypes)
    report.notes += left_out_note(source) if state is None else [carried_note(state)]
    shards = source.hub.shards
    if shards:
        check_shard_map(source.where, shards, source.hub_names())
    pairs = zip(source.links, links, strict=True)
    _tell_cost(report, [held(link, source, specs, dtypes[padded.megatron_key]) for link, padded in pairs], options)
    return MegatronPlan(report, specs, links, dtypes, target, iteration, number, state)


@collector_paused()
def plan_hub(source: Checkpoint, output: Path, options: Options, shard_size: int | None) -> HubPlan:
    """Raises DlmBridgeError as `plan_megatron` does, and for a shard map that does not fit the model."""
    check_output(output, source.folders(), options.overwrite)
    notes = source.check()
    specs = _target_specs(source, options.dtype)
    plans = shard_plans(source, specs, shard_size)
    report = _report("export", source, output, specs, options)
    report.files = {plan.file: plan.nbytes for plan in plans}
    report.bytes = sum(report.files.values())
    report.notes += notes + left_out_note(source)
    sizes = [held(link, source, specs, specs[link.hub_names[0]][0]) for link in source.links]
    _tell_cost(report, sizes, options)
    return HubPlan(report, specs, plans)


def _tell_cost(report: Report, sizes: Sequence[int], options: Options) -> None:
    """Peak memory of a process and time; `sizes` are the bytes that each task holds."""
    together = sum(heapq.nlargest(worker_count(options.workers), sizes))
    report.peak_memory = _INTERPRETER + min(together, in_flight(sizes))
    report.estimated_seconds = report.bytes / ASSUMED_SPEED


def _padded_links(source: Checkpoint, vocab_multiple: int | None) -> list[Link]:
    """The source's links, with the vocabulary's rows rounded up to a multiple. Raises DlmBridgeError."""
    if vocab_multiple is None:
        return source.links
    if vocab_multiple < 1:
        raise DlmBridgeError(f"--vocab-multiple must be at least 1, not {vocab_multiple}")
    dims = replace(source.dims, vocab=-(-source.dims.vocab // vocab_multiple) * vocab_multiple)
    return [Link(link.rule, dims, link.layer, link.expert) for link in source.links]


def _target_specs(source: Checkpoint, dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    """dtype and shape of every Hub tensor after the cast."""
    specs = {name: source.spec(name) for name in source.hub_names()}
    own = {name for link in source.links if link.rule.own_dtype for name in link.hub_names}

    def target(name: str, stored: torch.dtype) -> torch.dtype:
        if dtype is None:
            return stored
        return promote([dtype, stored]) if name in own else dtype

    return {name: (target(name, stored), shape) for name, (stored, shape) in specs.items()}


def _key_dtypes(links: Sequence[Link], specs: dict[str, TensorSpec]) -> dict[str, torch.dtype]:
    """Megatron key -> the dtype that holds all of its Hub tensors: layers stacked in one tensor share one dtype."""
    groups: dict[str, dict[torch.dtype, None]] = {}
    for link in links:
        groups.setdefault(link.megatron_key, {}).update({specs[name][0]: None for name in link.hub_names})
    return {key: promote(list(dtypes)) for key, dtypes in groups.items()}


def _widened(links: Sequence[Link], specs: dict[str, TensorSpec], dtypes: dict[str, torch.dtype]) -> list[str]:
    mixed = {
        link.megatron_key: dtypes[link.megatron_key]
        for link in links
        if any(specs[name][0] != dtypes[link.megatron_key] for name in link.hub_names)
    }
    return [
        f"{key}: tensors of mixed dtypes share it, stored as {dtype_name(dtype)} without loss (export narrows back)"
        for key, dtype in mixed.items()
    ]


def _report(action: str, source: Checkpoint, output: Path, specs: dict[str, TensorSpec], options: Options) -> Report:
    hub = source.hub
    return Report(
        action=action,
        source=source.where,
        output=str(output),
        family=source.family.name,
        format="huggingface",
        dtype=" + ".join(sorted({dtype_name(dtype) for dtype, _ in specs.values()})),
        tensors=len(specs),
        parameters=sum(prod(shape) for name, (_, shape) in specs.items() if name not in source.carried),
        bytes=0,
        files={},
        side_files=sorted({*hub.files, *hub.texts}),
        left_out=list(hub.left_out),
        derived=[asdict(row) for row in hub.derived],
        largest_tensor=max(map(bytes_of, specs.values())),
        workers=worker_count(options.workers),
        processes=options.processes,
        dry_run=options.dry_run,
    )
