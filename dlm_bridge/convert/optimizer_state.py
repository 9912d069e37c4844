"""The optimizer's state of a `torch_dist` checkpoint, cut anew with the weights.

In the `fully_reshardable` form (and where the optimizer is not distributed) every state is a tensor of its parameter's
shape, `optimizer.state.exp_avg.decoder.layers...`: it is cut as the parameter is. What is not sharded lies in
`common.pt`, or in newer Megatron-LM's checkpoints in the object `common_state`, which is copied byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path

import torch
import xxhash

from dlm_bridge.convert.checkpoint import Checkpoint, CheckpointWriter, first_of
from dlm_bridge.convert.checkpoints.megatron import MegatronCheckpoint, is_training_state, stored_keys
from dlm_bridge.convert.checkpoints.torch_dist import COMMON_STATE
from dlm_bridge.convert.formats.dcp_metadata import Contents, StorageLocation, read_metadata
from dlm_bridge.convert.formats.torch_dist_writer import combined_file_digests, write_metadata
from dlm_bridge.convert.streaming import tensor_bands
from dlm_bridge.convert.workers import run_tasks, worker_count
from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.mapping.rules import ParamMapping, Vocabulary

_STATE = re.compile(r"((?:chained_\d+\.)?optimizer\.state\.\w+\.)(.+)")
_COMMON_FILE = "__common_0.distcp"
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")


@dataclass(frozen=True)
class StateMapping(ParamMapping):
    """A parameter's slice of one of the optimizer's tensors; `prefix` is what stands before the parameter's key."""

    prefix: str = ""

    @cached_property
    def parameter(self) -> ParamMapping:
        return ParamMapping(self.rule, self.dims, self.layer, self.expert)

    @cached_property
    def megatron_key(self) -> str:
        return self.prefix + self.parameter.megatron_key

    @cached_property
    def megatron_name(self) -> str:
        return self.prefix + self.parameter.megatron_name


@dataclass(frozen=True)
class OptimizerState:
    """What is carried: each slice as it is stored (key, index on the stacked axes) and as it will be."""

    slices: list[tuple[str, tuple[int, ...], StateMapping]]
    dtypes: dict[str, torch.dtype]  # by StateLink.megatron_key
    common: bytes
    common_is_object: bool  # of the distributed checkpoint; else it is common.pt

    @property
    def params(self) -> list[StateMapping]:
        return [param for _, _, param in self.slices]


def dropped_note(source: Checkpoint) -> list[str]:
    """What a report says of a training state that does not go with the weights."""
    if not isinstance(source, MegatronCheckpoint):
        return []
    state = [key for key in (*source.store.tensors(), *source.store.objects()) if is_training_state(key)]
    if not any(map(_OPTIMIZER.match, state)):
        return []
    return [f"weights only: {len(state)} tensors and objects of training state are not carried over"]


def carried_note(state: OptimizerState) -> str:
    """What a report says of a state that is carried."""
    kinds = dict.fromkeys(param.prefix.rstrip(".").rpartition(".")[2] for param in state.params)
    return f"the optimizer's state ({', '.join(kinds)}) is carried over; random number generators' states are not"


def optimizer_state(source: Checkpoint, padded: Sequence[ParamMapping], format_: str) -> OptimizerState | None:
    """The state that goes into a checkpoint of `padded` params, None where the source has none.

    Raises DlmBridgeError for a state that cannot be cut anew; --weights-only is the way without it.
    """
    if not isinstance(source, MegatronCheckpoint):
        return None
    store = source.store
    found = [key for key in (*store.tensors(), *store.objects()) if _OPTIMIZER.match(key)]
    if not found:
        return None
    remedy = "give --weights-only to leave the optimizer's state out"
    if (store.format, format_) != ("torch_dist", "torch_dist"):
        raise DlmBridgeError(f"{source.where}: an optimizer's state goes from torch_dist to torch_dist only: {remedy}")
    keys = {key for key in found if key in store.tensors()}
    prefixes = sorted({match[1] for key in keys if (match := _STATE.fullmatch(key))})
    slices, used, dtypes = [], set(), {}
    for prefix in prefixes:
        for param, wide in zip(source.params, padded, strict=True):
            for key, stack in stored_keys(param):
                if prefix + key in keys:
                    target = StateMapping(wide.rule, wide.dims, wide.layer, wide.expert, prefix)
                    dtypes[target.megatron_key] = _check(source, prefix + key, param, stack)
                    slices.append((prefix + key, tuple(index for index, _ in stack), target))
                    used.add(prefix + key)
                    break
    odd = [key for key in found if key not in used]
    if odd:
        raise DlmBridgeError(
            f"{source.where}: {first_of(odd)} is not in a parameter's shape, so it cannot be cut anew: save with "
            f"--dist-ckpt-optim-fully-reshardable, or {remedy}"
        )
    common = store.folder / "common.pt"
    if common.is_file():
        return OptimizerState(slices, dtypes, common.read_bytes(), common_is_object=False)
    place = source.reader.contents.objects[COMMON_STATE]
    with (store.folder / place.file).open("rb") as stream:
        stream.seek(place.offset)
        return OptimizerState(slices, dtypes, stream.read(place.length), common_is_object=True)


def transfer_state(source: Checkpoint, state: OptimizerState, writer: CheckpointWriter, workers: int | None) -> None:
    """Write every slice; the rows of a padded vocabulary are zeros."""
    assert isinstance(source, MegatronCheckpoint)
    rows = source.dims.vocab

    def move(key: str, stack: tuple[int, ...], param: StateMapping) -> None:
        slice_ = torch.zeros(param.megatron_shape, dtype=state.dtypes[param.megatron_key])
        own = slice_[:rows] if isinstance(param.rule, Vocabulary) else slice_
        source.reader.read_into(key, stack, own)
        writer.note(param, writer.write(param, tensor_bands(slice_)))

    tasks = [
        (prod(param.megatron_shape) * state.dtypes[param.megatron_key].itemsize, partial(move, key, stack, param))
        for key, stack, param in state.slices
    ]
    run_tasks(tasks, worker_count(workers))


def write_common(state: OptimizerState, folder: Path) -> dict[str, str]:
    """Put what is not sharded in place of the common.pt of a finished iteration. Returns digests of added files."""
    if not state.common_is_object:
        (folder / "common.pt").write_bytes(state.common)
        return {}
    (folder / "common.pt").unlink()
    (folder / _COMMON_FILE).write_bytes(state.common)
    place = StorageLocation(_COMMON_FILE, 0, len(state.common))
    contents = read_metadata(folder)
    write_metadata(folder, Contents(contents.tensors, {**contents.objects, COMMON_STATE: place}))
    return combined_file_digests({place: xxhash.xxh3_128_digest(state.common)})


def _check(
    source: MegatronCheckpoint, key: str, param: ParamMapping, stack: tuple[tuple[int, int], ...]
) -> torch.dtype:
    """The dtype of a stored state, which must be whole and in its parameter's shape."""
    stored = source.reader.tensor(key)
    parameter = source.reader.tensor(source.stored_key(param) or param.megatron_key)
    if stored.shape != parameter.shape:
        raise DlmBridgeError(
            f"{source.where}: {key} has shape {list(stored.shape)}, its parameter {list(parameter.shape)}: give "
            "--weights-only to leave the optimizer's state out"
        )
    source.reader.check_tiled(key)
    assert stored.dtype is not None
    return stored.dtype
