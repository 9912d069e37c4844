"""One of two processes that train a small network in megatron-core's own FSDP, on CPU, or of four, two instances of
two: what the optimizer gets as gradients against one process's. CUDA's streams are stood in for by one that does
everything at once."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from benchmarks.layouts.host_transport import NAME, register
from dlm_bridge.parallel.mcore_compat import IS_0_16
from dlm_bridge.train.config import TrainConfig
from tests.processes import work

MICRO = 3


class Stream:
    """A stream, and an event on it."""

    def wait_stream(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> Stream:
        return self

    def wait(self, *_: Any) -> None:
        pass


def stand_in() -> None:
    nothing: dict[str, Any] = {
        "Stream": lambda *_, **__: Stream(),
        "current_stream": lambda *_: Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
    }
    for name, function in nothing.items():
        setattr(torch.cuda, name, function)
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    if dist.get_world_size() == 4:
        for strategy in ("optim_grads", "optim_grads_params"):
            yield f"{strategy}: two instances", partial(gradients, strategy, None, True, instances=2)
        equal = not IS_0_16  # which 0.16 does wrong: it is refused
        yield "optim: two instances", partial(gradients, "optim", None, equal, instances=2)
        yield "where shards lie", shards_lie_where_they_are_said_to
        return
    for strategy in ("optim", "optim_grads"):
        yield f"{strategy}: as the engine asks for it", partial(gradients, strategy, None, True)
    yield "optim: overlapped, which 0.16 does wrong", partial(gradients, "optim", True, not IS_0_16)
    yield "optim_grads: several buckets", partial(gradients, "optim_grads", None, True, bucket_size=16)
    for strategy in ("optim", "optim_grads"):
        yield f"{strategy}: experts of one rank each", partial(gradients, strategy, None, True, experts=True)
    yield (
        "optim_grads: such experts unpatched, which 0.16 does wrong",
        partial(gradients, "optim_grads", None, not IS_0_16, experts=True, patched=False),
    )


def shards_lie_where_they_are_said_to() -> None:
    """`locate_shards` of tensors that are cut over two dimensions of ranks, unevenly, against megatron-core's own."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

    from dlm_bridge.parallel.mcore_patches.fsdp import locate_shards

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_cp", "tp"))
    mesh._shard_order = [1, 0]  # as it sets it, of tensors that are cut along one dimension twice
    data, tensor = mesh.get_coordinate() or (0, 0)
    rows = (3, 2) if data == 0 else (1, 2)  # by tensor parallel rank: 4 of each
    tensors = [
        DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))
        for local, placements, shape in (
            (torch.empty(rows[tensor], 5), (Shard(0), Shard(0)), (8, 5)),
            (torch.empty(rows[tensor], 5), (Shard(0), Shard(1)), (4, 10)),
            (torch.empty(7 * data, 5), (Shard(0), Replicate()), (7, 5)),
        )
    ]
    assert locate_shards(tensors) == [gather_and_compute_chunk_metadata(each) for each in tensors]
    with pytest.raises(AssertionError):
        locate_shards(
            [
                DTensor.from_local(
                    tensors[2].to_local(), mesh, tensors[2].placements, shape=torch.Size((8, 5)), stride=(5, 1)
                )
            ]
        )


def gradients(
    strategy: str,
    overlapped: bool | None,
    equal: bool,
    experts: bool = False,
    patched: bool = True,
    instances: int = 1,
    bucket_size: int | None = None,
) -> None:
    """`experts`: the last layer is each rank's own, of which no other has any. `bucket_size`: elements, not the
    engine's."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
    from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import FSDPDistributedIndex

    from dlm_bridge.parallel.mcore_patches.fsdp import is_sharded, patch_unshared_gradients, whole
    from dlm_bridge.parallel.train.mcore_config import data_parallel_config

    rank = dist.get_rank()
    torch.manual_seed(0)
    last = nn.Sequential(OrderedDict(experts=nn.Sequential(nn.Linear(6, 4))))  # known by its name
    alone = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), last)
    rows = torch.randn(dist.get_world_size(), MICRO, 5, 8)
    config = data_parallel_config(
        TrainConfig.from_flags(
            task="pretrain", model="model", data=["data"], output="run", engine="megatron", steps=1, fsdp=strategy
        )
    )
    config.num_distributed_optimizer_instances = instances
    config.bucket_size = bucket_size or config.bucket_size
    if overlapped is not None:
        config.overlap_grad_reduce = overlapped
    own = [dist.new_group([other]) for other in range(dist.get_world_size())][rank]
    if instances == 1:
        pair = dist.new_group([0, 1])
        mesh = DeviceMesh.from_group([pair, own], "cpu", mesh=[[0], [1]], mesh_dim_names=("dp_cp", "tp"))
        own_mesh = DeviceMesh.from_group([own, own], "cpu", mesh=[[rank]], mesh_dim_names=("dp_cp", "tp"))
        index = FSDPDistributedIndex(
            mesh, dp_shard_dim="dp_cp", tp_dim="tp", expt_device_mesh=own_mesh if experts else mesh
        )
    else:
        inside = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        between = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
        names = ("outer_fsdp_dp", "dp_cp", "tp")
        mesh = DeviceMesh.from_group(
            [between, inside, own], "cpu", mesh=[[[0], [1]], [[2], [3]]], mesh_dim_names=names
        )
        index = FSDPDistributedIndex(
            mesh,
            dp_shard_dim="dp_cp",
            dp_outer_dim="outer_fsdp_dp",
            tp_dim="tp",
            hybrid_fsdp_group=dist.group.WORLD,
            expt_device_mesh=mesh,
            **({} if IS_0_16 else {"hybrid_fsdp_expt_group": dist.group.WORLD}),
        )
    device = torch.device("cpu")
    units = [nn.Linear] if strategy == "optim_grads_params" else []
    sharded = MegatronFSDP(
        deepcopy(alone), index, config, fsdp_unit_modules=units, device=device, calculate_per_token_loss=True
    )
    assert len(sharded.param_and_grad_buffer.parameter_groups) >= (4 if bucket_size else 1)  # buckets
    if patched:
        patch_unshared_gradients(sharded)
    for (name, parameter), stored in zip(
        sharded.param_and_grad_buffer.optimizer_named_parameters, alone.parameters(), strict=True
    ):
        assert is_sharded(parameter)
        assert torch.equal(whole(parameter), stored), name
    farthest = 0.0
    for _ in range(2):
        sharded.zero_grad_buffer()
        with sharded.no_sync() if config.overlap_grad_reduce else contextlib.nullcontext():
            for part in rows[rank, :-1]:
                sharded(part).square().sum().backward()
        sharded(rows[rank, -1]).square().sum().backward()
        sharded.finish_grad_sync()
        wanted = _gradients(alone, rows)
        if experts:
            wanted |= {name: one for name, one in _gradients(alone, rows[rank]).items() if name.startswith("2.")}
        for name, parameter in sharded.param_and_grad_buffer.optimizer_named_parameters:
            gradient = wanted[name.removeprefix("module.")]
            mine = gradient.flatten()[getattr(parameter, "megatron_fsdp_slice", slice(None))]
            if len(mine):
                apart = parameter.grad._local_tensor.flatten() - mine
                farthest = max(farthest, float(apart.abs().max() / gradient.abs().max()))
    assert (farthest < 1e-5) == equal, farthest


def _gradients(network: nn.Module, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    network.zero_grad()
    network(rows.flatten(0, -2)).square().sum().backward()
    return {name: one.grad.clone() for name, one in network.named_parameters() if one.grad is not None}


if __name__ == "__main__":
    stand_in()
    register()
    dist.init_process_group(NAME)
    work(Path(sys.argv[1]), checks())
