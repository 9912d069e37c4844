r"""Memory of a GPU while Megatron FSDP builds a model, with random weights, and in two steps, beside the plan's.

    torchrun --nproc-per-node 2 benchmarks/fsdp_building.py --model configs/llada-8b
    torchrun --nproc-per-node 4 benchmarks/fsdp_building.py --model configs/llada-8b --instances 2

Each process draws the weights of its tensor parallel share on its CPU, which takes minutes for billions of parameters.
The lines are of each strategy: GiB allocated at the peak of building, as planned, and at the peak of two steps.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from dlm_bridge.parallel import groups
from dlm_bridge.plan.memory import memory_plan
from dlm_bridge.plan.model import open_model
from dlm_bridge.plan.run import run_of
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.data.loader import Prefetcher
from dlm_bridge.train.megatron.engine import assemble, initialize_parallel

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--strategies", nargs="+", default=["optim_grads", "optim_grads_params"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for strategy in options.strategies:
            measure(options, strategy, Path(folder) / strategy)
    dist.destroy_process_group()


def measure(options: argparse.Namespace, strategy: str, output: Path) -> None:
    config = TrainConfig.from_flags(
        model=str(options.model), data=["mock"], output=str(output), engine="megatron", from_scratch=True,
        precision="bf16", tp=options.tp, fsdp=strategy, optimizer_instances=options.instances, steps=2,
        seq_length=options.seq_length, micro_batch_size=1, global_batch_size=64,
    )  # fmt: skip
    initialize_parallel(config)
    torch.cuda.reset_peak_memory_stats()
    trainer = assemble(config, Console(quiet=True))
    built = _peak()
    torch.cuda.reset_peak_memory_stats()
    trainer.prefetcher = Prefetcher(trainer.produce, 1)
    try:
        for step in (1, 2):
            trainer.step(step, False)
    finally:
        trainer.close()
    stepped, objective = _peak(), str(trainer.config.objective.name)
    if dist.get_rank() == 0:
        plan = memory_plan(open_model(str(options.model)), run_of(config, objective, dist.get_world_size())).peak
        print(
            f"{strategy}: building {built:.2f} GiB (plan {plan.building / GIB:.2f}), steps {stepped:.2f} GiB "
            f"(plan {plan.allocated / GIB:.2f})",
            flush=True,
        )
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    groups.destroy()


def _peak() -> float:
    """GiB of the fullest GPU."""
    most: Any = torch.tensor(torch.cuda.max_memory_allocated(), dtype=torch.float64, device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most) / GIB


if __name__ == "__main__":
    main()
