"""One process: megatron-core saves a distributed optimizer's state, `reshard` cuts it, megatron-core loads it again.

python -m tests.interop.optimizer_worker FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

For each of CASES a model takes one step of Adam and is saved in the fully_reshardable form. It is cut for another
layout and back; what megatron-core loads of the three must be the same, bit for bit.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge import Bridge, Layout
from tests.interop.cases import models
from tests.processes import work

# Model of tests.interop.cases -> the layout that it is cut for in between.
CASES: dict[str, Layout] = {"gqa": Layout(tp=2, pp=2), "rnd1": Layout(tp=2, ep=2)}
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    work(folder, ((name, partial(check, folder / name, name)) for name in CASES))
    dist.destroy_process_group()


def check(root: Path, name: str) -> None:
    from megatron.core import dist_checkpointing

    models()[name].write(root / "hub")
    model, optimizer = _trained(Bridge.from_hf(root / "hub", family=models()[name].family))
    iteration = root / "run" / "iter_0000001"
    iteration.mkdir(parents=True)
    state = _state(model, optimizer, is_loading=False)
    dist_checkpointing.save(state, str(iteration), content_metadata=METADATA)
    (root / "run" / "latest_checkpointed_iteration.txt").write_text("1")
    Bridge.from_megatron(root / "run", like=root / "hub").to_megatron(root / "cut", CASES[name])
    Bridge.from_megatron(root / "cut").to_megatron(root / "back", Layout())
    found = []
    for place in ("run", "cut", "back"):
        wanted = _state(model, optimizer, is_loading=True)
        found.append(_leaves(dist_checkpointing.load(wanted, str(root / place / "iter_0000001"))))
    saved, cut, back = found
    assert len([value for value in saved.values() if isinstance(value, torch.Tensor)]) > 40
    for other in (cut, back):
        assert other.keys() == saved.keys()
        for key, value in saved.items():
            same = torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
            assert same or key.endswith("_extra_state"), f"{name}: {key}"


def _trained(bridge: Bridge) -> tuple[Any, Any]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    (chunk,) = bridge.build_megatron_model(Layout())
    model = DistributedDataParallel(chunk.config, DistributedDataParallelConfig(use_distributed_optimizer=True), chunk)
    config = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(config, [model])
    model.zero_grad_buffer()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step()
    return model.module, optimizer


def _state(model: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    state = {"model": model.sharded_state_dict(metadata=METADATA), "iteration": 1, "checkpoint_version": 3.0}
    sharded = {"model": model.sharded_state_dict(metadata=METADATA)}
    state["optimizer"] = optimizer.sharded_state_dict(sharded, is_loading=is_loading, metadata=METADATA)
    return state


def _leaves(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for part, item in items for key, leaf in _leaves(item, f"{name}.{part}").items()}
    return {name: value}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
