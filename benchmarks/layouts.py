"""Every layout of the Megatron engine against one process: the loss and every weight after one step of the engine.

    torchrun --max-restarts 20 --nproc-per-node 4 benchmarks/layouts.py --output layouts     layouts.json, layouts.md
    python benchmarks/layouts.py --smoke --output smoke              what one GPU alone can show of Transformer Engine

Each process first trains some of the references alone, on its own device. Then all of them take the same global batch
through each layout. The step is Adam's with an epsilon so large that it moves every weight by a constant times its
gradient, and so far that the weight is nothing but that; the weights are compared under their Hub names. So every
gradient goes through the layout's own reduction, sharding and optimizer. A cell that fails, hangs or takes its process
down is written as such; after the latter torchrun starts the processes again and they go on with the next cell.

Without a GPU the same runs on gloo with smaller sizes:
    DLM_BRIDGE_PLATFORM=cpu torchrun --nproc-per-node 2 benchmarks/layouts.py --output /tmp/layouts
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # read when CUDA's libraries are loaded: fp32 is fp32
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.layouts_cells import BATCH, EXPERTS, MICRO, ON_CPU, ON_GPU, Cell, Layout, Task, layouts, model_config
from dlm_bridge.errors import DlmBridgeError, one_line

RATE = 1e4  # how far a step moves a weight, in units of its gradient
PATIENCE_S = 60  # how long a process waits for the others at the end of a cell
LIMIT_S = 150  # of one cell, compilation included
LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Tensors = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="writes OUTPUT.json and OUTPUT.md")
    parser.add_argument("--cells", default="", help="a regular expression on 'layout: task'")
    parser.add_argument("--seconds", type=float, default=540, help="cells that have not begun by then are not run")
    parser.add_argument("--smoke", action="store_true", help="one GPU: Transformer Engine's kernels against others")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if options.smoke:
        from benchmarks.layouts_smoke import smoke

        raise SystemExit(smoke(options.output, options.cells))
    _run(options)


def _run(options: argparse.Namespace) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    table = Table(options.output, world, options.cells)
    if rank == 0:
        table.begin()
    else:
        table.wait()
    bench = Bench(options.output.with_name(options.output.name + ".work"))
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
        shutil.rmtree(bench.root, ignore_errors=True)
    bench.leave()
    # Whatever a cell has left behind must not keep the process alive.
    sys.stdout.flush()
    os._exit(0)


def _cell(bench: Bench, table: Table, layout: Layout, task: Task, cell: Cell) -> None:
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


def _stuck(table: Table, cell: Cell) -> None:
    table.died(cell, f"hung for {LIMIT_S} s")
    os._exit(1)


class Bench:
    """The engine's step in one layout after the other, on models and data in a folder that all processes share."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.answers: Any = None

    def prepare(self, rank: int, world: int, table: Table) -> None:
        """Models, data, and each process's share of the references, alone; then all processes join."""
        from dlm_bridge.parallel import groups, platform

        platform.current().prepare()
        self.root.mkdir(parents=True, exist_ok=True)
        self.on_cpu = platform.current().name == "cpu"
        torch._dynamo.config.recompile_limit = 256  # each layout has shapes of its own
        self.size = ON_CPU if self.on_cpu else ON_GPU
        needed: dict[str, tuple[Task, str]] = {}
        for layout, task, cell in table.waiting():
            cell.precision = self.precision(layout, task)
            needed[self._reference(task, cell.precision).name] = (task, cell.precision)
        alone = {name: os.environ.pop(name) for name in LAUNCHER}
        for number, (task, precision) in enumerate(needed.values()):
            if number % world == rank and not self._reference(task, precision).exists():
                self._train_alone(task, precision)
        if dist.is_initialized():
            groups.destroy()
            dist.destroy_process_group()
        os.environ.update(alone)
        chosen = platform.current()
        # A store of this start's own: the launcher's still has the addresses of processes that died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            chosen.backend,
            store=dist.FileStore(str(self.root / f"store_{attempt}"), world),
            rank=rank,
            world_size=world,
            device_id=chosen.group_device(),
            timeout=timedelta(minutes=10),
        )
        self.answers = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
        dist.barrier()

    def leave(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def precision(self, layout: Layout, task: Task) -> str:
        """Transformer Engine's kernels for packed rows and for context parallelism take half precision only."""
        masked_by_codes = task.objective == "block"
        if self.on_cpu or not (task.packed or (layout.flags.get("cp", 1) > 1 and not masked_by_codes)):
            return "fp32"
        return "bf16"

    def tolerance(self, precision: str) -> tuple[float, float]:
        """Of the loss and of the gradients. Half precision rounds every intermediate result to 8 bits."""
        if precision == "bf16":
            return 1e-2, 6e-2
        return (1e-4, 1e-4) if self.on_cpu else (1e-4, 1e-3)

    def compare(self, layout: Layout, task: Task, cell: Cell) -> None:
        cell.tolerance = self.tolerance(cell.precision)
        path = self._reference(task, cell.precision)
        if not path.exists():
            raise DlmBridgeError(f"one process alone has no result: {self._failure(task, cell.precision)}")
        loss, weights = self.step(task, cell.precision, layout.flags)
        wanted = torch.load(path, weights_only=True)
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
        equal = cell.loss <= cell.tolerance[0] and cell.gradient <= cell.tolerance[1]
        cell.result = "equal" if equal else "differs"

    def step(self, task: Task, precision: str, flags: dict[str, Any]) -> tuple[float, Tensors]:
        """The loss of the engine's first step and all weights after it, fp32 on the CPU, by Hub name."""
        from rich.console import Console

        from dlm_bridge.parallel import groups
        from dlm_bridge.parallel.handover import stream_hf_weights
        from dlm_bridge.train.data.loader import Prefetcher
        from dlm_bridge.train.megatron.engine import assemble

        config = self.config(task, precision, flags)
        if dist.is_initialized() and not groups.fit(config.layout, config.context):
            groups.destroy()
        trainer = assemble(config, Console(quiet=True))
        try:
            trainer.prefetcher = Prefetcher(trainer._produce, 1)
            row, _ = trainer.step(1, False)
            bridge = trainer.source.bridge
            with trainer._without_gather():
                weights = {name: tensor.float().cpu() for name, tensor in stream_hf_weights(bridge, trainer.chunks)}
        finally:
            trainer.close()
            if trainer.cpu_group is not dist.group.WORLD:
                dist.destroy_process_group(trainer.cpu_group)
        return row.loss, weights

    def config(self, task: Task, precision: str, flags: dict[str, Any]) -> Any:
        from dlm_bridge.train.config import TrainConfig

        return TrainConfig(
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
            precision=precision,
            lr=RATE * 1e4,
            adam_eps=1e4,
            lr_schedule="constant",
            weight_decay=0.0,
            clip_grad=0.0,
            **{"micro_batch_size": MICRO, **flags},
        )

    def clean(self) -> None:
        from dlm_bridge.parallel.attention_core import MASKS

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
            before = {
                name: start.read(name).to(torch.bfloat16 if precision == "bf16" else torch.float32).float()
                for name in weights
            }
            moved = {name: float((weights[name] - before[name]).abs().max()) for name in weights}
            temporary = path.with_suffix(f".{os.getpid()}")
            torch.save({"loss": loss, "weights": weights, "moved": moved}, temporary)
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
        return self.root / f"{task.name.replace(' ', '_')}_{precision}.pt"

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
            temporary = folder / f".config.{os.getpid()}"
            temporary.write_text(json.dumps(config))
            temporary.replace(folder / "config.json")
        return folder

    def _data(self) -> Path:
        """A Megatron pair of random documents, several in a row."""
        from dlm_bridge.train.data.indexed import IndexedWriter, pair

        # Each process writes its own: nobody waits for another.
        prefix = self.root / f"data_{os.getpid()}"
        if not pair(prefix)[1].exists():
            prefix.parent.mkdir(parents=True, exist_ok=True)
            numbers = np.random.default_rng(0)
            lengths = numbers.integers(5, self.size.length, 400)
            with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
                for length in lengths:
                    writer.add(numbers.integers(0, self.size.vocab - 2, length).astype(np.uint16), [int(length)])
        return prefix


class Table:
    """The cells, kept in OUTPUT.json so that a process that is started again knows what is done."""

    def __init__(self, output: Path, world: int, pattern: str) -> None:
        self.output = output
        self.path = output.with_name(output.name + ".json")
        self.begun = output.with_name(output.name + ".begun")
        self.cells: dict[tuple[str, str], Cell] = {}
        self.of: dict[tuple[str, str], tuple[Layout, Task]] = {}
        for layout in layouts():
            for task in layout.tasks:
                key = (layout.name, task.name)
                cell = Cell(layout.name, world, task.name, "")
                if world % layout.ranks:
                    cell.said = f"needs {layout.ranks} processes"
                elif not re.search(pattern, f"{layout.name}: {task.name}"):
                    cell.said = "left out by --cells"
                self.cells[key], self.of[key] = cell, (layout, task)

    def begin(self) -> None:
        """Start anew, or after a restart by the launcher note what took the processes down."""
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        if not again:
            for path in (self.path, self.begun, *self.output.parent.glob(f"{self.output.name}.died.*")):
                path.unlink(missing_ok=True)
            shutil.rmtree(self.output.with_name(self.output.name + ".work"), ignore_errors=True)
            _replace(self.begun, json.dumps({"at": time.time(), "by": _launch()}))
            return
        self._read()
        begun = json.loads(self.begun.read_text())
        key = tuple(begun.get("cell", ()))
        if key in self.cells and self.cells[key].result == "not run":
            said = [path.read_text() for path in sorted(self.output.parent.glob(f"{self.output.name}.died.*"))]
            cell = self.cells[key]
            cell.result, cell.said = "error", "; ".join(dict.fromkeys(said)) or "a process died"
            cell.precision = begun.get("precision", "")
            self.add(cell)
        _replace(self.begun, json.dumps({"at": begun["at"], "by": _launch()}))

    def wait(self) -> None:
        """Until rank 0 has begun."""
        deadline = time.time() + PATIENCE_S
        while time.time() < deadline:
            if self.begun.exists() and json.loads(self.begun.read_text()).get("by") == _launch():
                return
            time.sleep(0.05)
        raise SystemExit("rank 0 did not begin")

    def waiting(self) -> list[tuple[Layout, Task, Cell]]:
        """What is still to be run, layout by layout. Every process asks."""
        self._read()
        return [
            (*self.of[key], cell) for key, cell in self.cells.items() if cell.result == "not run" and not cell.said
        ]

    def began(self) -> float:
        return float(json.loads(self.begun.read_text())["at"])

    def started(self, cell: Cell) -> None:
        key = (cell.layout, cell.task)
        text = json.dumps({"at": self.began(), "by": _launch(), "cell": key, "precision": cell.precision})
        _replace(self.begun, text)
        for path in self.output.parent.glob(f"{self.output.name}.died.*"):
            path.unlink()

    def died(self, cell: Cell, said: str) -> None:
        self.output.with_name(f"{self.output.name}.died.{os.environ['RANK']}").write_text(said)
        print(f"rank {os.environ['RANK']}: {cell.layout}: {cell.task}: {said}", file=sys.stderr, flush=True)

    def add(self, cell: Cell) -> None:
        self.cells[cell.layout, cell.task] = cell
        self.write()

    def write(self) -> None:
        _replace(
            self.path, json.dumps({"conditions": conditions(), "cells": [asdict(c) for c in self.cells.values()]})
        )
        _replace(self.output.with_name(self.output.name + ".md"), self.markdown())

    def line(self, cell: Cell) -> str:
        tolerance = "" if cell.tolerance is None else "{:.0e} / {:.0e}".format(*cell.tolerance)
        apart = "" if cell.gradient is None else f"{cell.loss:.1e} / {cell.gradient:.1e}"
        said = cell.said or (f"worst: {cell.worst}" if cell.result == "differs" else "")
        cells = (cell.layout, cell.task, cell.precision, cell.result, apart, tolerance, said.replace("|", "/"))
        return "| " + " | ".join(cells) + " |"

    def markdown(self) -> str:
        head = ("layout", "model, objective", "dtype", "result", "loss / gradient apart", "tolerance", "")
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += [self.line(cell) for cell in self.cells.values()]
        counts = {
            kind: sum(cell.result == kind for cell in self.cells.values())
            for kind in ("equal", "differs", "refused", "error", "not run")
        }
        summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        return f"{conditions()}\n\n{summary}\n\n" + "\n".join(lines) + "\n"

    def _read(self) -> None:
        if not self.path.exists():
            return
        for found in json.loads(self.path.read_text())["cells"]:
            key = (found["layout"], found["task"])
            if key in self.cells and found["result"] != "not run":
                self.cells[key] = Cell(**found)


def conditions() -> str:
    """What it ran on."""
    from importlib.metadata import PackageNotFoundError, version

    from dlm_bridge.parallel import platform

    def of(name: str) -> Iterator[str]:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            return

    found = [text for name in ("torch", "megatron-core", "transformer-engine") for text in of(name)]
    ranks = os.environ.get("WORLD_SIZE", "1")
    return f"{ranks} x {platform.current().device_name()}, {', '.join(found)}"


def _launch() -> str:
    """What the processes of one start by the launcher have in common."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    return " ".join(os.environ.get(name, "") for name in names)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    main()
