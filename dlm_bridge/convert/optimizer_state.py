"""Resharding of the optimizer state of a `torch_dist` checkpoint.

In the `fully_reshardable` form, and without a distributed optimizer, every state is a tensor of its parameter's shape,
`optimizer.state.exp_avg.decoder.layers...`, and is sharded like the parameter. The unsharded state is in `common.pt`,
or in the object `common_state` (megatron-core 0.19), and is copied without unpickling. The moving averages of a run
with `ema_decay` have the parameters' shapes, too: `ema.decoder.layers...`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod

import torch

from dlm_bridge.convert.formats.dcp import ChunkedReader
from dlm_bridge.convert.streaming import Bands, tensor_bands
from dlm_bridge.convert.workers import run_tasks, worker_count
from dlm_bridge.errors import CheckpointError, first_of
from dlm_bridge.mapping.rules import ParamMapping, Vocabulary

AVERAGED = "ema"  # first component of the keys of averaged weights
_STATE = re.compile(rf"((?:chained_\d+\.)?optimizer\.state\.\w+\.|{AVERAGED}\.)(.+)")
COMMON_STATE = "common_state/shard_0_1"  # key of the object that megatron-core 0.19 saves in place of common.pt
_OPTIMIZER = re.compile(rf"(chained_\d+\.)?optimizer\.|{AVERAGED}\.")
_TRAINING_STATE = re.compile(rf"{_OPTIMIZER.pattern}|rng_state\b|rerun_state_machine_state\b|common_state/")


@dataclass(frozen=True)
class StateMapping(ParamMapping):
    """Parameter's slice of an optimizer tensor, whose key is `prefix` and the parameter's key."""

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
    """Optimizer state to be resharded with the weights."""

    reader: ChunkedReader
    slices: list[tuple[str, tuple[int, ...], StateMapping]]  # stored key, index on the stacked axes, new slice
    dtypes: dict[str, torch.dtype]  # by StateMapping.megatron_key
    vocab: int  # rows of the vocabulary without padding
    common: bytes  # the unsharded state
    common_is_object: bool  # an object of the distributed checkpoint, else common.pt

    @property
    def params(self) -> list[StateMapping]:
        return [param for _, _, param in self.slices]

    @property
    def note(self) -> str:
        """Line of the conversion report."""
        kinds = dict.fromkeys(param.prefix.rstrip(".").rpartition(".")[2] for param in self.params)
        return f"optimizer state ({', '.join(kinds)}) is converted, states of random number generators are not"

    def transfer(self, write: Callable[[ParamMapping, Bands], None], workers: int | None) -> None:
        """Read every slice and pass it to `write`. Padding rows of the vocabulary are zeros."""

        def move(key: str, stack: tuple[int, ...], param: StateMapping) -> None:
            slice_ = torch.zeros(param.megatron_shape, dtype=self.dtypes[param.megatron_key])
            own = slice_[: self.vocab] if isinstance(param.rule, Vocabulary) else slice_
            self.reader.read_into(key, stack, own)
            write(param, tensor_bands(slice_))

        tasks = [
            (prod(param.megatron_shape) * self.dtypes[param.megatron_key].itemsize, partial(move, key, stack, param))
            for key, stack, param in self.slices
        ]
        run_tasks(tasks, worker_count(workers))


def is_training_state(key: str) -> bool:
    """True for a stored key of a run's training state, such as the optimizer's or the random number generators'."""
    return _TRAINING_STATE.match(key) is not None


def is_optimizer_key(key: str) -> bool:
    """True for a stored key of optimizer state or averaged weights."""
    return _OPTIMIZER.match(key) is not None


def stored_keys(param: ParamMapping) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    """Keys that a parameter may be stored under, and the stacked axes of each: all layers in one tensor, one tensor
    per layer, or one per layer and expert."""
    of_layer = param.rule.megatron.replace("{expert}.", "").replace("{layer}", str(param.layer))
    found = {param.megatron_name: (), of_layer: param.stack[1:], param.megatron_key: param.stack}
    return list(reversed(found.items()))


def find_optimizer_state(
    reader: ChunkedReader, where: str, params: Sequence[ParamMapping], padded: Sequence[ParamMapping]
) -> OptimizerState:
    """Find the optimizer state of a torch_dist checkpoint of `params`, to be written for the parameters `padded`.

    Raises:
        CheckpointError: a state tensor does not have its parameter's shape, so it cannot be resharded.
    """
    contents = reader.contents
    found = [key for key in (*contents.tensors, *contents.objects) if is_optimizer_key(key)]
    prefixes = sorted({match[1] for key in contents.tensors if (match := _STATE.fullmatch(key))})
    slices, used, dtypes = [], set(), {}
    both = [
        two for pair in zip(params, padded, strict=True) for two in zip(*(one.pieces for one in pair), strict=True)
    ]
    for prefix in prefixes:
        for param, wide in both:
            for key, stack in stored_keys(param):
                if prefix + key not in contents.tensors:
                    continue
                if reader.tensor(prefix + key).shape != reader.tensor(_weight_key(reader, param)).shape:
                    continue
                reader.check_tiled(prefix + key)
                target = StateMapping(wide.rule, wide.dims, wide.layer, wide.expert, prefix)
                dtypes[target.megatron_key] = reader.dtype(prefix + key)
                slices.append((prefix + key, tuple(index for index, _ in stack), target))
                used.add(prefix + key)
                break
    odd = [key for key in found if key not in used]
    if odd:
        raise CheckpointError(
            where,
            f"{first_of(odd)} does not have a parameter's shape, so it cannot be resharded: save with Megatron-LM's "
            "dist_ckpt_optim_fully_reshardable, or omit the optimizer state with `weights_only`",
        )
    common, vocab = reader.folder / "common.pt", params[0].dims.vocab
    if common.is_file():
        return OptimizerState(reader, slices, dtypes, vocab, common.read_bytes(), common_is_object=False)
    place = contents.objects[COMMON_STATE]
    with (reader.folder / place.file).open("rb") as stream:
        stream.seek(place.offset)
        return OptimizerState(reader, slices, dtypes, vocab, stream.read(place.length), common_is_object=True)


def _weight_key(reader: ChunkedReader, param: ParamMapping) -> str:
    keys = (key for key, _ in stored_keys(param))
    return next((key for key in keys if key in reader.contents.tensors), param.megatron_key)
