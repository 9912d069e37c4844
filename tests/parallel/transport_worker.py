"""One of the processes of the proof that collectives through the host are gloo's and NCCL's: each against what it must
give, in every dtype that travels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from benchmarks.layouts.host_transport import NAME, register
from tests.processes import work

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64)


def checks() -> Iterator[tuple[str, Callable[[], None]]]:
    yield from (
        ("sums", sums),
        ("gathers", gathers),
        ("scattered sums", scattered_sums),
        ("deals", deals),
        ("a ring", ring),
        ("objects", objects),
        ("a mesh of groups", mesh),
        ("a group of some, closed", some),
        ("replicas of a module", replicas),
    )


def _of(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32) * 0.5 + rank
    return numbers.to(dtype).view(shape)


def sums() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        every = [_of(other, dtype, 3, 2) for other in range(world)]
        for op, wanted in (
            (dist.ReduceOp.SUM, torch.stack(every).double().sum(0).to(dtype)),
            (dist.ReduceOp.MAX, every[-1]),
        ):
            found = _of(rank, dtype, 3, 2)
            dist.all_reduce(found, op)
            assert torch.equal(found, wanted), (dtype, op)
    columns = _of(rank, torch.float32, 4, 4)[:, ::2]
    dist.all_reduce(columns, dist.ReduceOp.AVG, async_op=True).wait()
    assert torch.equal(columns, sum(_of(other, torch.float32, 4, 4)[:, ::2] for other in range(world)) / world)


def replicas() -> None:
    """DistributedDataParallel, which asks for futures: every rank has the mean of all gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2, bias=False))
    module(_of(rank, torch.float32, 4, 3)).sum().backward()
    wanted = sum(_of(other, torch.float32, 4, 3).sum(0) for other in range(world)) / world
    torch.testing.assert_close(module.module.weight.grad, torch.stack([wanted, wanted]))


def gathers() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        every = [_of(other, dtype, 2, 3) for other in range(world)]
        found = torch.empty(2 * world, 3, dtype=dtype)
        dist.all_gather_into_tensor(found, every[rank])
        assert torch.equal(found.view(torch.uint8), torch.cat(every).view(torch.uint8)), dtype
        parts = [torch.empty_like(every[0]) for _ in range(world)]
        dist.all_gather(parts, every[rank])
        assert torch.equal(torch.cat(parts).view(torch.uint8), torch.cat(every).view(torch.uint8)), dtype
        sent = every[rank].clone()
        dist.broadcast(sent, src=1)
        assert torch.equal(sent.view(torch.uint8), every[1].view(torch.uint8)), dtype


def scattered_sums() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.stack([_of(other, dtype, world, 3) for other in range(world)]).float().sum(0).to(dtype)
        found = torch.empty(3, dtype=dtype)
        dist.reduce_scatter_tensor(found, _of(rank, dtype, world, 3).flatten())
        assert torch.equal(found, whole[rank]), dtype
        both = [torch.empty(3, dtype=dtype), torch.empty(3, dtype=dtype)]
        with dist.distributed_c10d._coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
            for output in both:
                dist.reduce_scatter_tensor(output, _of(rank, dtype, world, 3).flatten(), async_op=True)
        manager.wait()
        assert all(torch.equal(output, whole[rank]) for output in both), dtype


def deals() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    counts = [[(first + second) % 3 for second in range(world)] for first in range(world)]  # from, to
    sent = torch.full((sum(counts[rank]), 2), float(rank), dtype=torch.bfloat16, requires_grad=True)
    to_me = [counts[other][rank] for other in range(world)]
    found = torch.empty(sum(to_me), 2, dtype=torch.bfloat16, requires_grad=True)
    dist.all_to_all_single(found, sent, to_me, counts[rank])
    wanted = torch.cat([torch.full((count, 2), float(other)) for other, count in enumerate(to_me)])
    assert torch.equal(found.float(), wanted)
    even = torch.arange(world) * 10 + rank
    dealt = torch.empty_like(even)
    dist.all_to_all_single(dealt, even, async_op=True).wait()
    assert dealt.tolist() == [rank * 10 + other for other in range(world)]


def ring() -> None:
    """All send before any receives."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = torch.empty(50_000, dtype=torch.bfloat16, requires_grad=True)
    sent = torch.full_like(found, rank)
    operations = [
        dist.P2POp(dist.isend, sent, (rank + 1) % world),
        dist.P2POp(dist.irecv, found, (rank - 1) % world),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    assert torch.equal(found, torch.full_like(found, (rank - 1) % world))


def objects() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    found = [None] * world
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": other} for other in range(world)]
    said = ["first" if rank == 0 else None]
    dist.broadcast_object_list(said)
    assert said == ["first"]


def mesh() -> None:
    """As Megatron FSDP makes one, of groups that are there."""
    world = dist.get_world_size()
    alone = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
    ranks = [[rank] for rank in range(world)]
    found = DeviceMesh.from_group([dist.group.WORLD, alone], "cpu", mesh=ranks, mesh_dim_names=("dp", "tp"))
    rows = DTensor.from_local(torch.full((2, 3), float(dist.get_rank())), found["dp"], [Shard(0)])
    assert rows.full_tensor()[::2, 0].tolist() == list(range(world))
    assert rows.device_mesh.get_group().size() == world


def some() -> None:
    world = dist.get_world_size()
    group = dist.new_group(list(range(1, world)))
    if dist.get_rank() > 0:
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value.item() == world - 1
    dist.barrier()
    if dist.get_rank() > 0:
        dist.destroy_process_group(group)


if __name__ == "__main__":
    register()
    dist.init_process_group(NAME, timeout=timedelta(minutes=2))
    work(Path(sys.argv[1]), checks())
