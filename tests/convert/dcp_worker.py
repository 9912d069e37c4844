"""One of two gloo processes that save distributed checkpoints of DTensors, as FSDP2 and Megatron FSDP do.

python -m tests.convert.dcp_worker FOLDER     with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

FOLDER/states has torch.save files, each a nested dict; every tensor in it is sharded over both processes on its first
axis (unevenly where two does not divide it), everything else is saved as it is.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.processes import work


def save(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def sharded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: sharded(item) for key, item in value.items()}
        return distribute_tensor(value, mesh, [Shard(0)]) if isinstance(value, torch.Tensor) else value

    for path in sorted((folder / "states").iterdir()):
        dcp.save(sharded(torch.load(path, weights_only=False)), checkpoint_id=folder / path.stem)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    root = Path(sys.argv[1])
    work(root, [("saved", partial(save, root))])
    dist.destroy_process_group()
