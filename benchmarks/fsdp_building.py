r"""Memory of a GPU while FSDP builds a model, with random weights, and in two steps, beside the plan's.

    python benchmarks/fsdp_building.py --model configs/llada-8b --layers 24
    python benchmarks/fsdp_building.py --model configs/llada-8b --instances 2 --gpus 4
    python benchmarks/fsdp_building.py --model configs/llada2-mini-16b-a1.4b --strategies fsdp2

Strategies are Megatron FSDP's, and fsdp2: the Accelerate engine. Each is a run of its own under torchrun, with lines
for it as soon as they are known: GiB allocated at the peak of building, as planned, and at the peak of two steps. One
that runs out of memory, or takes longer than --limit, says so, and the next one runs. Weights are a block of random
numbers over and over, which a CPU has made in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import end_after, launch
from rich.console import Console

from dlm_bridge.convert.checkpoints import in_memory
from dlm_bridge.models.initialisation import Constant
from dlm_bridge.plan.dry_run import memory_of
from dlm_bridge.plan.run import run_of
from dlm_bridge.train.config import TrainConfig

GIB = 2**30
STRATEGIES = ("optim_grads_params", "optim_grads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a config.json")
    parser.add_argument("--layers", type=int, help="fewer layers than it has")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--strategies", nargs="+", choices=("optim", "fsdp2", *STRATEGIES), default=STRATEGIES)
    parser.add_argument("--limit", type=float, default=150, help="seconds for a strategy (%(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # one of torchrun's processes
    options = parser.parse_args()
    if options.worker:
        end_after(options.limit)
        measure(options)
        return
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_config(options.model, options.layers, folder / "model")
        for strategy in options.strategies:
            words = ["--worker", "--model", str(model), "--strategies", strategy, "--limit", str(options.limit)]
            for option in ("tp", "instances", "seq-length"):
                words += [f"--{option}", str(getattr(options, option.replace("-", "_")))]
            log = folder / f"{strategy}.log"
            error = launch(__file__, options.gpus, words, options.limit, log, shows_output=True)
            if error is not None:
                failed = True
                print(f"{strategy}: {error}", flush=True)
    sys.exit(failed)


def write_config(model: Path, layers: int | None, folder: Path) -> Path:
    config = json.loads((model / "config.json").read_text())
    if layers is not None:
        config["n_layers" if "n_layers" in config else "num_hidden_layers"] = layers
        if "moe_layer_freq" in config:
            config["moe_layer_freq"] = config["moe_layer_freq"][:layers]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(options: argparse.Namespace) -> None:
    """One process of a strategy's run."""
    from dlm_bridge.data.loader import Prefetcher

    (strategy,) = options.strategies
    own = {"engine": "megatron", "tp": options.tp, "fsdp": strategy, "optimizer_instances": options.instances}
    if strategy == "fsdp2":
        own = {"engine": "accelerate", "sharding": "fsdp"}
    config = TrainConfig.from_flags(
        model=str(options.model), data=["mock"], output=str(options.model.parent / strategy), from_scratch=True,
        precision="bf16", steps=2, seq_length=options.seq_length, micro_batch_size=1, global_batch_size=64, **own,
    )  # fmt: skip
    in_memory.initialise = repeated

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(f"{strategy}: {text}", flush=True)

    began = time.monotonic()
    with assembled(config) as trainer:
        objective = str(trainer.config.objective.objective)
        planned, _ = memory_of(config, run_of(config, objective, dist.get_world_size()), None)
        assert planned is not None
        plan = planned.peak
        say(
            f"building {_peak():.2f} GiB (plan {plan.building / GIB:.2f}) in {time.monotonic() - began:.0f} s, steps "
            f"planned {plan.allocated / GIB:.2f} GiB"
        )
        torch.cuda.reset_peak_memory_stats()
        with Prefetcher(trainer.produce, 1) as trainer.prefetcher:
            for step in (1, 2):
                metrics, _ = trainer.step(step, False)
                say(f"step {step}: loss {metrics.loss:.3f}")
        say(f"steps {_peak():.2f} GiB (plan {plan.allocated / GIB:.2f})")
    dist.destroy_process_group()


@contextlib.contextmanager
def assembled(config: TrainConfig) -> Iterator[Any]:
    """The engine's trainer, as a run has it before its first step; memory is counted from here on."""
    console = Console(quiet=True)
    if config.engine.engine == "accelerate":
        from dlm_bridge.train.accelerate import fsdp
        from dlm_bridge.train.accelerate import trainer as engine
        from dlm_bridge.train.setup import RunStart

        config = fsdp.with_launcher_settings(config)
        accelerator = engine.build_accelerator(config)
        torch.cuda.reset_peak_memory_stats()
        with engine.assembled(config, accelerator, RunStart(Path(), 0, None, None), console) as trainer:
            yield trainer
        return
    from dlm_bridge.parallel.train.assembly import assemble, initialize_parallel

    initialize_parallel(config)
    torch.cuda.reset_peak_memory_stats()
    trainer = assemble(config, console)
    try:
        yield trainer
    finally:
        trainer.close()


def repeated(name: str, shape: tuple[int, ...], distribution: Any, seed: int) -> torch.Tensor:
    if isinstance(distribution, Constant):
        return torch.full(shape, distribution.value)
    count, block = torch.Size(shape).numel(), _block()
    return (block.repeat(-(-count // len(block)))[:count] * distribution.std).view(shape)


@functools.cache
def _block() -> torch.Tensor:
    return torch.randn(2**20, generator=torch.Generator().manual_seed(0))


def _peak() -> float:
    """GiB of the fullest GPU."""
    most: Any = torch.tensor(torch.cuda.max_memory_allocated(), dtype=torch.float64, device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most) / GIB


if __name__ == "__main__":
    main()
