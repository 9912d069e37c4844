"""Streaming conversion of any checkpoint to Megatron's layout or to the Hub's, one parameter at a time.

Each task reads the Hub tensors of one parameter once, computes their digests on the way, and writes them once.
`import` converts from the Hub to Megatron, `reshard` from Megatron to Megatron, `export` from Megatron to the Hub.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from dlm_bridge.convert.card import CARD, folder_card
from dlm_bridge.convert.checkpoint import Checkpoint, CheckpointWriter, spec_bytes
from dlm_bridge.convert.checkpoints.huggingface import (
    CARRIED_FILE,
    HUB_FOLDER,
    index_bytes,
    side_file_digests,
    write_passthrough,
    write_side_files,
)
from dlm_bridge.convert.formats.hub_weights import HubWriter, ShardRecord, plan_like
from dlm_bridge.convert.journal import JOURNAL, Journal, JournalEntry, fingerprint, has_progress, matches
from dlm_bridge.convert.manifest import (
    MANIFEST,
    Manifest,
    Records,
    combined_digest,
    read_manifest,
)
from dlm_bridge.convert.planning import (
    ConversionReport,
    HubOutput,
    MegatronOutput,
    can_stream,
    plan_hub,
    plan_megatron,
    task_bytes,
)
from dlm_bridge.convert.run_settings import write_run_config
from dlm_bridge.convert.settings import ConversionSettings, HubSettings, MegatronSettings
from dlm_bridge.convert.streaming import (
    Bands,
    Sink,
    SliceRange,
    digested,
    distribute,
    read_bands,
    tensor_bands,
    with_zero_rows,
)
from dlm_bridge.convert.workers import TaskMemory, in_flight, new_tensor, run_forked, run_tasks, worker_count
from dlm_bridge.errors import ChangedTensorsError
from dlm_bridge.files.atomic import atomic_output, check_output
from dlm_bridge.files.reading import bytes_digest
from dlm_bridge.hub import TRACKER
from dlm_bridge.mapping.dtypes import dtype_name
from dlm_bridge.mapping.rules import ParamMapping

# Files of the output that are not side files. A conversion that was killed at its end may leave the last two.
_NO_SIDE_FILES = (JOURNAL, MANIFEST, TRACKER)


def write_megatron(source: Checkpoint, output: Path, settings: MegatronSettings) -> ConversionReport:
    """Write `source` as a Megatron checkpoint; with `dry_run`, only return the report.

    Raises the errors of `plan_megatron`, and ChangedTensorsError. Then no file or folder with the name of the output
    remains.
    """
    started = time.monotonic()
    plan = plan_megatron(source, output, settings)
    report, specs, iteration = plan.report, plan.specs, plan.iteration
    if is_finished(source, output, plan, settings) or settings.dry_run:
        return report
    with unfinished_output(source, output, plan, settings) as (folder, journal):
        writer = plan.writer(folder / iteration)
        transfer = MegatronTransfer(source, plan, journal, settings, writer)
        transfer.run()
        if plan.state is not None:
            transfer.check_files()
            plan.state.transfer(lambda param, bands: writer.note(param, writer.write(param, bands)), settings.workers)
        hub_folder = folder / HUB_FOLDER
        hub_folder.mkdir(exist_ok=True)
        write_passthrough(hub_folder / CARRIED_FILE, transfer.passthrough)
        shards = source.hub.shards
        index = index_bytes(source, plan_like(shards, specs), specs, like_source=True) if shards else None
        write_side_files(source, hub_folder, settings.cast_dtype, index)
        file_digests = writer.finish(plan.number)
        if settings.run_config:
            write_run_config(folder / iteration, source, plan.params, settings.layout, plan.dtypes)
        manifest = transfer.manifest(settings.format, folder)
        manifest.layout, manifest.vocab_multiple = report.layout, report.vocab_multiple
        manifest.iteration = iteration
        manifest.files = {f"{iteration}/{file}": value for file, value in sorted(file_digests.items())}
        manifest.write(folder)
        (folder / TRACKER).write_text(iteration if iteration == "release" else str(plan.number))
    report.notes += manifest.notes()
    report.seconds = time.monotonic() - started
    return report


def write_hub(source: Checkpoint, output: Path, settings: HubSettings) -> ConversionReport:
    """Write `source` as a Hub folder, with its own shard map if known, or in files of at most `shard_size`.

    Raises the errors of `plan_hub`, and ChangedTensorsError.
    """
    started = time.monotonic()
    plan = plan_hub(source, output, settings)
    report = plan.report
    if is_finished(source, output, plan, settings) or settings.dry_run:
        return report
    with unfinished_output(source, output, plan, settings) as (folder, journal):
        writer = HubWriter(folder, plan.shards)
        transfer = HubTransfer(source, plan, journal, settings, writer)
        transfer.run()
        writer.finish()
        like_source = settings.shard_size is None and bool(source.hub.shards)
        write_side_files(
            source, folder, settings.cast_dtype, index_bytes(source, plan.shards, plan.specs, like_source)
        )
        manifest = transfer.manifest("huggingface", folder)
        manifest.files = {shard.file: bytes_digest(shard.header) for shard in plan.shards}
        if not like_source:
            manifest.shards = [
                ShardRecord(shard.file, shard.metadata, tuple(entry.name for entry in shard.entries))
                for shard in plan.shards
            ]
        manifest.write(folder)
        if not (folder / CARD).exists():  # not in the manifest, because users may edit it
            (folder / CARD).write_text(folder_card(source.family, manifest), "utf-8")
            report.notes.append(f"the source has no model card: {CARD} was generated")
    report.notes += manifest.notes()
    report.seconds = time.monotonic() - started
    return report


class Transfer(ABC):
    """Tasks of one conversion, one per parameter of the source, run in threads or processes.

    The main process records what each task read and wrote, also in the journal from which an interrupted conversion is
    resumed.
    """

    def __init__(
        self,
        source: Checkpoint,
        plan: MegatronOutput | HubOutput,
        journal: Journal,
        settings: ConversionSettings,
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self.source, self.plan, self.specs, self.journal, self.settings = source, plan, plan.specs, journal, settings
        self.dtypes = dtypes  # output dtype of each parameter
        self.records = Records(plan.specs)
        self._sizes = [
            task_bytes(param, source, self.specs, dtype) for param, dtype in zip(source.params, dtypes, strict=True)
        ]
        self._memory = TaskMemory(in_flight(self._sizes))
        self._total = sum(map(spec_bytes, self.specs.values()))
        self.changed: dict[str, dict[str, Any]] = {}  # tensors and files that differ from their recorded digests

    def run(self) -> None:
        """Convert every parameter, and every passthrough tensor that is not derived from another.

        Raises:
            CheckpointError: a tensor differs from its original.
            ChangedTensorsError: the source differs from the digests recorded when it was written, without
                `accept_changed_tensors`.
        """
        source, workers = self.source, worker_count(self.settings.workers)
        damaged = source.damaged_files(self.settings.workers)
        self._note_changed(
            {file.file: {"recorded": file.recorded, "found": file.found} for file in damaged}, map(str, damaged)
        )
        read = [name for name in source.passthrough if name not in source.derived]
        taking = [(spec_bytes(source.spec(name)), partial(self._take_passthrough, name)) for name in read]
        if self.settings.processes == 1:
            tasks = [(size, partial(self._work_and_note, number)) for number, size in enumerate(self._sizes)]
            run_tasks([*tasks, *taking], workers)
        else:
            work = [(size, partial(self._work, number)) for number, size in enumerate(self._sizes)]
            run_forked(work, self.settings.processes, workers, lambda number, done: self._note(number, *done))
            run_tasks(taking, workers)
        for name, copy_of in source.derived.items():
            self.records.alias(name, copy_of)
        copies = {name: entry.copy_of for name, entry in source.passthrough.items() if entry.copy_of}
        self.records.check_copies(copies, source.where)
        if source.record is not None:
            recorded = {name: found for name, found in source.record.tensors.items() if name not in source.derived}
            changed = self.records.changed(recorded)
            self._note_changed(changed, changed)

    def check_files(self) -> None:
        """Compare the digests of the source's files with its manifest. Used for optimizer state, whose tensors have no
        digests of their own; the files are read a second time. Raises ChangedTensorsError as `run` does."""
        record = self.source.record
        if record is not None and record.files:
            files = self.source.changed_files(record)
            self._note_changed({file: {"recorded": record.files[file], "found": None} for file in files}, files)

    def _note_changed(self, changed: dict[str, dict[str, Any]], names: Iterable[str]) -> None:
        """Record changed tensors or files. Raises ChangedTensorsError with `names`, unless they are accepted."""
        if changed and not self.settings.accept_changed_tensors:
            raise ChangedTensorsError(self.source.where, names)
        self.changed |= changed

    def manifest(self, format_: str, folder: Path) -> Manifest:
        """Manifest of the output in `folder`, without its layout and weight files."""
        source, hub = self.source, self.source.hub
        origin: dict[str, Any] = {key: hub.source.get(key) for key in ("name", "revision")}
        origin["digest"] = hub.source.get("digest") or combined_digest(self.records.read)
        dtype = self.settings.cast_dtype
        return Manifest(
            format=format_,
            family=source.family.name,
            config=json.loads(hub.config_bytes(dtype)),
            dtype="keep" if dtype is None else dtype_name(dtype),
            tensors={name: self.records.written[name] for name in source.hub_names()},
            source=origin,
            shards=hub.shards,
            side_files=side_file_digests(folder, skip={*_NO_SIDE_FILES, *self.plan.report.files}),
            left_out=list(hub.excluded),
            carried=list(source.passthrough),
            shared=source.hub.shared,
            fingerprint=self.journal.fingerprint if source.folders() else "",
            changed={**({} if source.record is None else source.record.changed), **self.changed},
        )

    @abstractmethod
    def _write(self, number: int) -> JournalEntry:
        """Read and write one parameter."""

    @abstractmethod
    def _is_written(self, number: int, entry: JournalEntry) -> bool:
        """True if the parameter is in the output as an earlier run recorded it."""

    @abstractmethod
    def _note_written(self, number: int, entry: JournalEntry) -> None:
        """Notify the writer that a parameter is written."""

    @abstractmethod
    def _take_passthrough(self, name: str) -> None:
        """Read a passthrough tensor, and store or write it."""

    def _names(self, param: ParamMapping) -> tuple[str, ...]:
        """Hub tensors that are recorded with a parameter."""
        return param.hub_names

    def _work(self, number: int) -> tuple[JournalEntry, bool]:
        """Convert one parameter. Returns its journal entry, and True if an earlier run had written it."""
        entry = self.journal.done.get(self.source.params[number].megatron_name)
        if entry is not None and self._is_written(number, entry):
            return entry, True
        with self._memory.task():
            return self._write(number), False

    def _note(self, number: int, entry: JournalEntry, before: bool) -> None:
        param = self.source.params[number]
        names = self._names(param)
        nbytes = sum(spec_bytes(self.specs[name]) for name in names)
        self.records.restore(names, entry.tensors)
        self._note_written(number, entry)
        if not before:
            self.journal.add(param.megatron_name, entry, nbytes)
        self._tell(nbytes)

    def _work_and_note(self, number: int) -> None:
        self._note(number, *self._work(number))

    def _tell(self, nbytes: int) -> None:
        if self.settings.progress is not None:
            self.settings.progress(nbytes, self._total)

    def _can_stream(self, number: int) -> bool:
        return can_stream(self.source.params[number], self.source, self.specs, self.dtypes[number])

    def _bands(self, number: int) -> Bands:
        """Megatron slice of a parameter, streamed from the source's files."""
        param = self.source.params[number]
        row_bytes = prod(param.megatron_shape[1:]) * self.dtypes[number].itemsize
        return read_bands(self.source.regions(param), param.megatron_shape[0], row_bytes)

    def _record_digests(self, names: Sequence[str], sinks: Sequence[Sink]) -> None:
        """Record the digests of tensors that were streamed unchanged."""
        for name, sink in zip(names, sinks, strict=False):
            self.records.note(name, sink.digest.hexdigest(), sink.non_finite)


class MegatronTransfer(Transfer):
    """Conversion of all Hub tensors to the slices of a planned Megatron checkpoint.

    After `run`, `passthrough` contains the passthrough tensors that are not copies.
    """

    def __init__(
        self,
        source: Checkpoint,
        plan: MegatronOutput,
        journal: Journal,
        settings: ConversionSettings,
        writer: CheckpointWriter,
    ) -> None:
        super().__init__(source, plan, journal, settings, [plan.dtypes[param.megatron_key] for param in plan.params])
        self._writer, self._padded = writer, plan.params
        self._taken: dict[str, torch.Tensor] = {}

    @property
    def passthrough(self) -> dict[str, torch.Tensor]:
        return {name: self._taken[name] for name in self.source.passthrough if name in self._taken}

    def _is_written(self, number: int, entry: JournalEntry) -> bool:
        return self._writer.has(self._padded[number], entry.items)

    def _write(self, number: int) -> JournalEntry:
        param, padded, dtype = self.source.params[number], self._padded[number], self.dtypes[number]
        rows, wanted = param.megatron_shape[0], padded.megatron_shape[0]
        row_bytes = prod(param.megatron_shape[1:]) * dtype.itemsize
        with ExitStack() as stack:
            sinks: list[Sink] = []
            if self._can_stream(number):
                sinks = [stack.enter_context(Sink(dtype=dtype)) for _ in param.hub_names]
                bands = digested(self._bands(number), _slice_ranges(param), sinks)
            else:
                bands = tensor_bands(self._slice(param, dtype))
            items = self._writer.write(padded, with_zero_rows(bands, rows, wanted, row_bytes))
            self._record_digests(param.hub_names, sinks)
        return JournalEntry(tuple(self.records.entry(param.hub_names)), tuple(items))

    def _slice(self, param: ParamMapping, dtype: torch.dtype) -> torch.Tensor:
        """Megatron slice of a parameter, built from its Hub tensors after their cast."""
        slice_ = new_tensor(param.megatron_shape, dtype)
        views = param.hub_views(slice_)
        parts = []
        for place, (name, tensor) in enumerate(zip(param.hub_names, self.source.read_each(param), strict=True)):
            converted = self.records.convert(name, tensor, self.source.stored_record(name))
            if views is not None:
                views[place].copy_(converted.view(views[place].shape))
            else:
                parts.append(converted.to(dtype))
        if views is None:
            slice_.copy_(param.to_megatron(parts))
        return slice_

    def _note_written(self, number: int, entry: JournalEntry) -> None:
        self._writer.note(self._padded[number], entry.items)

    def _take_passthrough(self, name: str) -> None:
        tensor = self.source.read_passthrough(name)
        tensor = self.records.convert(name, tensor, self.source.stored_record(name))
        if not self.source.passthrough[name].copy_of:
            self._taken[name] = tensor
        self._tell(tensor.nbytes)


class HubTransfer(Transfer):
    """Conversion of all Hub tensors to the planned safetensors files."""

    def __init__(
        self, source: Checkpoint, plan: HubOutput, journal: Journal, settings: ConversionSettings, writer: HubWriter
    ) -> None:
        dtypes = [plan.specs[param.hub_names[0]][0] for param in source.params]
        super().__init__(source, plan, journal, settings, dtypes)
        self._writer = writer
        self._copies: dict[str, list[str]] = {}
        for name, copy_of in source.derived.items():
            self._copies.setdefault(copy_of, []).append(name)

    def _names(self, param: ParamMapping) -> tuple[str, ...]:
        return self._with_copies(param.hub_names)

    def _with_copies(self, names: Sequence[str]) -> tuple[str, ...]:
        """`names`, followed by the tensors that are written as copies of them."""
        return (*names, *(copy for name in names for copy in self._copies.get(name, ())))

    def _is_written(self, number: int, entry: JournalEntry) -> bool:
        names = self._names(self.source.params[number])
        written = [record for _, record in entry.tensors]
        return len(written) == len(names) and self._writer.has(
            {name: record.digest for name, record in zip(names, written, strict=True)}
        )

    def _write(self, number: int) -> JournalEntry:
        param = self.source.params[number]
        names = self._names(param)
        if self._can_stream(number):
            ranges = dict(zip(param.hub_names, _slice_ranges(param), strict=True))
            with ExitStack() as stack:
                sinks = [stack.enter_context(self._writer.sink(name)) for name in names]
                parts = [ranges[name if name in ranges else self.source.derived[name]] for name in names]
                distribute(self._bands(number), parts, sinks)
            self._record_digests(param.hub_names, sinks)
        else:
            for name, tensor in zip(param.hub_names, self.source.read_each(param), strict=True):
                self._put(name, tensor)
        for name in names[len(param.hub_names) :]:
            self.records.alias(name, self.source.derived[name])
        return JournalEntry(tuple(self.records.entry(names)), ())

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        converted = self.records.convert(name, tensor, self.source.stored_record(name))
        for target in self._with_copies([name]):
            self._writer.put(target, converted)

    def _note_written(self, number: int, entry: JournalEntry) -> None:
        self._writer.note(self._names(self.source.params[number]))

    def _take_passthrough(self, name: str) -> None:
        self._put(name, self.source.read_passthrough(name))
        self._writer.note(self._with_copies([name]))
        self._tell(spec_bytes(self.specs[name]))


def is_finished(
    source: Checkpoint, output: Path, plan: MegatronOutput | HubOutput, settings: ConversionSettings
) -> bool:
    """With `resume`, True if an earlier run has written the complete output; adds a note to the report.

    Raises SettingError if the output exists and is something else.
    """
    if not settings.resume:
        return False
    manifest = read_manifest(output) if (output / MANIFEST).is_file() else None
    is_whole = all((output / file).is_file() for file in plan.report.files)
    if manifest is not None and is_whole and manifest.fingerprint == _fingerprint(source, plan, settings):
        plan.report.notes += [*manifest.notes(), "the conversion was already complete: nothing was written"]
        return True
    check_output(output, source.folders(), settings.overwrite)
    return False


@contextmanager
def unfinished_output(
    source: Checkpoint, output: Path, plan: MegatronOutput | HubOutput, settings: ConversionSettings
) -> Iterator[tuple[Path, Journal]]:
    """Context manager: the temporary folder that becomes the output, and its journal, including the progress of an
    interrupted run."""
    sources, report = source.folders(), plan.report
    mark = _fingerprint(source, plan, settings)
    resume = partial(matches, fingerprint=mark) if settings.resume and sources else None
    keep = has_progress if sources else None  # a model in memory cannot be resumed by another process
    with atomic_output(output, sources, settings.overwrite, report.bytes, resume, keep) as folder:
        journal = Journal(folder, mark, report.files)
        try:
            yield folder, journal
        except BaseException:
            journal.close(remove=False)
            raise
        journal.close(remove=True)


def _fingerprint(source: Checkpoint, plan: MegatronOutput | HubOutput, settings: ConversionSettings) -> str:
    """Fingerprint that must match before an interrupted conversion is resumed."""
    report = plan.report.as_dict()
    chosen = ("action", "family", "format", "key_style", "mcore", "layout", "vocab_multiple", "files", "side_files")
    facts = {
        **{name: report[name] for name in chosen},
        "dtype": str(settings.cast_dtype),
        "run_config": isinstance(settings, MegatronSettings) and settings.run_config,
        "config": source.hub.config_bytes().decode("utf-8", "replace"),
        "tensors": {name: [dtype_name(dtype), *shape] for name, (dtype, shape) in plan.specs.items()},
        # The new rows and the tokenizer of a converted model depend on these.
        **{name: getattr(settings, name) for name in ("seed", "mask_token") if hasattr(settings, name)},
        **({"quantize": scheme} if (scheme := getattr(settings, "quantize", None)) else {}),
    }
    return fingerprint(source.folders(), source.folder if source.iteration else None, facts)


def _slice_ranges(param: ParamMapping) -> list[SliceRange]:
    """Row ranges of the Hub tensors within a parameter's slice."""
    assert param.hub_rows is not None
    return [SliceRange(rows) for rows in param.hub_rows]
