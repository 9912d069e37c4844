"""One process: the installed megatron-core reads both forms of a torch_dist checkpoint, and writes its own.

python -m tests.interop.forms_worker FOLDER FORM...      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

The FORMs are those that the core reads. Each check uses megatron-core's own functions, without this package's patches.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.checkpoints import find_checkpoint
from tests.checkpoints import write_llada
from tests.convert.helpers import dcp_tensors, hub_tensors, same
from tests.processes import work

ITERATION = "iter_0000007"
COMMON = {
    "iteration": 7,
    "args": argparse.Namespace(tensor_model_parallel_size=1, names=["a", "b"]),
    "optimizer": {"optimizer": {"param_groups": [{"lr": 0.1, "step": torch.tensor(7.0)}]}},
}


def main(root: Path, *forms: str) -> None:
    torch.set_num_threads(1)
    write_llada(root / "hub", dtype=torch.bfloat16)
    dist.init_process_group("gloo")
    checks = [("written", partial(written, root, forms)), *((form, partial(imported, root, form)) for form in forms)]
    with (  # without a GPU
        patch("torch.cuda.synchronize"),
        patch("torch.cuda.current_device", return_value=torch.device("cpu")),
    ):
        work(root, checks)
    dist.destroy_process_group()


def imported(root: Path, form: str) -> None:
    """The core loads what `import` writes in a form."""
    Bridge.from_hf(root / "hub").to_megatron(root / form, Layout(tp=2, pp=2), mcore=form)
    folder = root / form / "iter_0000000"
    assert (folder / "common.pt").is_file() == (form == "0.16")
    loaded = load(folder)
    assert loaded["iteration"] == 0
    assert_tensors(loaded, dcp_tensors(folder))


def written(root: Path, forms: tuple[str, ...]) -> None:
    """What the core saves is exported and resharded to each form, of which the core loads the same again."""
    from megatron.core import dist_checkpointing

    Bridge.from_hf(root / "hub").to_megatron(root / "model", Layout())
    tensors = dcp_tensors(root / "model" / "iter_0000000")
    tensors |= {f"optimizer.state.exp_avg.{key}": tensor.float() * 2 for key, tensor in tensors.items()}
    folder = root / "core" / ITERATION
    folder.mkdir(parents=True)
    dist_checkpointing.save({**sharded(tensors), **COMMON}, str(folder))
    (root / "core" / "latest_checkpointed_iteration.txt").write_text("7")
    assert find_checkpoint(root / "core").step == 7
    bridge = Bridge.from_megatron(root / "core", like=root / "hub")
    bridge.to_hf(root / "exported")
    source, exported = hub_tensors(root / "hub"), hub_tensors(root / "exported")
    assert source.keys() == exported.keys()
    assert all(same(tensor, exported[name]) for name, tensor in source.items())
    for form in forms:
        bridge.to_megatron(root / f"cut_{form}", Layout(tp=2), mcore=form)
        loaded = load(root / f"cut_{form}" / ITERATION)
        assert_tensors(loaded, tensors)
        assert {key: loaded[key] for key in COMMON} == COMMON


def sharded(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}


def load(folder: Path) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    wanted = {key: torch.empty_like(tensor) for key, tensor in dcp_tensors(folder).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded: dict[str, Any] = dist_checkpointing.load(sharded(wanted), str(folder))
    return loaded


def assert_tensors(loaded: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        assert same(loaded[key], tensor), key


if __name__ == "__main__":
    import sys

    main(Path(sys.argv[1]), *sys.argv[2:])
