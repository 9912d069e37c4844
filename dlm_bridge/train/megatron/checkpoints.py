"""Checkpoints of a Megatron run: DIR/checkpoints is a Megatron checkpoint root, which `dlm-bridge export` reads.

Weights and optimizer state are saved by megatron-core as global tensors, so that a run resumes on another layout. Each
iteration is written under a hidden name and renamed when it is complete; the tracker file names complete ones only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.checkpoint.api import CheckpointException

from dlm_bridge.convert.atomic import atomic_file, disk_errors, disk_refusal, publish_folder, sync
from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.checkpoints.huggingface import (
    CARRIED_FILE,
    HUB_FOLDER,
    side_file_digests,
    write_passthrough,
    write_side_files,
)
from dlm_bridge.convert.formats.dcp import DCP_METADATA
from dlm_bridge.convert.manifest import MANIFEST, Manifest, is_intact
from dlm_bridge.errors import DlmBridgeError, printable
from dlm_bridge.hub import CONFIG_FILE, TRACKER, read_json
from dlm_bridge.loading.source import MegatronSource
from dlm_bridge.models.special_tokens import SPECIAL_TOKENS
from dlm_bridge.parallel.core import (
    AsyncCallsQueue,
    AsyncRequest,
    dist_checkpointing,
    parallel_state,
    unwrap_model,
)
from dlm_bridge.parallel.lora import LiveFactor, adapter_state
from dlm_bridge.parallel.mcore_patches.modules import patch_grouped_linear_state
from dlm_bridge.parallel.mcore_patches.optimizers import (
    drop_offload_settings,
    patched_checkpoints,
    unpadded_param_index_map,
)
from dlm_bridge.parallel.mcore_patches.process_wide import start_results_queue
from dlm_bridge.processes import (
    end_with_parent,
    how_it_ended,
    leave_inherited,
    signals_blocked,
    temporary_folder,
    was_killed,
)
from dlm_bridge.train.checkpoints import (
    ResumePoint,
    find_resume_point,
    from_all,
    gather_digests,
    how_to_go_on,
    load_failure,
    named_checkpoints,
    raised_everywhere,
    remove_checkpoint,
    save_tokenizer,
    write_rank_digests,
)
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.megatron import fsdp_checkpoints, loaded_state
from dlm_bridge.train.megatron.ema import MegatronAverages
from dlm_bridge.train.megatron.loaded_state import UNTRAINED_MTP, read_mtp_shard, sharded_mtp
from dlm_bridge.train.metrics import MAKE_ROOM

NAME = re.compile(r"iter_(\d{7,})")
NEW_HUB_FILES = ".hub-"  # a folder of them, until they are complete
WRITER_LOG = "megatron.core.dist_checkpointing.strategies.filesystem_async"
ANY_LAYOUT = "fully_reshardable"  # megatron-core's word for an optimizer state that is loaded on any layout
STATE = "dlm_bridge_run"  # the key of our own values in `common.pt`


def checkpoint_root(output: Path) -> Path:
    """The Megatron checkpoint root of a run."""
    return output / "checkpoints"


def find_iteration(output: Path) -> ResumePoint:
    """The iteration that a run goes on from: the one that the tracker names, or where that is not whole the newest
    whole one before it. Every process calls it. Raises DlmBridgeError."""
    root = checkpoint_root(output)
    found = named_checkpoints(root, NAME)
    named = _tracked_step(root)
    if named in [step for step, _ in found]:
        found = [(step, folder) for step, folder in found if step <= named]
    elif named is not None and not found:
        raise DlmBridgeError(f"{root / TRACKER} names an iteration that is not there: remove the file to start anew")
    point = find_resume_point(found, DCP_METADATA)
    if point.folder is not None and (root / MANIFEST).is_file() and not is_intact(root):
        raise DlmBridgeError(
            f"{root / MANIFEST} is not as it was written, and every iteration is read by it: restore it, or start "
            "anew in another --output"
        )
    return point


def resume_point(output: Path, main: bool, console: Console) -> ResumePoint:
    """As `find_iteration`; those after it are set aside, and the tracker names it. Every process calls it."""
    point, root = find_iteration(output), checkpoint_root(output)
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
    """What the tracker names, -1 for anything but an iteration; None where there is no tracker."""
    tracker = root / TRACKER
    if not tracker.is_file():
        return -1 if tracker.exists() else None  # a pipe or a device, whose end would be waited for
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
    """Raise DlmBridgeError for an iteration of a format that these options do not resume from."""
    fsdp = config.parallel.fsdp is not None
    if (folder / "metadata.json").is_file() == fsdp:
        how = "without" if fsdp else "with"
        raise DlmBridgeError(f"{folder}: was saved {how} --fsdp: resume it so, or export it and start from that")
    if fsdp:
        with named_load_errors(folder):
            fsdp_checkpoints.check_readable(folder)


def write_hub_files(output: Path, source: MegatronSource, tokenizer: Any, predicts: bool = False) -> None:
    """Write what every iteration shares, the Hub side of the model: config, tokenizer, side files, the manifest. One
    process calls it, when a run starts; `predicts`: with multi-token prediction. Raises DlmBridgeError where a tensor
    of those layers differs from the one that a run shares with them."""
    folder = checkpoint_root(output) / HUB_FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before its first checkpoint
    checkpoint = source.bridge.checkpoint
    shared = checkpoint.shared if predicts else {}
    for name, other in shared.items():
        if not torch.equal(checkpoint.read(name), checkpoint.read(other)):
            raise DlmBridgeError(
                f"{checkpoint.where}: {name} differs from {other}, and megatron-core has one tensor for both: set "
                "--mtp-loss-scaling-factor 0, which leaves the multi-token prediction layers as they are"
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
    """Edit the bos, eos and pad tokens of a generation_config.json where the run has aligned them."""
    if not file.is_file():
        return
    values = read_json(file)
    ends = {name: getattr(generation, name, None) for name in SPECIAL_TOKENS}
    changed = {name: value for name, value in ends.items() if value is not None and value != values.get(name)}
    if changed:
        file.write_text(json.dumps(values | changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_hub_config(output: Path, source: MegatronSource, predicts: bool = False) -> None:
    """Write the model's config.json as it is now, and the manifest that repeats it; `predicts` as of
    `write_hub_files`. Each replaces its file as a whole: no iteration could be read without them. Raises
    DlmBridgeError where the disk refuses."""
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
    """Remove what a killed run left unfinished."""
    for pattern in (".iter_*", f"{NEW_HUB_FILES}*"):
        for leftover in checkpoint_root(output).glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


class CheckpointManager:
    """Writes and reads the iterations of one run. Every process makes one and calls it together."""

    def __init__(
        self,
        config: TrainConfig,
        chunks: Sequence[Any],
        optimizer: Any,
        source: Checkpoint | None,
        factors: Sequence[Sequence[LiveFactor]] | None = None,
        averages: MegatronAverages | None = None,
    ) -> None:
        """`source` is what the run started from, of which the layers that are not trained are kept; None: none are.
        With `factors`, by chunk, an iteration holds that adapter alone; with `averages` it holds them beside the
        weights."""
        self.root = checkpoint_root(Path(config.checkpoint.output))
        self.chunks = chunks
        self.optimizer = optimizer
        self.keep_last = config.checkpoint.keep_last
        self.factors, self.averages = factors, averages
        own = factors is not None or chunks[0].config.mtp_num_layers  # of an adapter's base, or trained
        self.mtp = {} if own or source is None else read_mtp_shard(source)
        self.queue = AsyncCallsQueue() if config.checkpoint.async_save else None
        self.pending: Path | None = None  # what the background writes
        self.background: Any = None  # the process that writes it
        self.fsdp = chunks[0].ddp_config.use_megatron_fsdp
        patch_grouped_linear_state(chunks)
        logging.getLogger(WRITER_LOG).setLevel(logging.CRITICAL)  # its errors are ours, in one line

    def save(self, step: int, values: dict[str, Any], save_more: Callable[[Path], None] | None = None) -> Path:
        """Write the iteration `step` with our own `values` (numbers and strings) and what `save_more` adds to its
        folder on every rank; with `--async-save` in the background, after the one before is complete. Raises
        DlmBridgeError where the disk refuses."""
        self.finish()
        folder = self.root / f"iter_{step:07d}"
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
            with self._write_errors(folder), raised_everywhere(), self._disk_errors(folder):
                write_rank_digests(hidden, dist.get_rank())
            self._publish(folder, step)
        else:
            assert self.queue is not None
            if request.async_fn is not None:  # None where a rank has nothing to write
                write = partial(_write_with_digests, os.getpid(), request.async_fn, hidden, dist.get_rank())
                request = request._replace(async_fn=write)
            request.add_finalize_fn(lambda: self._publish(folder, step))
            with signals_blocked():
                self.queue.schedule_async_request(request)
            self.pending, self.background = folder, self.queue.async_calls[-1].async_caller.process
        return folder

    def write(self, folder: Path, step: int, values: dict[str, Any]) -> AsyncRequest | None:
        """Write an iteration into an empty folder; with `--async-save` what the background has to do."""
        if self.fsdp:
            fsdp_checkpoints.save(folder, step, values, self.chunks[0], self.optimizer, self.mtp)
            return None
        weights_and_optimizer = sharded_state(self.chunks, self.optimizer, is_loading=False, factors=self.factors)
        state = {"iteration": step, "checkpoint_version": 3.0, STATE: values, **weights_and_optimizer}
        state["mtp"] = sharded_mtp(self.mtp) if self.mtp else {}
        if self.averages is not None:
            state |= self.averages.saved([*_weights_of(state, self.chunks), state["mtp"]])
        start_results_queue()
        request: AsyncRequest | None = dist_checkpointing.save(
            state, str(folder), content_metadata=_content_metadata(), async_sharded_save=self.queue is not None
        )
        return request

    def poll(self) -> None:
        """Publish a background save that has ended. Called once a step."""
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
        """Turn what the disk refuses while an iteration is written into a DlmBridgeError, and leave nothing of it."""
        try:
            with self._disk_errors(folder):
                yield
        except CheckpointException as error:  # of any rank's writers, raised on every rank
            reason = self._write_failure(folder, error)
            self._remove_unfinished(folder)
            raise DlmBridgeError(reason) from error
        except DlmBridgeError:
            self._remove_unfinished(folder)
            raise

    def _write_failure(self, folder: Path, error: CheckpointException) -> str:
        """One line on why an iteration was not written, the same on every rank; they all call it."""
        process = self.background
        ended = how_it_ended(process.exitcode) if process is not None and process.exitcode else None
        found = next(((rank, how) for rank, how in enumerate(from_all(ended)) if how is not None), None)
        if found is not None:
            reason = f"the process of rank {found[0]} that writes it {found[1]}"
        else:
            first = next((failure[0] for failure in error.failures.values()), None)  # the first rank knows
            refused = None if first is None else disk_refusal(first, folder, self._remedy())
            if (refused := from_all(refused)[0]) is not None:
                return refused
            reason = from_all(load_failure(error))[0]
        return f"{folder}: cannot be written: {reason}: {self._remedy(was_killed(reason))}"

    def _disk_errors(self, folder: Path) -> contextlib.AbstractContextManager[None]:
        return disk_errors(folder, self._remedy())

    def _remedy(self, killed: bool = False) -> str:
        found = named_checkpoints(self.root, NAME)
        return how_to_go_on(found[-1][1] if found else None, killed)

    def _remove_unfinished(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            shutil.rmtree(_hidden(folder), ignore_errors=True)

    @loaded_state.rewritten_extra_states()
    def load(self, folder: Path) -> dict[str, Any]:
        """Set weights and optimizer to those of an iteration of any layout, and return our own values. Raises
        DlmBridgeError for a damaged checkpoint and for one of another model."""
        with named_load_errors(folder):
            if self.fsdp:
                return fsdp_checkpoints.load(folder, self.chunks[0], self.optimizer)
            request = sharded_state(self.chunks, self.optimizer, is_loading=True, factors=self.factors)
            parts = loaded_state.optimizer_request(self.optimizer, request.pop(loaded_state.OPTIMIZER_KEY))
            wanted = loaded_state.copy_tree(parts)
            if self.averages is not None:
                request |= self.averages.requested(_weights_of(request, self.chunks))
            with loaded_state.restricted_reading(folder):
                state = dist_checkpointing.load({**request, loaded_state.REQUEST_KEY: parts}, str(folder))
        restore = partial(loaded_state.restore_optimizer, self.optimizer, wanted, state)
        restore_state(folder, self.chunks, self.optimizer, state, restore, whole=self.factors is None)
        if self.averages is not None:
            self.averages.take(state)
        return dict(state[STATE])

    def _publish(self, folder: Path, step: int) -> None:
        """Give a complete iteration its name, and let the tracker name it; then remove the oldest ones."""
        dist.barrier()  # every rank has written its digests
        with self._write_errors(folder), raised_everywhere(), self._disk_errors(folder):
            if dist.get_rank() == 0:
                gather_digests(_hidden(folder))
                publish_folder(_hidden(folder), folder)
                _write_tracker(self.root, step)
                # One after this step is of a tracker that was set back, and no reason to remove this one.
                found = [path for number, path in named_checkpoints(self.root, NAME) if number <= step]
                for old in found[: -self.keep_last] if self.keep_last else ():
                    remove_checkpoint(old)
        self.pending = None


def sharded_state(
    chunks: Sequence[Any],
    optimizer: Any,
    is_loading: bool,
    sharding: str = ANY_LAYOUT,
    factors: Sequence[Sequence[LiveFactor]] | None = None,
) -> dict[str, Any]:
    """Weights and optimizer state of a rank, sharded as megatron-core saves them, or of an adapter its `factors` in
    place of the weights. `sharding` is its word for that of the distributed optimizer."""
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
    return {**model, loaded_state.OPTIMIZER_KEY: state}


def restore_state(
    folder: Path,
    chunks: Sequence[Any],
    optimizer: Any,
    state: dict[str, Any],
    restore_optimizer: Callable[[], None],
    whole: bool = True,
) -> None:
    """Set weights to those of a loaded `state`, which without `whole` has an adapter's alone, and let
    `restore_optimizer` do so with the optimizer. Raises DlmBridgeError that names the `folder`."""
    named = list(zip(_chunk_keys(chunks), unwrap_model(list(chunks)), strict=True))
    try:
        weights = {key: loaded_state.rewrite_extra_states(state[key], chunk.config) for key, chunk in named}
        for key, chunk in named:
            chunk.load_state_dict(weights[key], strict=whole)
        with patched_checkpoints(optimizer):
            restore_optimizer()
    except DlmBridgeError as error:
        raise DlmBridgeError(f"{folder}: cannot be resumed from: {error}") from None
    for key, chunk in named:
        # Again: an offloading optimizer initialises its state by a step with random gradients.
        chunk.load_state_dict(weights[key], strict=whole)


@contextlib.contextmanager
def named_load_errors(folder: Path) -> Iterator[None]:
    """Turn whatever megatron-core and torch raise as they read an iteration into one line."""
    try:
        yield
    except DlmBridgeError:
        raise
    except (Exception, CheckpointException) as error:
        remedy = UNTRAINED_MTP if "optimizer.state.param.mtp." in str(error) else ""
        raise DlmBridgeError(f"{folder}: cannot be resumed from: {remedy or load_failure(error)}") from error


def _write_with_digests(
    parent: int, write: Callable[..., None], folder: Path, rank: int, *arguments: Any, **options: Any
) -> None:
    """The work of a background save, in a process of its own."""
    leave_inherited()
    end_with_parent(parent)
    write(*arguments, **options)
    with contextlib.suppress(OSError):  # on a full disk: the first rank digests what has no digest
        write_rank_digests(folder, rank)


def _hidden(folder: Path) -> Path:
    """Where an iteration is written, until it is complete."""
    return folder.with_name(f".{folder.name}")


def _content_metadata(sharding: str = ANY_LAYOUT) -> dict[str, Any]:
    """megatron-core's words for how a state is saved."""
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
