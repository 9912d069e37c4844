"""The streaming conversions: any checkpoint to Megatron's layout, any checkpoint to the Hub's, one link at a time.

Both read a link's Hub tensors once, cast and digest them, and write them once. Import is a Hub source to Megatron,
reshard a Megatron source to Megatron, export a Megatron source to the Hub.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from dlm_bridge.convert.atomic import atomic_output, check_output
from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec
from dlm_bridge.convert.formats.huggingface import HubWriter, ShardPlan, plan_like
from dlm_bridge.convert.formats.torch_dist import TRACKER
from dlm_bridge.convert.formats.torch_dist_writer import TorchDistWriter, plan_torch_dist
from dlm_bridge.convert.layout import Layout
from dlm_bridge.convert.manifest import ShardRecord
from dlm_bridge.convert.mapping import Link
from dlm_bridge.convert.megatron_checkpoint import CARRIED_FILE, HUB_FOLDER, MegatronCheckpoint
from dlm_bridge.convert.outputs import (
    check_shard_map,
    index_bytes,
    shard_plans,
    side_file_digests,
    write_carried,
    write_side_files,
)
from dlm_bridge.convert.pool import Progress, run_tasks, worker_count
from dlm_bridge.convert.records import Records
from dlm_bridge.convert.report import Report
from dlm_bridge.convert.tensors import dtype_name, promote
from dlm_bridge.errors import DlmBridgeError

FIRST_ITERATION = "iter_0000000"


@dataclass(frozen=True)
class Options:
    """What every conversion takes. `dtype` None keeps the stored dtypes."""

    dtype: torch.dtype | None = None
    workers: int | None = None
    overwrite: bool = False
    dry_run: bool = False
    progress: Progress | None = None

    def done(self, nbytes: int, total: int) -> None:
        """Tell the progress that so many more bytes of `total` are written."""
        if self.progress is not None:
            self.progress(nbytes, total)


def write_megatron(
    source: Checkpoint, output: Path, layout: Layout, options: Options, vocab_multiple: int | None = None
) -> Report:
    """Write a `torch_dist` checkpoint of `source` cut by `layout`; with `dry_run` only say what would be written.

    Raises DlmBridgeError for a source that is not whole or not of its family, a layout that does not fit the model,
    and a refused output; then nothing is left under the output's name.
    """
    started = time.monotonic()
    if source.mapping.hub_only:
        raise DlmBridgeError(f"{source.where}: {source.mapping.hub_only}")
    check_output(output, source.folders(), options.overwrite)
    notes = source.check()
    layout.check(source.dims)
    for rule in dict.fromkeys(link.rule for link in source.links):
        rule.check_tp(layout.expert_tp if "{expert}" in rule.megatron else layout.tp, source.dims)
    if vocab_multiple is None and isinstance(source, MegatronCheckpoint) and source.manifest is not None:
        vocab_multiple = source.manifest.vocab_multiple
    links = _padded_links(source, vocab_multiple)
    specs = _target_specs(source, options.dtype)
    dtypes = _key_dtypes(source.links, specs)
    plan = plan_torch_dist(links, layout, dtypes)
    iteration = source.iteration if isinstance(source, MegatronCheckpoint) else FIRST_ITERATION
    report = _report("reshard" if source.format == "torch_dist" else "import", source, output, specs, options)
    report.format, report.layout, report.vocab_multiple = "torch_dist", layout.as_dict(), vocab_multiple
    report.files = {f"{iteration}/{file}": size for file, size in sorted(plan.files.items())}
    report.bytes = sum(plan.files.values())
    report.notes += notes + _widened(source.links, specs, dtypes)
    shards = source.hub.shards
    if shards:
        check_shard_map(source.where, shards, source.hub_names())
    if options.dry_run:
        return report
    with atomic_output(output, source.folders(), options.overwrite, report.bytes) as folder:
        records = Records(source, specs)
        writer = TorchDistWriter(folder / iteration, plan)
        carried = _run_megatron(source, writer, links, specs, dtypes, records, options)
        hub_folder = folder / HUB_FOLDER
        hub_folder.mkdir()
        write_carried(hub_folder / CARRIED_FILE, carried)
        index = index_bytes(source, plan_like(shards, specs), specs, like_source=True) if shards else None
        write_side_files(source, hub_folder, options.dtype, index)
        number = "0" if iteration == "release" else iteration.removeprefix("iter_")
        file_digests = writer.finish(int(number))
        manifest = records.manifest("torch_dist", options.dtype)
        manifest.layout, manifest.vocab_multiple, manifest.iteration = layout.as_dict(), vocab_multiple, iteration
        manifest.side_files = side_file_digests(folder, skip=report.files)
        manifest.files = {f"{iteration}/{file}": value for file, value in sorted(file_digests.items())}
        manifest.write(folder)
        (folder / TRACKER).write_text(iteration if iteration == "release" else str(int(number)))
    report.notes += records.notes()
    report.seconds = time.monotonic() - started
    return report


def write_hub(source: Checkpoint, output: Path, options: Options, shard_size: int | None = None) -> Report:
    """Write a Hub folder of `source`: its own shard map where one is known, or files of at most `shard_size` bytes.

    Raises DlmBridgeError as `write_megatron` does.
    """
    started = time.monotonic()
    check_output(output, source.folders(), options.overwrite)
    notes = source.check()
    specs = _target_specs(source, options.dtype)
    plans = shard_plans(source, specs, shard_size)
    report = _report("export", source, output, specs, options)
    report.files = {plan.file: plan.nbytes for plan in plans}
    report.bytes = sum(report.files.values())
    report.notes += notes
    if options.dry_run:
        return report
    with atomic_output(output, source.folders(), options.overwrite, report.bytes) as folder:
        records = Records(source, specs)
        _run_hub(source, folder, plans, specs, records, options)
        like_source = shard_size is None and bool(source.hub.shards)
        index = index_bytes(source, plans, specs, like_source)
        write_side_files(source, folder, options.dtype, index)
        manifest = records.manifest("huggingface", options.dtype)
        manifest.side_files = side_file_digests(folder, skip=report.files)
        if not like_source:
            manifest.shards = [
                ShardRecord(plan.file, plan.metadata, tuple(entry.name for entry in plan.entries)) for plan in plans
            ]
        manifest.write(folder)
    report.notes += records.notes()
    report.seconds = time.monotonic() - started
    return report


def _run_megatron(
    source: Checkpoint,
    writer: TorchDistWriter,
    links: Sequence[Link],
    specs: dict[str, TensorSpec],
    dtypes: dict[str, torch.dtype],
    records: Records,
    options: Options,
) -> dict[str, torch.Tensor]:
    """Write every slice. Returns the carried tensors that are copies of nothing."""
    carried: dict[str, torch.Tensor] = {}
    total = sum(map(_bytes_of, specs.values()))

    def move(link: Link, padded: Link) -> None:
        dtype = dtypes[link.megatron_key]
        tensors = source.read_link(link)
        parts = [records.convert(name, tensor) for name, tensor in zip(link.hub_names, tensors, strict=True)]
        del tensors
        nbytes = sum(part.nbytes for part in parts)
        slice_ = link.to_megatron([part.to(dtype) for part in parts])
        del parts
        writer.write(padded, slice_ if padded is link else _pad_rows(slice_, padded))
        options.done(nbytes, total)

    def carry(name: str) -> None:
        tensor = records.convert(name, source.read_carried(name))
        if not source.carried[name].copy_of:
            carried[name] = tensor
        options.done(tensor.nbytes, total)

    tasks: list[tuple[int, Callable[[], None]]] = [
        (_held(padded, dtypes[link.megatron_key]), partial(move, link, padded))
        for link, padded in zip(source.links, links, strict=True)
    ]
    read = [name for name in source.carried if name not in source.derived]
    tasks += [(_bytes_of(source.spec(name)), partial(carry, name)) for name in read]
    run_tasks(tasks, worker_count(options.workers))
    for name, copy_of in source.derived.items():
        records.alias(name, copy_of)
    records.check_copies()
    return carried


def _run_hub(
    source: Checkpoint,
    folder: Path,
    plans: Sequence[ShardPlan],
    specs: dict[str, TensorSpec],
    records: Records,
    options: Options,
) -> None:
    writer = HubWriter(folder, plans)
    copies = {copy_of: name for name, copy_of in source.derived.items()}
    total = sum(map(_bytes_of, specs.values()))

    def put(name: str, tensor: torch.Tensor) -> None:
        writer.write(name, tensor)
        options.done(tensor.nbytes, total)

    def move(link: Link) -> None:
        for name, tensor in zip(link.hub_names, source.read_link(link), strict=True):
            converted = records.convert(name, tensor)
            put(name, converted)
            if name in copies:
                records.alias(copies[name], name)
                put(copies[name], converted)

    def carry(name: str) -> None:
        put(name, records.convert(name, source.read_carried(name)))

    tasks: list[tuple[int, Callable[[], None]]] = [
        (_held(link, source.spec(link.hub_names[0])[0]), partial(move, link)) for link in source.links
    ]
    read = [name for name in source.carried if name not in source.derived]
    tasks += [(_bytes_of(specs[name]), partial(carry, name)) for name in read]
    run_tasks(tasks, worker_count(options.workers))
    writer.finish()
    records.check_copies()


def _padded_links(source: Checkpoint, vocab_multiple: int | None) -> list[Link]:
    """The source's links, with the vocabulary's rows rounded up to a multiple. Raises DlmBridgeError."""
    if vocab_multiple is None:
        return source.links
    if vocab_multiple < 1:
        raise DlmBridgeError(f"--vocab-multiple must be at least 1, not {vocab_multiple}")
    dims = replace(source.dims, vocab=-(-source.dims.vocab // vocab_multiple) * vocab_multiple)
    return [Link(link.rule, dims, link.layer, link.expert) for link in source.links]


def _pad_rows(slice_: torch.Tensor, padded: Link) -> torch.Tensor:
    """Zero rows below, up to the padded vocabulary; other tensors do not change."""
    rows = padded.megatron_shape[0] - slice_.shape[0]
    return slice_ if rows == 0 else torch.cat([slice_, slice_.new_zeros(rows, *slice_.shape[1:])])


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


def _held(link: Link, dtype: torch.dtype) -> int:
    """Bytes that a link's task holds at once: what was read, and what it becomes."""
    return 2 * prod(link.megatron_shape) * dtype.itemsize


def _bytes_of(spec: TensorSpec) -> int:
    dtype, shape = spec
    return prod(shape) * dtype.itemsize


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
        largest_tensor=max(map(_bytes_of, specs.values())),
        workers=worker_count(options.workers),
        dry_run=options.dry_run,
    )
