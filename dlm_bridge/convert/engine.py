"""The streaming conversions: any checkpoint to Megatron's layout, any checkpoint to the Hub's, one link at a time.

Both read a link's Hub tensors once, cast and digest them, and write them once. Import is a Hub source to Megatron,
reshard a Megatron source to Megatron, export a Megatron source to the Hub.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from dlm_bridge.convert.atomic import atomic_output, check_output
from dlm_bridge.convert.checkpoint import Checkpoint, TensorSpec
from dlm_bridge.convert.formats.huggingface import HubWriter, plan_like
from dlm_bridge.convert.formats.torch_dist import TRACKER
from dlm_bridge.convert.journal import FILE_NAME as JOURNAL
from dlm_bridge.convert.journal import Journal, fingerprint, has_progress, matches
from dlm_bridge.convert.layout import Layout
from dlm_bridge.convert.manifest import ShardRecord
from dlm_bridge.convert.mapping import Link
from dlm_bridge.convert.megatron_checkpoint import CARRIED_FILE, HUB_FOLDER, MegatronCheckpoint
from dlm_bridge.convert.moving import Job, bytes_of, move_to_hub, move_to_megatron
from dlm_bridge.convert.outputs import (
    check_shard_map,
    index_bytes,
    shard_plans,
    side_file_digests,
    write_carried,
    write_side_files,
)
from dlm_bridge.convert.pool import Progress, worker_count
from dlm_bridge.convert.records import Records
from dlm_bridge.convert.report import Report
from dlm_bridge.convert.target import MegatronFormat, plan_target, write_run_config
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
    resume: bool = False  # go on from what an earlier, killed run to the same output has done
    megatron: MegatronFormat = field(default_factory=MegatronFormat)  # what `write_megatron` writes


def write_megatron(
    source: Checkpoint, output: Path, layout: Layout, options: Options, vocab_multiple: int | None = None
) -> Report:
    """Write a Megatron checkpoint of `source` cut by `layout`; with `dry_run` only say what would be written.

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
    vocab_multiple = options.megatron.vocab_multiple(vocab_multiple, layout)
    links = _padded_links(source, vocab_multiple)
    specs = _target_specs(source, options.dtype)
    dtypes = _key_dtypes(source.links, specs)
    from_megatron = isinstance(source, MegatronCheckpoint)
    iteration = source.iteration if isinstance(source, MegatronCheckpoint) else FIRST_ITERATION
    if iteration != "release" and not re.fullmatch(r"iter_\d{7,}", iteration):
        iteration = FIRST_ITERATION  # the folder of an iteration that was saved under a name of its own
    number = 0 if iteration == "release" else int(iteration.removeprefix("iter_"))
    target = plan_target(options.megatron, source, links, layout, dtypes, number)
    report = _report("reshard" if from_megatron else "import", source, output, specs, options)
    report.format, report.layout, report.vocab_multiple = options.megatron.name, layout.as_dict(), vocab_multiple
    report.key_style = options.megatron.key_style if options.megatron.name == "torch" else None
    report.files = {f"{iteration}/{file}": size for file, size in sorted(target.files.items())}
    report.bytes = sum(target.files.values())
    report.notes += notes + _widened(source.links, specs, dtypes)
    shards = source.hub.shards
    if shards:
        check_shard_map(source.where, shards, source.hub_names())
    if options.dry_run:
        return report
    with _unfinished(source, output, report, specs, options) as (folder, job):
        writer = target.writer(folder / iteration)
        carried = move_to_megatron(job, writer, links, dtypes)
        hub_folder = folder / HUB_FOLDER
        hub_folder.mkdir(exist_ok=True)
        write_carried(hub_folder / CARRIED_FILE, carried)
        index = index_bytes(source, plan_like(shards, specs), specs, like_source=True) if shards else None
        write_side_files(source, hub_folder, options.dtype, index)
        file_digests = writer.finish(number)
        if options.megatron.run_config:
            write_run_config(folder / iteration, source, links, layout, dtypes)
        manifest = job.records.manifest(options.megatron.name, options.dtype)
        manifest.layout, manifest.vocab_multiple, manifest.iteration = layout.as_dict(), vocab_multiple, iteration
        manifest.side_files = side_file_digests(folder, skip={JOURNAL, *report.files})
        manifest.files = {f"{iteration}/{file}": value for file, value in sorted(file_digests.items())}
        manifest.write(folder)
        (folder / TRACKER).write_text(iteration if iteration == "release" else str(number))
    report.notes += job.records.notes()
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
    with _unfinished(source, output, report, specs, options) as (folder, job):
        move_to_hub(job, HubWriter(folder, plans))
        like_source = shard_size is None and bool(source.hub.shards)
        index = index_bytes(source, plans, specs, like_source)
        write_side_files(source, folder, options.dtype, index)
        manifest = job.records.manifest("huggingface", options.dtype)
        manifest.side_files = side_file_digests(folder, skip={JOURNAL, *report.files})
        if not like_source:
            manifest.shards = [
                ShardRecord(plan.file, plan.metadata, tuple(entry.name for entry in plan.entries)) for plan in plans
            ]
        manifest.write(folder)
    report.notes += job.records.notes()
    report.seconds = time.monotonic() - started
    return report


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


def _fingerprint(source: Checkpoint, report: Report, dtype: torch.dtype | None, specs: dict[str, TensorSpec]) -> str:
    """What must not have changed for an unfinished output to be gone on from."""
    facts = {
        "action": report.action, "family": report.family, "format": report.format, "layout": report.layout,
        "key_style": report.key_style,
        "vocab_multiple": report.vocab_multiple, "files": report.files, "dtype": str(dtype),
        "config": source.hub.config_bytes().decode("utf-8", "replace"),
        "tensors": {name: [dtype_name(kind), *shape] for name, (kind, shape) in specs.items()},
    }  # fmt: skip
    iteration = source.folder if isinstance(source, MegatronCheckpoint) else None
    return fingerprint(source.folders(), iteration, facts)


@contextmanager
def _unfinished(
    source: Checkpoint, output: Path, report: Report, specs: dict[str, TensorSpec], options: Options
) -> Iterator[tuple[Path, Job]]:
    """The folder that becomes the output, and the job that fills it, from where an earlier run was stopped."""
    mark = _fingerprint(source, report, options.dtype, specs)
    sources = source.folders()
    resume = partial(matches, fingerprint=mark) if options.resume and sources else None
    keep = has_progress if sources else None  # a live model is not there any more when its process is gone
    with atomic_output(output, sources, options.overwrite, report.bytes, resume, keep) as folder:
        journal = Journal(folder, mark, report.files)
        try:
            yield folder, Job(source, specs, Records(source, specs), journal, options.workers, options.progress)
        except BaseException:
            journal.close(remove=False)
            raise
        journal.close(remove=True)


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
        dry_run=options.dry_run,
    )
