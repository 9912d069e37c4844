"""Every layout of the Megatron engine against one process: the loss and every weight after one step of the engine.

    torchrun --max-restarts 20 --nproc-per-node 4 benchmarks/layouts/one_step.py --output layouts
    python benchmarks/layouts/one_step.py --smoke --output smoke

The first writes layouts.json and layouts.md, the second what one GPU alone can show of Transformer Engine.

Each process first trains some of the references alone, on its own device. Then all of them take the same global batch
through each layout. The step is Adam's with an epsilon so large that it moves every weight by a constant times its
gradient, and so far that the weight is nothing but that; the weights are compared under their Hub names. So every
gradient goes through the layout's own reduction, sharding and optimizer. A cell that fails, hangs or takes its process
down is written as such; after the latter torchrun starts the processes again and they go on with the next cell.

Where Transformer Engine's kernels take half precision only, the references are two: the same step of one process, and
the same again in fp32 on weights that are rounded alike, its documents told apart by masks. Half precision has a
distance from fp32 of its own, on one process as on several: a layout is equal where it is no farther from it.

Four ranks on one GPU, whose messages go through the host (which NCCL has no part in; the arithmetic is the same):
    torchrun --max-restarts 20 --nproc-per-node 4 benchmarks/layouts/one_step.py --output layouts --transport host

Without a GPU the same runs on gloo with smaller sizes:
    DLM_BRIDGE_PLATFORM=cpu torchrun --nproc-per-node 2 benchmarks/layouts/one_step.py --output /tmp/layouts
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # read when CUDA's libraries are loaded: fp32 is fp32
os.environ.setdefault("UB_SKIPMC", "1")  # userbuffers by CUDA IPC, also where a machine has no NVLink multicast
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.layouts import host_transport
from benchmarks.layouts.cells import BATCH, EXPERTS, MICRO, ON_CPU, ON_GPU, Cell, Layout, Task, model_config
from benchmarks.layouts.tables import PATIENCE_S, CellTable
from dlm_bridge.errors import DlmBridgeError, one_line
from tests.groups import make_way

RATE = 1e4  # how far a step moves a weight, in units of its gradient
LIMIT_S = 150  # of one cell, compilation included
# Of half precision: how much farther from fp32 than one process is, in the worst weight and in any.
FARTHER, ANYWHERE, ROUNDING = 1.5, 3.0, 2**-9
EXACT = "exact"  # a precision of references: half precision's model and weights, and fp32's arithmetic
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Tensors = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="writes OUTPUT.json and OUTPUT.md")
    parser.add_argument(
        "--cells",
        action="append",
        help="a regular expression on 'layout: task'; the first one's are run first",
    )
    parser.add_argument("--references", type=Path, help="where one process's results are kept for other runs")
    parser.add_argument(
        "--transport", choices=("direct", "host"), default="direct", help="how ranks talk; host: several share a GPU"
    )
    parser.add_argument("--seconds", type=float, default=540, help="cells that have not begun by then are not run")
    parser.add_argument("--smoke", action="store_true", help="one GPU: Transformer Engine's kernels against others")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        from benchmarks.layouts.smoke import smoke

        raise SystemExit(smoke(options.output, "|".join(options.cells or [""])))
    _run(options)


def _run(options: argparse.Namespace) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.transport == "host" and (devices := torch.cuda.device_count()):
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % devices)
    table = CellTable(options.output, world, options.cells or [""], options.transport)
    if rank == 0:
        table.begin()
    else:
        table.wait()
    work = options.output.with_name(options.output.name + ".work")
    bench = Bench(work, options.references or work, options.transport)
    torch.set_num_threads(1)
    bench.prepare(rank, world, table)
    ours = table.waiting()
    for layout, task, cell in ours:
        if time.time() - table.began() > options.seconds:
            break
        _cell(bench, table, layout, task, cell)
    if rank == 0:
        table.write()
        print(table.markdown(), flush=True)
        shutil.rmtree(work, ignore_errors=True)
    bench.leave()
    # Whatever a cell has left behind must not keep the process alive.
    sys.stdout.flush()
    os._exit(0)


def _cell(bench: Bench, table: CellTable, layout: Layout, task: Task, cell: Cell) -> None:
    """One cell on every process; rank 0 writes it down. Ends the process where another one does not answer."""
    first = dist.get_rank() == 0
    began = time.time()
    if first:
        table.started(cell)
    watch = threading.Timer(LIMIT_S, _stuck, [table, cell])
    watch.daemon = True
    watch.start()
    failed = ""
    try:
        bench.compare(layout, task, cell)
    except DlmBridgeError as error:
        cell.result, failed = "refused", one_line(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        cell.result = "error"
        failed = f"{type(error).__name__}: {one_line(error)[:300]} ({Path(where.filename).name}:{where.lineno})"
    everyone: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    try:
        bench.clean()
        dist.all_gather_object(everyone, (cell.result, failed), group=bench.answers)
    except Exception as error:  # another process hangs, or this one's device is lost
        table.died(cell, failed or f"{type(error).__name__}: {one_line(error)[:200]}")
        os._exit(1)
    watch.cancel()
    found = [(result, said) for result, said in everyone if said]
    if found:
        # An error on one rank says more than the refusals that it led to on others.
        cell.result, cell.said = sorted(found, key=lambda pair: pair[0] != "error")[0]
    cell.seconds = time.time() - began
    if first:
        table.add(cell)
        print(table.line(cell), flush=True)


def _stuck(table: CellTable, cell: Cell) -> None:
    table.died(cell, f"hung for {LIMIT_S} s")
    os._exit(1)


class Bench:
    """The engine's step in one layout after the other, on models and data in a folder that all processes share."""

    def __init__(self, root: Path, references: Path | None = None, transport: str = "direct") -> None:
        self.root, self.references, self.transport = root, references or root, transport
        self.answers: Any = None

    def prepare(self, rank: int, world: int, table: CellTable) -> None:
        """Models, data, and each process's share of the references, alone; then all processes join."""
        from dlm_bridge.parallel import groups

        self.begin()
        self.references.mkdir(parents=True, exist_ok=True)
        needed: dict[str, tuple[Task, str]] = {}
        for layout, task, cell in table.waiting():
            cell.precision = self.precision(layout, task)
            for precision in (cell.precision, EXACT) if cell.precision == "bf16" else (cell.precision,):
                needed[self._reference(task, precision).name] = (task, precision)
        alone = {name: os.environ.pop(name) for name in LAUNCHER}
        for number, (task, precision) in enumerate(needed.values()):
            if number % world == rank and not self._reference(task, precision).exists():
                self._train_alone(task, precision)
        if dist.is_initialized():
            groups.destroy()
            dist.destroy_process_group()
        os.environ.update(alone)
        self.join(rank, world)

    def begin(self) -> None:
        """This process's device, and the sizes that fit it."""
        from dlm_bridge.parallel import mcore_patches, platform

        mcore_patches.install(platform.current())
        self.root.mkdir(parents=True, exist_ok=True)
        self.on_cpu = platform.current().name == "cpu"
        torch._dynamo.config.recompile_limit = 256  # each layout has shapes of its own
        self.size = ON_CPU if self.on_cpu else ON_GPU

    def join(self, rank: int, world: int) -> None:
        """Bring all processes together, and into a group of their own for what they say of a cell."""
        from dlm_bridge.parallel import platform

        chosen = platform.current()
        # A store of this start's own: the launcher's still has the addresses of processes that died.
        attempt = f"{os.environ['MASTER_PORT']}_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        host_transport.register()
        through_host = self.transport == "host"
        dist.init_process_group(
            host_transport.NAME if through_host else chosen.backend,
            store=dist.FileStore(str(self.root / f"store_{attempt}"), world),
            rank=rank,
            world_size=world,
            device_id=None if through_host else chosen.group_device(),
            timeout=timedelta(minutes=10),
        )
        self.answers = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
        dist.barrier()

    def leave(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def precision(self, layout: Layout, task: Task) -> str:
        """Transformer Engine's kernels for packed rows and for context parallelism take half precision only, and so do
        userbuffers and megatron-core's schedule of two micro-batches at a time."""
        if any(layout.flags.get(name) for name in ("tp_overlap", "ep_overlap")):
            return "bf16"
        masked_by_codes = task.objective in ("block", "nemotron")
        if self.on_cpu or not (task.packed or (layout.flags.get("cp", 1) > 1 and not masked_by_codes)):
            return "fp32"
        return "bf16"

    def compare(self, layout: Layout, task: Task, cell: Cell) -> None:
        for precision in (cell.precision, EXACT) if cell.precision == "bf16" else (cell.precision,):
            if not self._reference(task, precision).exists():
                raise DlmBridgeError(None, f"one process alone has no result: {self._failure(task, precision)}")
        loss, weights = self.step(task, cell.precision, layout.flags)
        wanted = torch.load(self._reference(task, cell.precision), weights_only=True)
        cell.loss = abs(loss - wanted["loss"]) / abs(wanted["loss"])
        if missing := wanted["weights"].keys() ^ weights.keys():
            raise RuntimeError(f"weights on one side only: {min(missing)}")
        farthest = max(wanted["moved"].values())
        cell.gradient = 0.0
        for name, weight in wanted["weights"].items():
            # What hardly moves at all is compared with what moves most.
            moved = max(wanted["moved"][name], 1e-5 * farthest)
            apart = float((weights[name] - weight).abs().max()) / moved
            if not apart <= cell.gradient:
                cell.gradient, cell.worst = apart, name
        if cell.precision == "bf16":
            cell.tolerance = (1e-2, FARTHER)
            near = self._judge(task, weights, wanted["weights"], cell)
        else:
            cell.tolerance = (1e-4, 1e-4 if self.on_cpu else 1e-3)
            near = cell.gradient <= cell.tolerance[1]
        cell.result = "equal" if cell.loss <= cell.tolerance[0] and near else "differs"

    def _judge(self, task: Task, weights: Tensors, alone: Tensors, cell: Cell) -> bool:
        """Whether half precision in a layout is as near to fp32 as half precision on one process is."""
        exact = torch.load(self._reference(task, EXACT), weights_only=True)
        least = 1e-5 * max(exact["moved_rms"].values())
        ours, theirs, farther = {}, {}, {}
        for name, weight in exact["weights"].items():
            moved = max(exact["moved_rms"][name], least)
            ours[name], theirs[name] = (_rms(found[name] - weight) / moved for found in (weights, alone))
            farther[name] = ours[name] / max(theirs[name], ROUNDING)
        cell.from_fp32, cell.alone_from_fp32 = max(ours.values()), max(theirs.values())
        cell.worst = max(farther, key=lambda name: farther[name])
        cell.farther = farther[cell.worst]
        return cell.from_fp32 <= FARTHER * cell.alone_from_fp32 and cell.farther <= ANYWHERE

    def step(self, task: Task, precision: str, flags: dict[str, Any]) -> tuple[float, Tensors]:
        """The loss of the engine's first step and all weights after it, fp32 on the CPU, by Hub name."""
        from rich.console import Console

        from dlm_bridge.data.loader import Prefetcher
        from dlm_bridge.parallel.handover import stream_hf_weights
        from dlm_bridge.parallel.train.assembly import assemble
        from dlm_bridge.parallel.train.schedule import gathered_weights

        config = self.config(task, precision, flags)
        make_way(config.parallel.layout, config.parallel.context, config.parallel.optimizer_instances)
        trainer = assemble(config, Console(quiet=True))
        try:
            if precision == EXACT:
                trainer.packs_documents = False  # Transformer Engine's kernels for packed rows have no fp32
                for chunk in trainer.chunks:
                    for parameter in chunk.parameters():
                        parameter.data.copy_(parameter.data.bfloat16())
            trainer.prefetcher = Prefetcher(trainer.produce, 1)
            row, _ = trainer.step(1, False)
            bridge = trainer.source.bridge
            with gathered_weights(trainer.chunks):
                weights = {
                    name: tensor.float().cpu() for name, tensor in stream_hf_weights(bridge.checkpoint, trainer.chunks)
                }
        finally:
            trainer.close()
            if trainer.processes.cpu_group is not dist.group.WORLD:
                dist.destroy_process_group(trainer.processes.cpu_group)
        return row.loss, weights

    def config(self, task: Task, precision: str, flags: dict[str, Any]) -> Any:
        from dlm_bridge.train.config import TrainConfig

        return TrainConfig.from_flags(
            task="pretrain",
            model=str(self._model(task, precision)),
            from_scratch=True,
            data=[str(self._data())],
            output=str(self.root / "run"),
            engine="megatron",
            steps=1,
            seq_length=self.size.length,
            global_batch_size=BATCH,
            seed=1,
            objective=task.objective,
            document_attention=task.packed,
            length_variation=0.0,
            precision="fp32" if precision == EXACT else precision,
            lr=RATE * 1e4,
            adam_eps=1e4,
            lr_schedule="constant",
            weight_decay=0.0,
            clip_grad=0.0,
            **{"micro_batch_size": MICRO, **flags},
        )

    def clean(self) -> None:
        from dlm_bridge.parallel.core_attention import MASKS

        MASKS.clear()
        gc.collect()
        if not self.on_cpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _train_alone(self, task: Task, precision: str) -> None:
        from dlm_bridge import Bridge

        path = self._reference(task, precision)
        try:
            start = Bridge.from_scratch(self._model(task, precision), 1)
            loss, weights = self.step(task, precision, {})
            dtype = torch.float32 if precision == "fp32" else torch.bfloat16
            by = {name: weight - start.read(name).to(dtype).float() for name, weight in weights.items()}
            found = {
                "loss": loss,
                "weights": weights,
                "moved": {name: float(change.abs().max()) for name, change in by.items()},
                "moved_rms": {name: _rms(change) for name, change in by.items()},
            }
            temporary = path.with_suffix(f".{os.getpid()}")
            torch.save(found, temporary)
            temporary.replace(path)
        except Exception as error:
            traceback.print_exc()
            path.with_suffix(".failed").write_text(f"{type(error).__name__}: {one_line(error)[:300]}")
        finally:
            self.clean()

    def _failure(self, task: Task, precision: str) -> str:
        path = self._reference(task, precision).with_suffix(".failed")
        return path.read_text() if path.exists() else "it did not come to an end"

    def _reference(self, task: Task, precision: str) -> Path:
        return self.references / f"{task.name.replace(' ', '_')}_{precision}.pt"

    def _model(self, task: Task, precision: str) -> Path:
        """A folder with the config.json of the task's model."""
        # In half precision a token may choose other experts for nothing but rounding: there each one goes to all.
        all_experts = task.has_experts and precision != "fp32"
        folder = self.root / f"{task.model}{'_all' if all_experts else ''}"
        if not (folder / "config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            config = model_config(task.model, self.size)
            if all_experts:
                config["num_experts_per_tok"] = EXPERTS
                if "n_group" in config:
                    config["topk_group"] = config["n_group"]
            temporary = folder / f".config.{os.getpid()}"
            temporary.write_text(json.dumps(config))
            temporary.replace(folder / "config.json")
        return folder

    def _data(self) -> Path:
        """A Megatron pair of random documents, several in a row."""
        from dlm_bridge.data.indexed import IndexedWriter, pair

        # Each process writes the same files: nobody waits for another.
        prefix, own = self.root / "data", self.root / f"data_{os.getpid()}"
        if not pair(prefix)[1].exists():
            prefix.parent.mkdir(parents=True, exist_ok=True)
            numbers = np.random.default_rng(0)
            lengths = numbers.integers(5, self.size.length, 400)
            with IndexedWriter(own, np.dtype(np.uint16)) as writer:
                for length in lengths:
                    writer.add(numbers.integers(0, self.size.vocab - 2, length).astype(np.uint16), [int(length)])
            for written, file in zip(pair(own), pair(prefix), strict=True):
                written.replace(file)
        return prefix


def _rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


if __name__ == "__main__":
    main()
