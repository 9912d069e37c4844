"""The tasks of a conversion: each reads one link's Hub tensors once, digests them on the way, and writes them once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod

import torch

from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec
from dlm_bridge.convert.forked import run_forked
from dlm_bridge.convert.formats.huggingface import HubWriter
from dlm_bridge.convert.journal import Entry, Journal
from dlm_bridge.convert.mapping import Link
from dlm_bridge.convert.memory import Memory, new_tensor
from dlm_bridge.convert.pool import Progress, in_flight, run_tasks, worker_count
from dlm_bridge.convert.records import Records
from dlm_bridge.convert.streaming import (
    BAND,
    Part,
    Sink,
    digested,
    distribute,
    read_bands,
    tensor_bands,
    with_zero_rows,
)
from dlm_bridge.convert.target import Writer


@dataclass(frozen=True)
class Job:
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
        return sum(map(bytes_of, self.specs.values()))


@dataclass(frozen=True)
class _Task:
    """`work` reads and writes one link's bytes, in any thread or process; `note` is told of it, in this process.

    Both know whether an earlier run had done it: then nothing was written.
    """

    size: int
    work: Callable[[], tuple[Entry, bool]]
    note: Callable[[Entry, bool], None]

    def run(self) -> None:
        self.note(*self.work())


def move_to_megatron(
    job: Job, writer: Writer, links: Sequence[Link], dtypes: dict[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Write every slice; `links` are the source's with the padded vocabulary, `dtypes` go by their `megatron_key`.

    Returns the carried tensors that are copies of nothing.
    """
    source, records = job.source, job.records
    carried: dict[str, torch.Tensor] = {}
    targets = [dtypes[link.megatron_key] for link in links]
    sizes = [held(link, source, job.specs, dtype) for link, dtype in zip(source.links, targets, strict=True)]
    memory = Memory(in_flight(sizes))

    def work(link: Link, padded: Link, dtype: torch.dtype) -> tuple[Entry, bool]:
        entry = job.journal.done.get(link.megatron_name)
        if entry is not None and writer.has(padded, entry.items):
            return entry, True
        rows, wanted = link.megatron_shape[0], padded.megatron_shape[0]
        row_bytes = prod(link.megatron_shape[1:]) * dtype.itemsize
        with memory.task(), ExitStack() as stack:
            sinks: list[Sink] = []
            if streamed(link, source, job.specs, dtype):
                sinks = [stack.enter_context(Sink()) for _ in link.hub_names]
                bands = digested(read_bands(source.regions(link), rows, row_bytes), _parts(link), sinks)
            else:
                bands = tensor_bands(_slice(job, link, dtype))
            items = writer.write(padded, with_zero_rows(bands, rows, wanted, row_bytes))
            _record(job, link.hub_names, sinks)
        return Entry(tuple(records.entry(link.hub_names)), tuple(items)), False

    def note(link: Link, padded: Link, entry: Entry, before: bool) -> None:
        nbytes = sum(bytes_of(job.specs[name]) for name in link.hub_names)
        records.restore(link.hub_names, entry.tensors)
        writer.note(padded, entry.items)
        if not before:
            job.journal.add(link.megatron_name, entry, nbytes)
        job.done(nbytes)

    def carry(name: str) -> None:
        tensor = records.convert(name, source.read_carried(name))
        if not source.carried[name].copy_of:
            carried[name] = tensor
        job.done(tensor.nbytes)

    _run(
        job,
        [
            _Task(size, partial(work, link, padded, dtype), partial(note, link, padded))
            for size, link, padded, dtype in zip(sizes, source.links, links, targets, strict=True)
        ],
        carry,
    )
    for name, copy_of in source.derived.items():
        records.alias(name, copy_of)
    records.check_copies()
    return carried


def move_to_hub(job: Job, writer: HubWriter) -> None:
    """Write every Hub tensor."""
    source, records = job.source, job.records
    copies = {copy_of: name for name, copy_of in source.derived.items()}
    targets = [job.specs[link.hub_names[0]][0] for link in source.links]
    sizes = [held(link, source, job.specs, dtype) for link, dtype in zip(source.links, targets, strict=True)]
    memory = Memory(in_flight(sizes))

    def named(names: Iterable[str]) -> tuple[str, ...]:
        """With those that are derived from one of them and written again."""
        names = tuple(names)
        return (*names, *(copies[name] for name in names if name in copies))

    def work(link: Link, dtype: torch.dtype) -> tuple[Entry, bool]:
        names = named(link.hub_names)
        entry = job.journal.done.get(link.megatron_name)
        records_there = [] if entry is None else [record for _, record in entry.tensors]
        if entry is not None and len(records_there) == len(names):
            digests = {name: record.digest for name, record in zip(names, records_there, strict=True)}
            if writer.has(digests):
                return entry, True
        with memory.task(), ExitStack() as stack:
            if streamed(link, source, job.specs, dtype):
                sinks = [stack.enter_context(writer.sink(name)) for name in names]
                parts = dict(zip(link.hub_names, _parts(link), strict=True))
                row_bytes = prod(link.megatron_shape[1:]) * dtype.itemsize
                bands = read_bands(source.regions(link), link.megatron_shape[0], row_bytes)
                distribute(bands, [parts[name if name in parts else source.derived[name]] for name in names], sinks)
                _record(job, link.hub_names, sinks)
            else:
                for name, tensor in zip(link.hub_names, source.read_each(link), strict=True):
                    put(name, tensor)
        for name in names[len(link.hub_names) :]:
            records.alias(name, source.derived[name])
        return Entry(tuple(records.entry(names)), ()), False

    def put(name: str, tensor: torch.Tensor) -> None:
        converted = records.convert(name, tensor)
        for target in named([name]):
            writer.put(target, converted)

    def note(link: Link, entry: Entry, before: bool) -> None:
        names = named(link.hub_names)
        nbytes = sum(bytes_of(job.specs[name]) for name in names)
        records.restore(names, entry.tensors)
        writer.note(names)
        if not before:
            job.journal.add(link.megatron_name, entry, nbytes)
        job.done(nbytes)

    def carry(name: str) -> None:
        put(name, source.read_carried(name))
        writer.note(named([name]))
        job.done(bytes_of(job.specs[name]))

    _run(
        job,
        [
            _Task(size, partial(work, link, dtype), partial(note, link))
            for size, link, dtype in zip(sizes, source.links, targets, strict=True)
        ],
        carry,
    )
    writer.finish()
    records.check_copies()


def held(link: Link, source: Checkpoint, specs: dict[str, TensorSpec], dtype: torch.dtype) -> int:
    """Bytes that a link's task holds at the most: a few bands; or its slice, and one Hub tensor or one rank's part
    beside it."""
    widest = max(dtype.itemsize, *(source.spec(name)[0].itemsize for name in link.hub_names))
    whole = prod(link.megatron_shape) * widest * 3 // 2
    if not streamed(link, source, specs, dtype):
        return whole
    row = prod(link.megatron_shape[1:]) * widest
    return min(whole, 3 * max(BAND, row))


def streamed(link: Link, source: Checkpoint, specs: dict[str, TensorSpec], dtype: torch.dtype) -> bool:
    """Whether a link's rows go straight from file to file: all its tensors are read and written in this dtype, and
    its slice lies in whole rows or columns."""
    same = all(source.spec(name)[0] == specs[name][0] == dtype for name in link.hub_names)
    return same and source.streams(link)


def bytes_of(spec: TensorSpec) -> int:
    """Bytes of a tensor of this dtype and shape."""
    dtype, shape = spec
    return prod(shape) * dtype.itemsize


def _slice(job: Job, link: Link, dtype: torch.dtype) -> torch.Tensor:
    """A link's Megatron slice of its tensors after their cast."""
    slice_ = new_tensor(link.megatron_shape, dtype)
    windows = link.hub_windows(slice_)
    parts = []
    for place, (name, tensor) in enumerate(zip(link.hub_names, job.source.read_each(link), strict=True)):
        converted = job.records.convert(name, tensor)
        if windows is not None:
            windows[place].copy_(converted.view(windows[place].shape))
        else:
            parts.append(converted.to(dtype))
    if windows is None:
        slice_.copy_(link.to_megatron(parts))
    return slice_


def _parts(link: Link) -> list[Part]:
    """What the Hub tensors are of a link's slice."""
    assert link.hub_rows is not None
    return [Part(rows) for rows in link.hub_rows]


def _record(job: Job, names: Sequence[str], sinks: Sequence[Sink]) -> None:
    """Note the digests of tensors that went through unchanged."""
    for name, sink in zip(names, sinks, strict=False):
        job.records.note(name, sink.digest.hexdigest())


def _run(job: Job, tasks: Sequence[_Task], carry: Callable[[str], None]) -> None:
    """Run the tasks, and `carry` on every carried tensor that is not derived from another."""
    source, workers = job.source, worker_count(job.workers)
    read = [name for name in source.carried if name not in source.derived]
    carrying = [(bytes_of(source.spec(name)), partial(carry, name)) for name in read]
    if job.processes == 1:
        run_tasks([*((task.size, task.run) for task in tasks), *carrying], workers)
        return
    run_forked([(task.size, task.work) for task in tasks], job.processes, workers, lambda n, r: tasks[n].note(*r))
    run_tasks(carrying, workers)
