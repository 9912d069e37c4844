"""The tasks of a conversion: each reads one link's Hub tensors once, notes their digests, and writes them once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec
from dlm_bridge.convert.formats.huggingface import HubWriter
from dlm_bridge.convert.journal import Entry, Journal
from dlm_bridge.convert.mapping import Link
from dlm_bridge.convert.memory import Memory, new_tensor
from dlm_bridge.convert.pool import Progress, in_flight, run_tasks, worker_count
from dlm_bridge.convert.records import Records
from dlm_bridge.convert.target import Writer

Tasks = list[tuple[int, Callable[[], None]]]


@dataclass(frozen=True)
class Job:
    """What the tasks of one conversion share. `specs` are the Hub tensors' dtypes and shapes after the cast."""

    source: Checkpoint
    specs: dict[str, TensorSpec]
    records: Records
    journal: Journal
    workers: int | None
    progress: Progress | None

    def done(self, nbytes: int) -> None:
        """Tell the progress that so many more bytes are written."""
        if self.progress is not None:
            self.progress(nbytes, sum(map(bytes_of, self.specs.values())))


def move_to_megatron(
    job: Job, writer: Writer, links: Sequence[Link], dtypes: dict[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Write every slice; `links` are the source's with the padded vocabulary, `dtypes` go by their `megatron_key`.

    Returns the carried tensors that are copies of nothing.
    """
    source, records = job.source, job.records
    carried: dict[str, torch.Tensor] = {}
    sizes = [held(padded, source, dtypes[link.megatron_key]) for link, padded in zip(source.links, links, strict=True)]
    memory = Memory(in_flight(sizes))

    def move(link: Link, padded: Link) -> None:
        nbytes = sum(bytes_of(job.specs[name]) for name in link.hub_names)
        entry = job.journal.done.get(link.megatron_name)
        if entry is not None and writer.has(padded, entry.items):
            records.restore(link.hub_names, entry.tensors)
        else:
            with memory.task():
                slice_ = new_tensor(padded.megatron_shape, dtypes[link.megatron_key])
                own = slice_
                if padded.megatron_shape != link.megatron_shape:  # a padded vocabulary: zero rows below
                    own = slice_[: link.megatron_shape[0]]
                    slice_[link.megatron_shape[0] :] = 0
                _fill(job, link, own)
                items = writer.write(padded, slice_)
            entry = Entry(tuple(records.entry(link.hub_names)), tuple(items))
            job.journal.add(link.megatron_name, entry, nbytes)
        job.done(nbytes)

    def carry(name: str) -> None:
        tensor = records.convert(name, source.read_carried(name))
        if not source.carried[name].copy_of:
            carried[name] = tensor
        job.done(tensor.nbytes)

    tasks: Tasks = [
        (size, partial(move, link, padded)) for size, link, padded in zip(sizes, source.links, links, strict=True)
    ]
    _run(job, tasks + _carrying(job, carry))
    for name, copy_of in source.derived.items():
        records.alias(name, copy_of)
    records.check_copies()
    return carried


def move_to_hub(job: Job, writer: HubWriter) -> None:
    """Write every Hub tensor."""
    source, records = job.source, job.records
    copies = {copy_of: name for name, copy_of in source.derived.items()}
    sizes = [held(link, source, job.specs[link.hub_names[0]][0]) for link in source.links]
    memory = Memory(in_flight(sizes))

    def put(name: str, tensor: torch.Tensor) -> None:
        writer.write(name, tensor)
        job.done(tensor.nbytes)
        if name in copies:
            records.alias(copies[name], name)
            writer.write(copies[name], tensor)
            job.done(tensor.nbytes)

    def move(link: Link) -> None:
        names = (*link.hub_names, *(copies[name] for name in link.hub_names if name in copies))
        entry = job.journal.done.get(link.megatron_name)
        if entry is not None and len(entry.tensors) == len(names):
            digests = {name: written.digest for name, (_, written) in zip(names, entry.tensors, strict=True)}
            if writer.has(digests):
                records.restore(names, entry.tensors)
                job.done(sum(bytes_of(job.specs[name]) for name in names))
                return
        with memory.task():
            _put_link(job, link, put)
        nbytes = sum(bytes_of(job.specs[name]) for name in names)
        job.journal.add(link.megatron_name, Entry(tuple(records.entry(names)), ()), nbytes)

    def carry(name: str) -> None:
        put(name, records.convert(name, source.read_carried(name)))

    tasks: Tasks = [(size, partial(move, link)) for size, link in zip(sizes, source.links, strict=True)]
    _run(job, tasks + _carrying(job, carry))
    writer.finish()
    records.check_copies()


def held(link: Link, source: Checkpoint, dtype: torch.dtype) -> int:
    """Bytes that a link's task holds at the most: its slice, and one Hub tensor or one rank's part beside it."""
    widest = max(dtype.itemsize, *(source.spec(name)[0].itemsize for name in link.hub_names))
    return prod(link.megatron_shape) * widest * 3 // 2


def bytes_of(spec: TensorSpec) -> int:
    """Bytes of a tensor of this dtype and shape."""
    dtype, shape = spec
    return prod(shape) * dtype.itemsize


def _fill(job: Job, link: Link, out: torch.Tensor) -> None:
    """Fill `out` with a link's Megatron slice, in place where the values need no cast."""
    windows = link.hub_windows(out)
    if windows is not None and _unchanged(job, link, out.dtype) and job.source.read_slice(link, out):
        for name, window in zip(link.hub_names, windows, strict=True):
            job.records.note(name, window)
        return
    parts = []
    for place, (name, tensor) in enumerate(zip(link.hub_names, job.source.read_each(link), strict=True)):
        converted = job.records.convert(name, tensor)
        if windows is not None:
            windows[place].copy_(converted.view(windows[place].shape))
        else:
            parts.append(converted.to(out.dtype))
    if windows is None:
        out.copy_(link.to_megatron(parts))


def _put_link(job: Job, link: Link, put: Callable[[str, torch.Tensor], None]) -> None:
    """Write a link's Hub tensors, straight from its Megatron slice where the values need no cast."""
    dtype = job.specs[link.hub_names[0]][0]
    if _unchanged(job, link, dtype):
        slice_ = new_tensor(link.megatron_shape, dtype)
        if job.source.read_slice(link, slice_):
            windows = link.hub_windows(slice_)
            assert windows is not None
            for name, window in zip(link.hub_names, windows, strict=True):
                job.records.note(name, window)
                put(name, window)
            return
    for name, tensor in zip(link.hub_names, job.source.read_each(link), strict=True):
        put(name, job.records.convert(name, tensor))


def _unchanged(job: Job, link: Link, dtype: torch.dtype) -> bool:
    """Whether all of a link's tensors are read and written in this dtype."""
    return all(job.source.spec(name)[0] == job.specs[name][0] == dtype for name in link.hub_names)


def _carrying(job: Job, carry: Callable[[str], None]) -> Tasks:
    """The tasks of the carried tensors; what is derived from another is not read."""
    read = [name for name in job.source.carried if name not in job.source.derived]
    return [(bytes_of(job.source.spec(name)), partial(carry, name)) for name in read]


def _run(job: Job, tasks: Tasks) -> None:
    run_tasks(tasks, worker_count(job.workers))
