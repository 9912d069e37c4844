"""Checkpoints of a Megatron run: DIR/checkpoints is a Megatron checkpoint root, which `dlm-bridge export` reads.

megatron-core saves weights and optimizer state as global tensors, so that a run can resume on another layout. Each
iteration is written under a hidden name and renamed when it is complete; the tracker file names only complete ones.

In order: finding the iteration to resume from, files shared by all iterations, `CheckpointManager`, the optimizer's
state on any layout, multi-token prediction layers, and Megatron FSDP's own format.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints.huggingface import (
    CARRIED_FILE,
    HUB_FOLDER,
    side_file_digests,
    write_passthrough,
    write_side_files,
)
from dlm_bridge.convert.checkpoints.torch_dist import check_backend
from dlm_bridge.convert.formats.dcp import DCP_METADATA
from dlm_bridge.convert.formats.dcp_reader import RestrictedReader
from dlm_bridge.convert.manifest import MANIFEST, Manifest, is_intact
from dlm_bridge.distributed import from_all, raised_everywhere
from dlm_bridge.errors import (
    CheckpointError,
    DlmBridgeError,
    LayoutError,
    ResourceError,
    SettingError,
    WorkerError,
    printable,
)
from dlm_bridge.files.atomic import atomic_file, disk_errors, disk_refusal, publish_folder, sync, temporary_folder
from dlm_bridge.files.pickles import restricted_loading
from dlm_bridge.files.reading import read_json
from dlm_bridge.hub import CONFIG_FILE, TRACKER
from dlm_bridge.loading.source import MegatronSource
from dlm_bridge.mapping.rules import ParamMapping
from dlm_bridge.models.special_tokens import SPECIAL_TOKENS
from dlm_bridge.parallel import mcore_compat
from dlm_bridge.parallel.core import (
    AsyncRequest,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    dist_checkpointing,
    parallel_state,
    unwrap_model,
)
from dlm_bridge.parallel.lora import LiveFactor, adapter_state
from dlm_bridge.parallel.mcore_patches.fsdp import FSDPShard, buffers, fsdp_shards, init_optimizer_state
from dlm_bridge.parallel.mcore_patches.modules import patch_grouped_linear_state
from dlm_bridge.parallel.mcore_patches.optimizers import (
    drop_offload_settings,
    parts_of,
    patched_checkpoints,
    unpadded_param_index_map,
)
from dlm_bridge.parallel.mcore_patches.process_wide import distributed_reader, drop_stale_results, start_results_queue
from dlm_bridge.parallel.train import fp8_state
from dlm_bridge.parallel.train.ema import MegatronAverages
from dlm_bridge.parallel.weights import EMBEDDING, OUTPUT
from dlm_bridge.processes import end_with_parent, how_it_ended, leave_inherited, signals_blocked, was_killed
from dlm_bridge.train.checkpoints import (
    ResumePoint,
    agreed,
    find_resume_point,
    gather_digests,
    how_to_go_on,
    load_failure,
    named_checkpoints,
    rank_files,
    remove_checkpoint,
    save_tokenizer,
    write_rank_digests,
)
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.early_stopping import KeptCheckpoints
from dlm_bridge.train.metrics import MAKE_ROOM
from dlm_bridge.train.setup import check_same_model

NAME = re.compile(r"iter_(\d{7,})")
NEW_HUB_FILES = ".hub-"  # prefix of their temporary folder
CHANGED = "a file that was changed"
LOCAL_RECORD = "local_checkpoints.json"  # in a run's folder: see `local_checkpoints.Record`
# Loggers that are silent during a run: errors of writers are raised as one line instead. 0.19 also logs that code is
# deprecated which it calls itself (synchronous saves, common.pt).
WRITER_LOGS = ("megatron.core.dist_checkpointing.strategies", "nvidia_resiliency_ext.checkpointing.async_ckpt")
ANY_LAYOUT = "fully_reshardable"  # megatron-core's name for an optimizer state that can be loaded on any layout
STATE = "dlm_bridge_run"  # key of our own values in the common state
OPTIMIZER_KEY, REQUEST_KEY = "optimizer", "wanted_optimizer"  # in a checkpoint; in a request to load it
_EXPERT_GROUP = "is_expert_parallel"
_GROUP_SETTINGS = ("wd_mult", "lr_mult", "is_decoupled_lr")  # also distinguish megatron-core's param groups
EXPORT = "export it and start from that"
UNTRAINED_MTP = (
    f"its multi-token prediction layers were not trained: resume with `mtp_loss_scaling_factor=0`, or {EXPORT}"
)
MTPShard = dict[ParamMapping, torch.Tensor]  # unsharded tensors of one layer (and expert), in their stored dtype
FSDP_MODEL, FSDP_OPTIMIZER = "model.module.", "optimizer.state.module.module."
FSDP_STATES = ("exp_avg", "exp_avg_sq")
_VOCABULARY = re.compile(rf"\.({re.escape(EMBEDDING)}|{re.escape(OUTPUT)})(\.exp_avg(_sq)?)?$")
_EXPERT = re.compile(r"(mlp\.experts\.(?:linear_fc[12]\.(?:weight|bias)|local_experts\.))(\d+)")
_GATED_MLP = re.compile(r"\.mlp\.(experts\.(local_experts\.\d+\.)?|shared_experts\.)?linear_fc1\.(weight|bias)\d*$")


def checkpoint_root(output: Path) -> Path:
    """Megatron checkpoint root of a run."""
    return output / "checkpoints"


def find_iteration(output: Path) -> ResumePoint:
    """Iteration that a run resumes from: the one that the tracker names, or the newest intact one before it. Every
    process calls it. Raises CheckpointError if there is none but should be."""
    root = checkpoint_root(output)
    named = agreed(root, [TRACKER], lambda _: _tracked_step(root))[TRACKER]
    point = find_resume_point(named_checkpoints(root, NAME), DCP_METADATA, last=named)
    if point.folder is None and named is not None:
        raise CheckpointError(root / TRACKER, "names an iteration that does not exist: remove the file to start anew")
    state = agreed(root, [MANIFEST], _manifest_state)[MANIFEST]
    if point.folder is not None and state == CHANGED:
        raise CheckpointError(
            root / MANIFEST,
            "was changed, but every iteration depends on it: restore it, or start anew in another `output`",
        )
    return point


def _manifest_state(path: Path) -> str | None:
    if not path.is_file():
        return None
    return "an intact file" if is_intact(path.parent) else CHANGED


def find_checkpoint(config: TrainConfig) -> ResumePoint:
    """Same as `find_iteration`, and check that these options can resume from it. Raises CheckpointError or
    SettingError."""
    point = find_iteration(Path(config.checkpoint.output))
    if point.folder is not None:
        check_same_model(config, point.folder.parent)
        check_resumable(point.folder, config)
    return point


def resume_point(config: TrainConfig, main: bool, console: Console) -> ResumePoint:
    """Same as `find_checkpoint`; also set later iterations aside, and make the tracker name it. Every process calls
    it."""
    point, root = find_checkpoint(config), checkpoint_root(Path(config.checkpoint.output))
    with raised_everywhere():
        if main and point.folder is not None:
            notes = point.notes
            point.set_aside()
            if _tracked_step(root) != point.step:
                notes.append(f"{root / TRACKER} now names step {point.step}")
                _write_tracker(root, point.step)
            for line in notes:
                console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
    return point


def _tracked_step(root: Path) -> int | None:
    """Iteration that the tracker names, -1 if its content is anything else; None without a tracker."""
    tracker = root / TRACKER
    if not tracker.is_file():
        return -1 if tracker.exists() else None  # reading a pipe or a device could block
    try:
        text = tracker.read_bytes().strip()
    except OSError:
        return -1
    return int(text) if re.fullmatch(rb"[0-9]{1,18}", text) else -1


def _write_tracker(root: Path, step: int) -> None:
    if (root / TRACKER).exists() and not (root / TRACKER).is_file():
        (root / TRACKER).unlink()
    with atomic_file(root / TRACKER, overwrite=True) as tracker:
        tracker.write(str(step))
    sync(root)


def check_resumable(folder: Path, config: TrainConfig) -> None:
    """Raise SettingError for an iteration in a format that these options cannot resume, and CheckpointError for one
    that is damaged or that the installed megatron-core cannot read."""
    fsdp = config.parallel.fsdp is not None
    if (folder / "metadata.json").is_file() == fsdp:
        how = "without" if fsdp else "with"
        raise SettingError("fsdp", f"{folder} was saved {how} it: resume it {how} it, or {EXPORT}")
    if fsdp:
        with named_load_errors(folder):
            check_fsdp_readable(folder)
    else:
        check_backend(folder)
        mcore_compat.check_readable(folder)


def write_hub_files(output: Path, source: MegatronSource, tokenizer: Any, predicts: bool = False) -> None:
    """Write the files that all iterations share, the Hub side of the model: config, tokenizer, side files, manifest.
    One process calls it at the start of a run.

    Args:
        predicts: multi-token prediction layers are trained.

    Raises SettingError if they are, and one of their tensors differs from the tensor that megatron-core shares with
    it.
    """
    folder = checkpoint_root(output) / HUB_FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed before its first checkpoint
    checkpoint = source.bridge.checkpoint
    shared = checkpoint.shared if predicts else {}
    for name, other in shared.items():
        if not torch.equal(checkpoint.read(name), checkpoint.read(other)):
            raise SettingError(
                "mtp_loss_scaling_factor",
                f"must be 0, with which multi-token prediction layers are not trained: in {checkpoint.where} {name} "
                f"differs from {other}, but megatron-core has one tensor for both",
            )
    with disk_errors(folder, how_to_go_on(None)):
        folder.mkdir(parents=True)
        write_side_files(checkpoint, folder, None, None)
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)
        _write_ends(folder / "generation_config.json", source.model.generation_config)
        own = [name for name, entry in checkpoint.passthrough.items() if not entry.copy_of and name not in shared]
        write_passthrough(folder / CARRIED_FILE, {name: checkpoint.read_passthrough(name) for name in own})
        write_hub_config(output, source, predicts)


def _write_ends(file: Path, generation: Any) -> None:
    """Update the bos, eos and pad tokens in a generation_config.json if the run has aligned them."""
    if not file.is_file():
        return
    values = read_json(file)
    ends = {name: getattr(generation, name, None) for name in SPECIAL_TOKENS}
    changed = {name: value for name, value in ends.items() if value is not None and value != values.get(name)}
    if changed:
        file.write_text(json.dumps(values | changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_hub_config(output: Path, source: MegatronSource, predicts: bool = False) -> None:
    """Write the model's current config.json and the manifest, which contains it too; `predicts` as in
    `write_hub_files`. Both replace their files atomically, because iterations cannot be read without them. Raises
    ResourceError if they cannot be written."""
    root, checkpoint = checkpoint_root(output), source.bridge.checkpoint
    hub = root / HUB_FOLDER
    with (
        disk_errors(root / MANIFEST, MAKE_ROOM),
        temporary_folder(NEW_HUB_FILES, root) as new,
    ):
        source.model.config.save_pretrained(new)
        files = side_file_digests(hub, {CONFIG_FILE}) | side_file_digests(new, ())
        Manifest(
            format="torch_dist",
            family=source.bridge.family.name,
            config=json.loads((new / CONFIG_FILE).read_text()),
            dtype="keep",
            tensors={},
            source=checkpoint.hub.source,
            shards=list(checkpoint.hub.shards),
            side_files={f"{HUB_FOLDER}/{name}": digest for name, digest in files.items()},
            carried=list(checkpoint.passthrough),
            shared=checkpoint.shared if predicts else checkpoint.hub.shared,
        ).write(new)
        for name, folder in ((CONFIG_FILE, hub), (MANIFEST, root)):
            sync(new / name)
            os.replace(new / name, folder / name)
        sync(root)


def remove_leftovers(output: Path) -> None:
    """Remove the unfinished files of a killed run."""
    for pattern in (".iter_*", f"{NEW_HUB_FILES}*"):
        for leftover in checkpoint_root(output).glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


class CheckpointManager:
    """Writes and reads the iterations of one run. Every process creates one, and all call it together.

    Args:
        source: the checkpoint that the run started from, whose untrained layers are saved again; None to save none.
        factors: of an adapter, by chunk; an iteration then contains only the adapter.
        averages: saved with the weights.
    """

    def __init__(
        self,
        config: TrainConfig,
        chunks: Sequence[Any],
        optimizer: Any,
        source: Checkpoint | None,
        factors: Sequence[Sequence[LiveFactor]] | None = None,
        averages: MegatronAverages | None = None,
    ) -> None:
        self.root = checkpoint_root(Path(config.checkpoint.output))
        self.chunks = chunks
        self.optimizer = optimizer
        self.kept = KeptCheckpoints(config.checkpoint.keep_last)
        self.factors, self.averages = factors, averages
        omitted = factors is not None or chunks[0].config.mtp_num_layers  # in an adapter's base, or trained
        self.mtp = {} if omitted or source is None else read_mtp_shard(source)
        self.saving = mcore_compat.saving(config.checkpoint.async_save)
        self.queue = self.saving.queue() if config.checkpoint.async_save else None
        self.pending: Path | None = None  # iteration that is written in the background
        self.background: Any = None  # process that writes it
        self.fsdp = chunks[0].ddp_config.use_megatron_fsdp
        patch_grouped_linear_state(chunks)
        for name in WRITER_LOGS:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def save(
        self,
        step: int,
        values: dict[str, Any],
        save_more: Callable[[Path], None] | None = None,
        kept: KeptCheckpoints | None = None,
    ) -> Path:
        """Write an iteration; with `async_save` in the background, after the previous one is complete.

        Args:
            values: our own values, numbers and strings.
            save_more: called with the iteration's folder on every rank, to add files.
            kept: iterations that stay once it is complete; by default the newest `keep_last`.

        Raises ResourceError if it cannot be written, CheckpointError if the first rank does not see the files of all,
        and WorkerError if a process that writes it was killed.
        """
        self.finish()
        folder = self.folder(step)
        hidden = _hidden(folder)
        with self._write_errors(folder), raised_everywhere(), self._disk_errors(folder):
            if dist.get_rank() == 0:
                shutil.rmtree(hidden, ignore_errors=True)
                hidden.mkdir(parents=True)
        with self._write_errors(folder):
            request = self.write(hidden, step, values)
            if save_more is not None:
                save_more(hidden)
        if request is None:
            self._publish(folder, step, kept or self.kept)
        else:
            assert self.queue is not None
            if request.async_fn is not None:  # None if a rank has nothing to write
                write = partial(_write_with_digests, os.getpid(), request.async_fn, hidden, dist.get_rank())
                request = request._replace(async_fn=write)
            request.add_finalize_fn(lambda: self._publish(folder, step, kept or self.kept))
            with signals_blocked():
                self.queue.schedule_async_request(request)
            self.pending, self.background = folder, self.queue.async_calls[-1].async_caller.process
        return folder

    def folder(self, step: int) -> Path:
        """Folder of the iteration of `step`."""
        return self.root / f"iter_{step:07d}"

    def write(self, folder: Path, step: int, values: dict[str, Any]) -> AsyncRequest | None:
        """Write an iteration into an empty folder; with `async_save` return the request for the background."""
        if self.fsdp:
            save_fsdp(folder, step, values, self.chunks[0], self.optimizer, self.mtp)
            return None
        weights_and_optimizer = sharded_state(self.chunks, self.optimizer, is_loading=False, factors=self.factors)
        state = {"iteration": step, "checkpoint_version": 3.0, STATE: values, **weights_and_optimizer}
        state["mtp"] = sharded_mtp(self.mtp) if self.mtp else {}
        if self.averages is not None:
            state |= self.averages.saved([*_weights_of(state, self.chunks), state["mtp"]])
        start_results_queue(self.saving.writers)
        drop_stale_results(self.saving.writers)
        request: AsyncRequest | None = dist_checkpointing.save(
            state,
            str(folder),
            content_metadata=_content_metadata(),
            async_sharded_save=self.queue is not None,
            **self.saving.options,
        )
        return request

    def poll(self) -> None:
        """Publish a completed background save. Called once per step."""
        self._finalize(blocking=False)

    def finish(self) -> None:
        """Wait for a background save."""
        self._finalize(blocking=True)

    def _finalize(self, blocking: bool) -> None:
        if self.queue is not None and self.pending is not None:
            with self._write_errors(self.pending):
                self.queue.maybe_finalize_async_calls(blocking=blocking)

    @contextlib.contextmanager
    def _write_errors(self, folder: Path) -> Iterator[None]:
        """Context manager that raises failures to write an iteration as DlmBridgeError, and removes its files."""
        try:
            with self._disk_errors(folder):
                yield
        except CheckpointException as error:  # from any rank's writers, raised on every rank
            failure = self._write_failure(folder, error)
            self._remove_unfinished(folder)
            raise failure from error
        except DlmBridgeError:
            self._remove_unfinished(folder)
            raise

    def _write_failure(self, folder: Path, error: CheckpointException) -> DlmBridgeError:
        """The error for an iteration that was not written, equal on every rank. Collective."""
        process = self.background
        ended = how_it_ended(process.exitcode) if process is not None and process.exitcode else None
        found = next(((rank, how) for rank, how in enumerate(from_all(ended)) if how is not None), None)
        if found is not None:
            reason = f"the process of rank {found[0]} that writes it {found[1]}"
        else:
            first = next((failure[0] for failure in error.failures.values()), None)  # set on the first rank
            refused = None if first is None else disk_refusal(first, folder, self._remedy())
            if (refused := from_all(refused)[0]) is not None:
                return refused
            reason = from_all(load_failure(error))[0]
        kind = WorkerError if found is not None or was_killed(reason) else ResourceError
        return kind(folder, f"cannot be written: {reason}: {self._remedy(was_killed(reason))}")

    def _disk_errors(self, folder: Path) -> contextlib.AbstractContextManager[None]:
        return disk_errors(folder, self._remedy())

    def _remedy(self, killed: bool = False) -> str:
        found = named_checkpoints(self.root, NAME)
        return how_to_go_on(found[-1][1] if found else None, killed)

    def _remove_unfinished(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(_hidden(folder), ignore_errors=True)

    @fp8_state.rewritten_extra_states()
    def load(self, folder: Path) -> dict[str, Any]:
        """Load weights and optimizer from an iteration of any layout, and return our own values. Raises
        CheckpointError if it is damaged or from another model."""
        with named_load_errors(folder):
            if self.fsdp:
                return load_fsdp(folder, self.chunks[0], self.optimizer)
            request = sharded_state(self.chunks, self.optimizer, is_loading=True, factors=self.factors)
            parts = optimizer_request(self.optimizer, request.pop(OPTIMIZER_KEY))
            wanted = copy_tree(parts)
            if self.averages is not None:
                request |= self.averages.requested(_weights_of(request, self.chunks))
            with restricted_reading(folder):
                state = dist_checkpointing.load({**request, REQUEST_KEY: parts}, str(folder))
        restore = partial(restore_optimizer, self.optimizer, wanted, state)
        restore_state(folder, self.chunks, self.optimizer, state, restore, whole=self.factors is None)
        if self.averages is not None:
            self.averages.take(state)
        return dict(state[STATE])

    def _publish(self, folder: Path, step: int, kept: KeptCheckpoints) -> None:
        """Rename a complete iteration, update the tracker, and remove the iterations that are not `kept`."""
        hidden, rank = _hidden(folder), dist.get_rank()
        with self._write_errors(folder), raised_everywhere(), self._disk_errors(folder):
            own = rank_files(hidden, rank)
        written = from_all(own)
        with self._write_errors(folder), raised_everywhere(), self._disk_errors(folder):
            if rank == 0:
                gather_digests(hidden, written)
                publish_folder(hidden, folder)
                _write_tracker(self.root, step)
                # Later ones exist if the tracker was set back; they do not count.
                found = [each for each in named_checkpoints(self.root, NAME) if each[0] <= step]
                for old in kept.removed(found):
                    remove_checkpoint(old)
        self.pending = None


def sharded_state(
    chunks: Sequence[Any],
    optimizer: Any,
    is_loading: bool,
    sharding: str = ANY_LAYOUT,
    factors: Sequence[Sequence[LiveFactor]] | None = None,
) -> dict[str, Any]:
    """megatron-core's sharded state dict of a rank's weights and optimizer; `factors` of an adapter replace the
    weights. `sharding` is megatron-core's name for the sharding of the distributed optimizer's state."""
    metadata = {
        **_content_metadata(sharding),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if factors is None:
        states = [chunk.sharded_state_dict(metadata=metadata) for chunk in unwrap_model(list(chunks))]
    else:
        states = [adapter_state(each, metadata["dp_cp_group"]) for each in factors]
    model = dict(zip(_chunk_keys(chunks), states, strict=True))
    with unpadded_param_index_map(optimizer), patched_checkpoints(optimizer):
        state = optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    if not is_loading:
        drop_offload_settings(optimizer, state)
    return {**model, OPTIMIZER_KEY: state}


def restore_state(
    folder: Path,
    chunks: Sequence[Any],
    optimizer: Any,
    state: dict[str, Any],
    restore_optimizer: Callable[[], None],
    whole: bool = True,
) -> None:
    """Set weights from a loaded `state`, and call `restore_optimizer`. Without `whole` the state contains only an
    adapter's weights. Raises CheckpointError for `folder`."""
    named = list(zip(_chunk_keys(chunks), unwrap_model(list(chunks)), strict=True))
    try:
        weights = {key: fp8_state.rewrite_extra_states(state[key], chunk.config) for key, chunk in named}
        for key, chunk in named:
            chunk.load_state_dict(weights[key], strict=whole)
        with patched_checkpoints(optimizer):
            restore_optimizer()
    except DlmBridgeError as error:
        raise CheckpointError(folder, f"cannot be resumed from: {error}") from None
    for key, chunk in named:
        # Again, because an offloading optimizer initialises its state by a step with random gradients.
        chunk.load_state_dict(weights[key], strict=whole)


@contextlib.contextmanager
def named_load_errors(folder: Path) -> Iterator[None]:
    """Context manager that raises errors of megatron-core and torch while an iteration is read as CheckpointError."""
    try:
        yield
    except DlmBridgeError:
        raise
    except (Exception, CheckpointException) as error:
        remedy = UNTRAINED_MTP if "optimizer.state.param.mtp." in str(error) else ""
        raise CheckpointError(folder, f"cannot be resumed from: {remedy or load_failure(error)}") from error


def _write_with_digests(
    parent: int, write: Callable[..., None], folder: Path, rank: int, *arguments: Any, **options: Any
) -> None:
    """Background save, in a process of its own."""
    leave_inherited()
    end_with_parent(parent)
    write(*arguments, **options)
    with contextlib.suppress(OSError):  # on a full disk: `rank_files` computes them
        write_rank_digests(folder, rank)


def _hidden(folder: Path) -> Path:
    """Folder in which an iteration is written, until it is complete."""
    return folder.with_name(f".{folder.name}")


def _content_metadata(sharding: str = ANY_LAYOUT) -> dict[str, Any]:
    """megatron-core's settings for the format of a state."""
    return {
        "distrib_optim_sharding_type": sharding,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }


def _chunk_keys(chunks: Sequence[Any]) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _weights_of(state: dict[str, Any], chunks: Sequence[Any]) -> list[dict[str, Any]]:
    return [state[key] for key in _chunk_keys(chunks)]


# -- the optimizer's state on any layout
#
# megatron-core creates a separate optimizer for sharded experts, and saves steps and settings once per optimizer.
# Tensors are global, under names that do not depend on the layout. Steps and settings are equal for all parameters;
# they are in param groups, which differ in weight decay and in whether they are for sharded experts.


@contextlib.contextmanager
def restricted_reading(folder: Path) -> Iterator[None]:
    """Context manager in which megatron-core reads the checkpoint in `folder` with the restricted reader. Every
    process calls it. Raises CheckpointError, in every process: 0.19 reads without collectives."""
    with raised_everywhere():
        reader = RestrictedReader(folder)
    with (
        raised_everywhere(),
        named_load_errors(folder),
        restricted_loading(),
        distributed_reader(reader),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")  # about how 0.19 calls it
        yield


def optimizer_request(optimizer: Any, state: dict[Any, Any]) -> dict[int, Any]:
    """Sharded state dict to load for each of a rank's optimizers, by number."""
    parts = parts_of(optimizer)
    return {0: state} if len(parts) == 1 else {number: state[number] for number in range(len(parts))}


def copy_tree(state: Any) -> Any:
    """Copy a tree but not its leaves: loading replaces the leaves of the request."""
    if isinstance(state, Mapping):
        return {key: copy_tree(value) for key, value in state.items()}
    return [copy_tree(value) for value in state] if isinstance(state, list) else state


def restore_optimizer(optimizer: Any, wanted: dict[int, Any], loaded: Mapping[str, Any]) -> None:
    """Set every optimizer of a rank from the `loaded` state of an `optimizer_request`, of which `wanted` is a copy.
    Raises CheckpointError if the checkpoint's optimizer lacks a param group."""
    saved = _saved_parts(loaded[OPTIMIZER_KEY])
    found = loaded.get(REQUEST_KEY, {})
    states = {number: _filled(part, found.get(number)) for number, part in wanted.items()}
    for state in states.values():
        inner = _inner(state)
        inner["param_groups"] = [_with_saved_settings(group, saved) for group in inner["param_groups"]]
        counts = [_inner(part).get("state", {}) for part in saved]
        if steps := [count["common_step"] for count in counts if "common_step" in count]:
            inner["state"]["common_step"] = steps[0]
        if scalers := [part["grad_scaler"] for part in saved if "grad_scaler" in part]:
            state["grad_scaler"] = scalers[0]
    optimizer.load_state_dict(states if len(states) != 1 else states[0])


def _saved_parts(saved: Any) -> list[Any]:
    """States of the optimizers of the rank that wrote steps and settings."""
    if "optimizer" in saved or "param_groups" in saved:
        return [saved]
    return [part for key, part in sorted(saved.items(), key=lambda item: str(item[0])) if isinstance(part, Mapping)]


def _inner(state: Any) -> Any:
    """State of torch's optimizer inside the state of megatron-core's optimizer."""
    return state.get("optimizer", state)


def _with_saved_settings(group: dict[str, Any], saved: list[Any]) -> dict[str, Any]:
    """Param group with the settings and steps of the corresponding saved group."""
    groups = [known for part in saved for known in _inner(part)["param_groups"]]
    alike = [known for known in groups if all(known[name] == group[name] for name in _GROUP_SETTINGS)]
    alike.sort(key=lambda known: known[_EXPERT_GROUP] != group[_EXPERT_GROUP])
    if not alike:
        kind = ", ".join(f"{name} {group[name]}" for name in _GROUP_SETTINGS)
        raise CheckpointError("optimizer", f"no parameters with {kind}")
    own = {name: group[name] for name in (*_GROUP_SETTINGS, _EXPERT_GROUP, "params") if name in group}
    return {**group, **{name: value for name, value in alike[0].items() if name != "params"}, **own}


def _filled(wanted: Any, found: Any) -> Any:
    """Replace the requested leaves of `wanted` by the loaded ones; lists may be loaded as mappings from indices."""
    if isinstance(wanted, ShardedBase | LocalNonpersistentObject):
        return found
    if isinstance(wanted, Mapping):
        return {key: _filled(value, _at(found, key)) for key, value in wanted.items()}
    if isinstance(wanted, list):
        return [_filled(value, _at(found, number)) for number, value in enumerate(wanted)]
    return wanted


def _at(found: Any, key: Any) -> Any:
    if isinstance(found, Mapping):
        return found.get(key)
    return found[key] if isinstance(found, list) and isinstance(key, int) and key < len(found) else None


# -- multi-token prediction (MTP)
#
# Untrained layers are saved unchanged in every checkpoint. Each rank holds a part of them on the CPU from the start,
# because the source of the run may have been removed when it saves.


def read_mtp_shard(checkpoint: Checkpoint) -> MTPShard:
    """This rank's part of a checkpoint's multi-token prediction layers; empty if there are none."""
    params = [param for param in checkpoint.params if param.is_mtp]
    mine = params[dist.get_rank() :: dist.get_world_size()]
    return {param: param.to_megatron(checkpoint.read_param(param)) for param in mine}


def sharded_mtp(shard: MTPShard) -> dict[str, ShardedTensor]:
    """Sharded state dict of the shard, with megatron-core's names for multi-token prediction layers."""
    return {
        param.megatron_name: ShardedTensor.from_rank_offsets(
            param.megatron_key,
            tensor,
            *((axis, index, size) for axis, (index, size) in enumerate(param.stack)),
            prepend_axis_num=len(param.stack),
        )
        for param, tensor in shard.items()
    }


def describe_mtp(layers: int, factor: float) -> str:
    """Console line about the multi-token prediction layers."""
    many = "s are" if layers > 1 else " is"
    what = f"trained, with {factor:g} of the loss" if factor else "not trained, and saved unchanged"
    return f"{layers} multi-token prediction layer{many} {what}"


# -- Megatron FSDP's own format, `fsdp_dtensor`: each rank writes its rows of every parameter
#
# Names and boxes are Megatron-LM's: `model.module.decoder.layers.0...`, the gate and up matrices of a SwiGLU as
# `weight_w` and `weight_v`, experts by their global number. Unlike in Megatron-LM, ranks do not communicate which rows
# they hold, and the optimizer's step is one number. The saved weights are the optimizer's fp32 main params.


def save_fsdp(
    folder: Path,
    step: int,
    values: dict[str, Any],
    chunk: Any,
    optimizer: Any,
    mtp: Mapping[ParamMapping, torch.Tensor],
) -> None:
    """Write the iteration `step` into `folder`. Every process calls it; `mtp` is its part of the untrained layers."""
    run = {**values, **_optimizer_counters(optimizer)}
    untrained = {
        FSDP_MODEL + param.megatron_name: TensorBox(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        for param, tensor in mtp.items()
    }
    numbers = {"iteration": step, "checkpoint_version": 3.0, STATE: json.dumps(run)}
    state = {**_local_boxes(chunk, optimizer), **untrained, **_scaling(chunk), **numbers}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(folder)), planner=_SavePlanner(flatten_state_dict=False))


def load_fsdp(folder: Path, chunk: Any, optimizer: Any) -> dict[str, Any]:
    """Load weights and optimizer state from an iteration, on any number of data and tensor parallel ranks, and return
    our own values. Raises LayoutError if FP8 scales of experts need another expert parallel size."""
    with raised_everywhere():
        reader = RestrictedReader(folder)
    run = _read_run(reader)
    run.pop("tp", None)  # written by versions that resumed only at the same size
    init_optimizer_state(optimizer)  # tensors must exist to be loaded
    state = dict(_padded_as_stored(_local_boxes(chunk, optimizer), reader.read_metadata()))
    dcp.load(state, storage_reader=reader, planner=_LoadPlanner(flatten_state_dict=False))
    _set_optimizer_counters(optimizer, run)
    _set_scaling(chunk, reader, folder)
    chunk.module.install_optimized_model_weights()
    chunk.start_param_sync()
    return run


def check_fsdp_readable(folder: Path) -> None:
    """Raise the errors of torch's reader for an iteration whose metadata or own values are damaged."""
    _read_run(RestrictedReader(folder))


def _padded_as_stored(state: dict[str, Any], metadata: Metadata) -> Iterator[tuple[str, Any]]:
    """Narrow the boxes of a vocabulary, which tensor parallelism pads, to the stored rows, and set the remaining
    padding rows to zero."""
    for key, box in state.items():
        stored = metadata.state_dict_metadata.get(key)
        size = tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else ()
        padded = isinstance(box, TensorBox) and _VOCABULARY.search(key) and size[1:] == box.shape[1:]
        if not padded or size == box.shape:
            yield key, box
            continue
        rows = min(max(size[0] - box.offsets[0], 0), len(box.tensor))
        box.tensor[rows:].zero_()
        if rows:
            yield key, TensorBox(box.tensor[:rows], box.offsets, size)


def _read_run(reader: RestrictedReader) -> dict[str, Any]:
    """Read our own values and the optimizer's counters, in each process separately."""
    state: dict[str, Any] = {STATE: ""}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended
        dcp.load(state, storage_reader=reader, no_dist=True)
    found: dict[str, Any] = json.loads(state[STATE])
    return found


@dataclass(frozen=True)
class TensorBox:
    """Box of a global tensor, with the methods that torch's checkpoint writer and reader call."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # of the global tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.tensor.size())

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        data = TensorWriteData(self.chunk, properties, self.size())
        return [WriteItem(MetadataIndex(name, self.chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.chunk]


def tensor_boxes(part: FSDPShard, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, TensorBox]]:
    """Boxes on disk for a rank's rows `tensor` of a parameter: one, or one each for gate and up, which are
    concatenated in a tensor parallel rank's part."""
    assert len(tensor) == part.rows, (name, tensor.shape, part)
    if not part.rows:
        return
    if not _GATED_MLP.search(name):
        yield name, TensorBox(tensor, *_box(part, part.part, part.start))
        return
    half = part.part[0] // 2
    shape = (half, *part.part[1:])
    for suffix, first in (("_w", 0), ("_v", half)):
        begin, end = max(part.start, first), min(part.start + part.rows, first + half)
        if begin < end:
            rows = tensor[begin - part.start : end - part.start]
            yield name + suffix, TensorBox(rows, *_box(part, shape, begin - first))


def _box(part: FSDPShard, shape: tuple[int, ...], start: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, global shape) of the rows from `start` of a tensor parallel rank's part of `shape`."""
    offsets, whole = [start, *(0 for _ in shape[1:])], list(shape)
    if part.axis is not None:
        offsets[part.axis] += part.rank * shape[part.axis]
        whole[part.axis] *= part.ranks
    return tuple(offsets), tuple(whole)


def _local_boxes(chunk: Any, optimizer: Any) -> dict[str, Any]:
    """Boxes of all tensors on this rank, by key; they share the memory of the live tensors."""
    first = 0
    if chunk.config.num_moe_experts:
        ranks = parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * chunk.config.num_moe_experts // ranks
    found: dict[str, Any] = {
        FSDP_MODEL + name: TensorBox(buffer, (0,) * buffer.dim(), tuple(buffer.shape))
        for name, buffer in buffers(chunk)
    }
    for part in fsdp_shards(chunk):
        name = _EXPERT.sub(lambda match: f"{match[1]}{int(match[2]) + first}", part.name)
        for key, piece in tensor_boxes(part, name, _local(part.parameter)):
            found[FSDP_MODEL + key] = piece
        for kind, tensor in optimizer.optimizer.state.get(part.parameter, {}).items():
            if kind in FSDP_STATES:
                for key, piece in tensor_boxes(part, name, _local(tensor)):
                    found[f"{FSDP_OPTIMIZER}{key}.{kind}"] = piece
    return found


def _scaling(chunk: Any) -> dict[str, list[torch.Tensor]]:
    """Transformer Engine's FP8 states by key: objects, equal on every rank except the experts'."""
    found = {_scaling_key(name): module.get_extra_state() for name, module in _scaled(chunk).items()}
    return {key: [state] for key, state in found.items() if isinstance(state, torch.Tensor) and state.numel()}


def _set_scaling(chunk: Any, reader: RestrictedReader, folder: Path) -> None:
    scaled = _scaled(chunk)
    if not scaled:
        return
    stored = reader.read_metadata().state_dict_metadata.keys()
    state: dict[str, Any] = {key: "" for name in scaled if (key := _scaling_key(name)) in stored}
    experts = [key for key in stored if ".experts." in key and "._extra_state/" in key]
    if experts and not state.keys() & set(experts):
        size = experts[0].rpartition("_")[2]
        raise LayoutError("ep", f"must be {size}, as in {folder}, to resume the experts' FP8 scales: or {EXPORT}")
    dcp.load(state, storage_reader=reader)
    for name, module in scaled.items():
        if (key := _scaling_key(name)) in state:
            module.set_extra_state(fp8_state.rewrite_extra_states({name: state[key][0]}, chunk.config)[name])


def _scaled(chunk: Any) -> dict[str, Any]:
    return fp8_state.scaled_modules(chunk.module.module, chunk.config)


def _scaling_key(name: str) -> str:
    """Key of a module's state; the experts' keys contain the expert parallel rank."""
    if ".experts." not in name:
        return FSDP_MODEL + name
    rank = parallel_state.get_expert_model_parallel_rank()
    return f"{FSDP_MODEL}{name}/{rank}_{parallel_state.get_expert_model_parallel_world_size()}"


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Local rows, in the memory that the optimizer updates."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def _optimizer_counters(optimizer: Any) -> dict[str, Any]:
    """Counters of an optimizer: its steps, and the loss scale of fp16."""
    groups = optimizer.optimizer.param_groups
    step = max((float(group.get("step", 0)) for group in groups), default=0.0)
    for state in optimizer.optimizer.state.values():
        step = max(step, float(state.get("step", 0)))
    scaler = getattr(optimizer, "grad_scaler", None)
    scale = {name: float(value) for name, value in scaler.state_dict().items()} if scaler is not None else {}
    return {"optimizer_step": step, "loss_scale": scale}


def _set_optimizer_counters(optimizer: Any, run: dict[str, Any]) -> None:
    step, scale = run.pop("optimizer_step"), run.pop("loss_scale")
    for group in optimizer.optimizer.param_groups:
        if isinstance(group.get("step"), torch.Tensor):
            group["step"].fill_(step)
        elif "step" in group:
            group["step"] = int(step)
    for state in optimizer.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(step)
        elif "step" in state:
            state["step"] = int(step)
    scaler = getattr(optimizer, "grad_scaler", None)
    if scaler is not None and scale:
        now = scaler.state_dict()
        scaler.load_state_dict(
            {
                name: torch.full_like(now[name], value) if isinstance(now[name], torch.Tensor) else int(value)
                for name, value in scale.items()
            }
        )


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.tensor if isinstance(found, TensorBox) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # torch's own would search the boxes for tensors without memory, and copy unknown types.
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        found = self.state_dict[index.fqn]
        return found.tensor if isinstance(found, TensorBox) else super().lookup_tensor(index)
