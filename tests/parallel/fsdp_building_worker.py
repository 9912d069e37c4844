"""One of two processes that build models on CPU and cut them by megatron-core's own FSDP, a layer at a time: each gets
its rows of what the checkpoint holds, and never has the memory of all layers. CUDA is stood in for as in
`fsdp_reduction_worker`. Each reads the bytes of its rows.

python -m tests.parallel.fsdp_building_worker FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.layouts.host_transport import NAME, register
from dlm_bridge import Bridge, Layout
from dlm_bridge.parallel.weights import stored_dtype
from dlm_bridge.train.config import TrainConfig
from tests.parallel.fsdp_reduction_worker import stand_in
from tests.parallel.megatron_cases import Files
from tests.processes import work
from tests.train.sharding_worker import CountedReads

SUBJECTS = ("masked", "masked-moe", "latent")


def checks(files: Files) -> Iterator[tuple[str, Callable[[], None]]]:
    for subject in SUBJECTS:
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{subject} {dtype}", partial(builds_layer_by_layer, files.hub(subject), dtype)


def builds_layer_by_layer(folder: Path, dtype: torch.dtype) -> None:
    from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata
    from megatron.core.distributed.fsdp.src.megatron_fsdp.utils import FSDPDistributedIndex

    from dlm_bridge.parallel.core import TransformerLayer
    from dlm_bridge.parallel.mcore_patches.fsdp import filled_when_sharded, located_at_once, whole
    from dlm_bridge.parallel.parallelize import build_megatron_model
    from dlm_bridge.parallel.train.mcore_config import data_parallel_config

    source = Bridge.from_hf(folder).checkpoint
    (plain,) = build_megatron_model(source, Layout(), dtype)
    (model,) = build_megatron_model(source, Layout(), dtype, unallocated=True)
    assert model.absent is not None
    layers = [parameter for layer in model.decoder.layers for parameter in layer.parameters()]
    routers = [layer.mlp.router.weight for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
    whole_size, small = sum(map(_size, layers)), _nbytes(routers)  # which are loaded at once, in a dtype of their own
    assert _nbytes(layers) == small < whole_size / 4
    largest = max(sum(map(_size, layer.parameters())) for layer in model.decoder.layers)

    held, cut = [], dict[torch.Tensor, tuple[int, int]]()
    absent = model.absent
    late = list(absent.loads)
    assert {*late, *routers} == set(model.parameters())

    def fill(ranges: Mapping[torch.Tensor, tuple[int, int]]) -> None:
        absent.fill(ranges)
        cut.update({each: found for each, found in ranges.items() if each not in cut})
        held.append(_nbytes(layers))

    config = data_parallel_config(
        TrainConfig.from_flags(
            task="pretrain",
            model="model",
            data=["data"],
            output="run",
            engine="megatron",
            steps=1,
            fsdp="optim_grads_params",
        )
    )
    own = [dist.new_group([other]) for other in (0, 1)][dist.get_rank()]
    mesh = DeviceMesh.from_group([dist.group.WORLD, own], "cpu", mesh=[[0], [1]], mesh_dim_names=("dp_cp", "tp"))
    index = FSDPDistributedIndex(mesh, dp_shard_dim="dp_cp", tp_dim="tp", expt_device_mesh=mesh)
    gather, exchanges = dist.all_gather_object, list[int]()

    def counted(objects: list[Any], own: Any, group: Any = None) -> None:
        exchanges.append(len(own))
        gather(objects, own, group)

    with (
        CountedReads() as read,
        located_at_once(),
        filled_when_sharded(fill),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(torch.cuda, "current_device", lambda: 0)  # not the CPU platform's
        patch.setattr(dist, "all_gather_object", counted)
        sharded = MegatronFSDP(
            model,
            index,
            config,
            fsdp_unit_modules=[TransformerLayer],
            device=torch.device("cpu"),
            calculate_per_token_loss=True,
        )
    assert not absent.loads
    own = sum(cut[each][1] - cut[each][0] for each in late)
    assert own < 0.6 * sum(each.numel() for each in late)
    assert read.nbytes == own * stored_dtype(source).itemsize
    assert max(held) <= 2 * largest + small < whole_size, (held, largest)
    wanted = dict(plain.named_parameters())
    for name, parameter in sharded.param_and_grad_buffer.optimizer_named_parameters:
        value = wanted.pop(name.removeprefix("module."))
        assert torch.equal(whole(parameter).to(value.dtype), value), name
    for name, shard in sharded.param_and_grad_buffer.dist_main_weight.items():
        (located,) = shard._local_tensor.__create_chunk_list__()
        assert located == gather_and_compute_chunk_metadata(shard), name
    assert not wanted
    assert sum(exchanges) == len(sharded.param_and_grad_buffer.dist_main_weight)
    assert len(exchanges) <= 2  # experts have a group of their own


def _size(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _nbytes(parameters: Sequence[torch.Tensor]) -> int:
    """The memory that these parameters have, FSDP's buffers included, each storage once."""
    storages: dict[int, Any] = {each._cdata: each for each in (one.untyped_storage() for one in parameters)}
    return sum(storage.nbytes() for storage in storages.values())


if __name__ == "__main__":
    os.environ["DLM_BRIDGE_PLATFORM"] = "cpu"
    stand_in()
    register()
    dist.init_process_group(NAME)
    work(Path(sys.argv[1]), checks(Files(Path(sys.argv[1]))))
