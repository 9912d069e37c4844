"""Streaming conversions: any checkpoint to Megatron's layout or to the Hub's, one parameter at a time.

Both read a parameter's Hub tensors once, digest them on the way, and write them once. Import is a Hub source to
Megatron, reshard a Megatron source to Megatron, export a Megatron source to the Hub.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path

import torch

from dlm_bridge.convert.atomic import JOURNAL as JOURNAL
from dlm_bridge.convert.atomic import Journal, JournalEntry, atomic_output, fingerprint, has_progress, matches
from dlm_bridge.convert.checkpoint import Checkpoint, CheckpointWriter, TensorSpec
from dlm_bridge.convert.checkpoints.megatron import MegatronCheckpoint
from dlm_bridge.convert.checkpoints.torch_dist import TRACKER
from dlm_bridge.convert.formats.safetensors_file import HubWriter, ShardRecord, plan_like
from dlm_bridge.convert.manifest import MANIFEST as MANIFEST
from dlm_bridge.convert.optimizer_state import transfer_state, write_common
from dlm_bridge.convert.planning import (
    ConversionReport,
    HubPlan,
    MegatronPlan,
    Options,
    can_stream,
    plan_hub,
    plan_megatron,
    spec_bytes,
    task_bytes,
)
from dlm_bridge.convert.records import Records
from dlm_bridge.convert.run_settings import write_run_config
from dlm_bridge.convert.side_files import (
    CARRIED_FILE,
    HUB_FOLDER,
    index_bytes,
    side_file_digests,
    write_passthrough,
    write_side_files,
)
from dlm_bridge.convert.streaming import (
    Sink,
    SliceRange,
    bytes_digest,
    digested,
    distribute,
    read_bands,
    tensor_bands,
    with_zero_rows,
)
from dlm_bridge.convert.workers import Progress, TaskMemory, in_flight, new_tensor, run_forked, run_tasks, worker_count
from dlm_bridge.mapping.dtypes import dtype_name
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.mapping.rules import ParamMapping

# Beside what a conversion carries; a run that was killed at its end has left the last two to the one that resumes it.
_NO_SIDE_FILES = (JOURNAL, MANIFEST, TRACKER)


def write_megatron(
    source: Checkpoint, output: Path, layout: Layout, options: Options, vocab_multiple: int | None = None
) -> ConversionReport:
    """Write a Megatron checkpoint of `source` cut by `layout`; with `dry_run` only say what would be written.

    Raises DlmBridgeError for a source that is not whole or not of its family, a layout that does not fit the model,
    and a refused output; then nothing is left under the output's name.
    """
    started = time.monotonic()
    plan = plan_megatron(source, output, layout, options, vocab_multiple)
    report, specs, iteration = plan.report, plan.specs, plan.iteration
    if options.dry_run:
        return report
    with _unfinished_output(source, output, plan, options) as (folder, job):
        writer = plan.target.writer(folder / iteration)
        carried = move_to_megatron(job, writer, plan.params, plan.dtypes)
        if plan.state is not None:
            transfer_state(source, plan.state, writer, options.workers)
        hub_folder = folder / HUB_FOLDER
        hub_folder.mkdir(exist_ok=True)
        write_passthrough(hub_folder / CARRIED_FILE, carried)
        shards = source.hub.shards
        index = index_bytes(source, plan_like(shards, specs), specs, like_source=True) if shards else None
        write_side_files(source, hub_folder, options.dtype, index)
        file_digests = writer.finish(plan.number)
        if plan.state is not None:
            file_digests |= write_common(plan.state, folder / iteration)
        if options.megatron.run_config:
            write_run_config(folder / iteration, source, plan.params, layout, plan.dtypes)
        manifest = job.records.manifest(options.megatron.name, options.dtype)
        manifest.layout, manifest.vocab_multiple = report.layout, report.vocab_multiple
        manifest.iteration = iteration
        manifest.side_files = side_file_digests(folder, skip={*_NO_SIDE_FILES, *report.files})
        manifest.files = {f"{iteration}/{file}": value for file, value in sorted(file_digests.items())}
        manifest.write(folder)
        (folder / TRACKER).write_text(iteration if iteration == "release" else str(plan.number))
    report.notes += job.records.notes()
    report.seconds = time.monotonic() - started
    return report


def write_hub(source: Checkpoint, output: Path, options: Options, shard_size: int | None = None) -> ConversionReport:
    """Write a Hub folder of `source`: its own shard map where one is known, or files of at most `shard_size` bytes.

    Raises DlmBridgeError as `write_megatron` does.
    """
    started = time.monotonic()
    plan = plan_hub(source, output, options, shard_size)
    report = plan.report
    if options.dry_run:
        return report
    with _unfinished_output(source, output, plan, options) as (folder, job):
        move_to_hub(job, HubWriter(folder, plan.shards))
        like_source = shard_size is None and bool(source.hub.shards)
        write_side_files(source, folder, options.dtype, index_bytes(source, plan.shards, plan.specs, like_source))
        manifest = job.records.manifest("huggingface", options.dtype)
        manifest.side_files = side_file_digests(folder, skip={*_NO_SIDE_FILES, *report.files})
        manifest.files = {shard.file: bytes_digest(shard.header) for shard in plan.shards}
        if not like_source:
            manifest.shards = [
                ShardRecord(shard.file, shard.metadata, tuple(entry.name for entry in shard.entries))
                for shard in plan.shards
            ]
        manifest.write(folder)
    report.notes += job.records.notes()
    report.seconds = time.monotonic() - started
    return report


@contextmanager
def _unfinished_output(
    source: Checkpoint, output: Path, plan: MegatronPlan | HubPlan, options: Options
) -> Iterator[tuple[Path, TransferJob]]:
    """The folder that becomes the output, and the job that fills it, from where an earlier run was stopped."""
    sources, report = source.folders(), plan.report
    mark = _fingerprint(source, plan, options)
    resume = partial(matches, fingerprint=mark) if options.resume and sources else None
    keep = has_progress if sources else None  # a live model is not there any more when its process is gone
    with atomic_output(output, sources, options.overwrite, report.bytes, resume, keep) as folder:
        journal = Journal(folder, mark, report.files)
        try:
            records = Records(source, plan.specs)
            yield (
                folder,
                TransferJob(
                    source, plan.specs, records, journal, options.workers, options.processes, options.progress
                ),
            )
        except BaseException:
            journal.close(remove=False)
            raise
        journal.close(remove=True)


def _fingerprint(source: Checkpoint, plan: MegatronPlan | HubPlan, options: Options) -> str:
    """What must not have changed for an unfinished output to be gone on from."""
    report = plan.report.as_dict()
    chosen = ("action", "family", "format", "key_style", "layout", "vocab_multiple", "files", "side_files")
    facts = {
        **{name: report[name] for name in chosen},
        "dtype": str(options.dtype),
        "config": source.hub.config_bytes().decode("utf-8", "replace"),
        "tensors": {name: [dtype_name(dtype), *shape] for name, (dtype, shape) in plan.specs.items()},
    }
    iteration = source.folder if isinstance(source, MegatronCheckpoint) else None
    return fingerprint(source.folders(), iteration, facts)


@dataclass(frozen=True)
class TransferJob:
    """What the tasks of one conversion share. `specs` are the Hub tensors' dtypes and shapes after the cast."""

    source: Checkpoint
    specs: dict[str, TensorSpec]
    records: Records
    journal: Journal
    workers: int | None
    processes: int
    progress: Progress | None

    def done(self, nbytes: int) -> None:
        """Tell the progress that so many more bytes are written."""
        if self.progress is not None:
            self.progress(nbytes, self._total)

    @cached_property
    def _total(self) -> int:
        return sum(map(spec_bytes, self.specs.values()))


@dataclass(frozen=True)
class _ParamTask:
    """`work` reads and writes one parameter's bytes, in any thread or process; `note` is told of it, in this process.

    Both know whether an earlier run had done it: then nothing was written.
    """

    size: int
    work: Callable[[], tuple[JournalEntry, bool]]
    note: Callable[[JournalEntry, bool], None]

    def run(self) -> None:
        self.note(*self.work())


def move_to_megatron(
    job: TransferJob, writer: CheckpointWriter, params: Sequence[ParamMapping], dtypes: dict[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Write every slice; `params` are the source's with the padded vocabulary, `dtypes` go by their `megatron_key`.

    Returns the carried tensors that are copies of nothing.
    """
    source, records = job.source, job.records
    carried: dict[str, torch.Tensor] = {}
    targets = [dtypes[param.megatron_key] for param in params]
    sizes = [task_bytes(param, source, job.specs, dtype) for param, dtype in zip(source.params, targets, strict=True)]
    memory = TaskMemory(in_flight(sizes))

    def work(param: ParamMapping, padded: ParamMapping, dtype: torch.dtype) -> tuple[JournalEntry, bool]:
        entry = job.journal.done.get(param.megatron_name)
        if entry is not None and writer.has(padded, entry.items):
            return entry, True
        rows, wanted = param.megatron_shape[0], padded.megatron_shape[0]
        row_bytes = prod(param.megatron_shape[1:]) * dtype.itemsize
        with memory.task(), ExitStack() as stack:
            sinks: list[Sink] = []
            if can_stream(param, source, job.specs, dtype):
                sinks = [stack.enter_context(Sink()) for _ in param.hub_names]
                bands = digested(read_bands(source.regions(param), rows, row_bytes), _slice_ranges(param), sinks)
            else:
                bands = tensor_bands(_slice(job, param, dtype))
            items = writer.write(padded, with_zero_rows(bands, rows, wanted, row_bytes))
            _record_digests(job, param.hub_names, sinks)
        return JournalEntry(tuple(records.entry(param.hub_names)), tuple(items)), False

    def note(param: ParamMapping, padded: ParamMapping, entry: JournalEntry, before: bool) -> None:
        nbytes = sum(spec_bytes(job.specs[name]) for name in param.hub_names)
        records.restore(param.hub_names, entry.tensors)
        writer.note(padded, entry.items)
        if not before:
            job.journal.add(param.megatron_name, entry, nbytes)
        job.done(nbytes)

    def carry(name: str) -> None:
        tensor = records.convert(name, source.read_passthrough(name))
        if not source.passthrough[name].copy_of:
            carried[name] = tensor
        job.done(tensor.nbytes)

    _run_tasks(
        job,
        [
            _ParamTask(size, partial(work, param, padded, dtype), partial(note, param, padded))
            for size, param, padded, dtype in zip(sizes, source.params, params, targets, strict=True)
        ],
        carry,
    )
    for name, copy_of in source.derived.items():
        records.alias(name, copy_of)
    records.check_copies()
    return carried


def move_to_hub(job: TransferJob, writer: HubWriter) -> None:
    """Write every Hub tensor."""
    source, records = job.source, job.records
    copies = {copy_of: name for name, copy_of in source.derived.items()}
    targets = [job.specs[param.hub_names[0]][0] for param in source.params]
    sizes = [task_bytes(param, source, job.specs, dtype) for param, dtype in zip(source.params, targets, strict=True)]
    memory = TaskMemory(in_flight(sizes))

    def named(names: Iterable[str]) -> tuple[str, ...]:
        """With those that are derived from one of them and written again."""
        names = tuple(names)
        return (*names, *(copies[name] for name in names if name in copies))

    def work(param: ParamMapping, dtype: torch.dtype) -> tuple[JournalEntry, bool]:
        names = named(param.hub_names)
        entry = job.journal.done.get(param.megatron_name)
        records_there = [] if entry is None else [record for _, record in entry.tensors]
        if entry is not None and len(records_there) == len(names):
            digests = {name: record.digest for name, record in zip(names, records_there, strict=True)}
            if writer.has(digests):
                return entry, True
        with memory.task(), ExitStack() as stack:
            if can_stream(param, source, job.specs, dtype):
                sinks = [stack.enter_context(writer.sink(name)) for name in names]
                parts = dict(zip(param.hub_names, _slice_ranges(param), strict=True))
                row_bytes = prod(param.megatron_shape[1:]) * dtype.itemsize
                bands = read_bands(source.regions(param), param.megatron_shape[0], row_bytes)
                distribute(bands, [parts[name if name in parts else source.derived[name]] for name in names], sinks)
                _record_digests(job, param.hub_names, sinks)
            else:
                for name, tensor in zip(param.hub_names, source.read_each(param), strict=True):
                    put(name, tensor)
        for name in names[len(param.hub_names) :]:
            records.alias(name, source.derived[name])
        return JournalEntry(tuple(records.entry(names)), ()), False

    def put(name: str, tensor: torch.Tensor) -> None:
        converted = records.convert(name, tensor)
        for target in named([name]):
            writer.put(target, converted)

    def note(param: ParamMapping, entry: JournalEntry, before: bool) -> None:
        names = named(param.hub_names)
        nbytes = sum(spec_bytes(job.specs[name]) for name in names)
        records.restore(names, entry.tensors)
        writer.note(names)
        if not before:
            job.journal.add(param.megatron_name, entry, nbytes)
        job.done(nbytes)

    def carry(name: str) -> None:
        put(name, source.read_passthrough(name))
        writer.note(named([name]))
        job.done(spec_bytes(job.specs[name]))

    _run_tasks(
        job,
        [
            _ParamTask(size, partial(work, param, dtype), partial(note, param))
            for size, param, dtype in zip(sizes, source.params, targets, strict=True)
        ],
        carry,
    )
    writer.finish()
    records.check_copies()


def _slice(job: TransferJob, param: ParamMapping, dtype: torch.dtype) -> torch.Tensor:
    """A param's Megatron slice of its tensors after their cast."""
    slice_ = new_tensor(param.megatron_shape, dtype)
    windows = param.hub_views(slice_)
    parts = []
    for place, (name, tensor) in enumerate(zip(param.hub_names, job.source.read_each(param), strict=True)):
        converted = job.records.convert(name, tensor)
        if windows is not None:
            windows[place].copy_(converted.view(windows[place].shape))
        else:
            parts.append(converted.to(dtype))
    if windows is None:
        slice_.copy_(param.to_megatron(parts))
    return slice_


def _slice_ranges(param: ParamMapping) -> list[SliceRange]:
    """What the Hub tensors are of a parameter's slice."""
    assert param.hub_rows is not None
    return [SliceRange(rows) for rows in param.hub_rows]


def _record_digests(job: TransferJob, names: Sequence[str], sinks: Sequence[Sink]) -> None:
    """Note the digests of tensors that went through unchanged."""
    for name, sink in zip(names, sinks, strict=False):
        job.records.note(name, sink.digest.hexdigest())


def _run_tasks(job: TransferJob, tasks: Sequence[_ParamTask], carry: Callable[[str], None]) -> None:
    """Run the tasks, and `carry` on every carried tensor that is not derived from another."""
    source, workers = job.source, worker_count(job.workers)
    read = [name for name in source.passthrough if name not in source.derived]
    carrying = [(spec_bytes(source.spec(name)), partial(carry, name)) for name in read]
    if job.processes == 1:
        run_tasks([*((task.size, task.run) for task in tasks), *carrying], workers)
        return
    run_forked([(task.size, task.work) for task in tasks], job.processes, workers, lambda n, r: tasks[n].note(*r))
    run_tasks(carrying, workers)
