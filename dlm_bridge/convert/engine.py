"""The streaming conversions: any checkpoint to Megatron's layout, any checkpoint to the Hub's, one link at a time.

Both read a link's Hub tensors once, cast and digest them, and write them once. Import is a Hub source to Megatron,
reshard a Megatron source to Megatron, export a Megatron source to the Hub.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dlm_bridge.convert.atomic import atomic_output
from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.formats.huggingface import HubWriter, plan_like
from dlm_bridge.convert.formats.torch_dist import TRACKER
from dlm_bridge.convert.journal import FILE_NAME as JOURNAL
from dlm_bridge.convert.journal import Journal, fingerprint, has_progress, matches
from dlm_bridge.convert.layout import Layout
from dlm_bridge.convert.manifest import FILE_NAME as MANIFEST
from dlm_bridge.convert.manifest import ShardRecord
from dlm_bridge.convert.megatron_checkpoint import CARRIED_FILE, HUB_FOLDER, MegatronCheckpoint
from dlm_bridge.convert.moving import Job, move_to_hub, move_to_megatron
from dlm_bridge.convert.optimizer_state import move_state, write_common
from dlm_bridge.convert.outputs import index_bytes, side_file_digests, write_carried, write_side_files
from dlm_bridge.convert.planning import HubPlan, MegatronPlan, Options, plan_hub, plan_megatron
from dlm_bridge.convert.records import Records
from dlm_bridge.convert.report import Report
from dlm_bridge.convert.target import write_run_config
from dlm_bridge.convert.tensors import bytes_digest, dtype_name

__all__ = ["Options", "write_hub", "write_megatron"]


# Beside what a conversion carries; a run that was killed at its end has left the last two to the one that resumes it.
_NO_SIDE_FILES = (JOURNAL, MANIFEST, TRACKER)


def write_megatron(
    source: Checkpoint, output: Path, layout: Layout, options: Options, vocab_multiple: int | None = None
) -> Report:
    """Write a Megatron checkpoint of `source` cut by `layout`; with `dry_run` only say what would be written.

    Raises DlmBridgeError for a source that is not whole or not of its family, a layout that does not fit the model,
    and a refused output; then nothing is left under the output's name.
    """
    started = time.monotonic()
    plan = plan_megatron(source, output, layout, options, vocab_multiple)
    report, specs, iteration = plan.report, plan.specs, plan.iteration
    if options.dry_run:
        return report
    with _unfinished(source, output, plan, options) as (folder, job):
        writer = plan.target.writer(folder / iteration)
        carried = move_to_megatron(job, writer, plan.links, plan.dtypes)
        if plan.state is not None:
            move_state(source, plan.state, writer, options.workers)
        hub_folder = folder / HUB_FOLDER
        hub_folder.mkdir(exist_ok=True)
        write_carried(hub_folder / CARRIED_FILE, carried)
        shards = source.hub.shards
        index = index_bytes(source, plan_like(shards, specs), specs, like_source=True) if shards else None
        write_side_files(source, hub_folder, options.dtype, index)
        file_digests = writer.finish(plan.number)
        if plan.state is not None:
            file_digests |= write_common(plan.state, folder / iteration)
        if options.megatron.run_config:
            write_run_config(folder / iteration, source, plan.links, layout, plan.dtypes)
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


def write_hub(source: Checkpoint, output: Path, options: Options, shard_size: int | None = None) -> Report:
    """Write a Hub folder of `source`: its own shard map where one is known, or files of at most `shard_size` bytes.

    Raises DlmBridgeError as `write_megatron` does.
    """
    started = time.monotonic()
    plan = plan_hub(source, output, options, shard_size)
    report = plan.report
    if options.dry_run:
        return report
    with _unfinished(source, output, plan, options) as (folder, job):
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
def _unfinished(
    source: Checkpoint, output: Path, plan: MegatronPlan | HubPlan, options: Options
) -> Iterator[tuple[Path, Job]]:
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
                Job(source, plan.specs, records, journal, options.workers, options.processes, options.progress),
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
