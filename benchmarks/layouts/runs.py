"""Whole runs of the Megatron engine on two processes, and whether each came to what it must: a table.

    torchrun --max-restarts 4 --nproc-per-node 2 benchmarks/layouts/runs.py --output runs    runs.json, runs.md

Megatron FSDP's checkpoints: resumed, killed with SIGKILL and resumed, exported. FP8, SGD, routers in fp32, CPU
offload, saves in the background (one killed before it is complete), the straggler report, the NaN guard, a resume at
another layout, and main params after a resume. Models are tiny, saves are every four of eight steps. A killed run
kills its processes; torchrun starts them again and they go on with it.
`--transport host` lets both processes share a GPU (see host_transport.py).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
# Losses are compared step by step: Transformer Engine's attention is to add up in one order.
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
os.environ.setdefault("UB_SKIPMC", "1")  # userbuffers by CUDA IPC, also where a machine has no NVLink multicast
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

from benchmarks.layouts.cells import LATENT, Task
from benchmarks.layouts.one_step import Bench
from benchmarks.layouts.run_state import (
    all_equal,
    export_difference,
    fp32_weights,
    largest_difference,
    losses_of,
    optimizer_state,
    weights_of,
)
from benchmarks.layouts.tables import RunLog, RunResult
from dlm_bridge.errors import DlmBridgeError, one_line
from tests.groups import make_way

STEPS, SAVED = 8, 4
SAME = 1e-6  # relative, of losses that nothing but a checkpoint lies between
DENSE, EXPERTS = Task("llada", "masked"), Task("llada_moe", "masked")
ROUTERS = Task(LATENT, "causal")  # kept in the dtype that they are stored in
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
LIMIT_S = 300  # of one check; those of experts take two minutes where many processes compile at once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="writes OUTPUT.json and OUTPUT.md")
    parser.add_argument("--only", default="", help="a regular expression on the names of what is to be run")
    parser.add_argument("--seconds", type=float, default=300, help="what has not begun by then is not run")
    parser.add_argument("--transport", choices=("direct", "host"), default="direct")
    options = parser.parse_args()
    if options.transport == "host" and (devices := torch.cuda.device_count()):
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % devices)
    torch.set_num_threads(1)
    log = RunLog(options)
    bench = Bench(options.output.with_name(options.output.name + ".work"), transport=options.transport)
    bench.begin()
    bench.join(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    runs = Runs(bench, log)
    for name, check in runs.all().items():
        if re.search(options.only, name) and name not in log.rows and time.time() - log.began < options.seconds:
            _one(bench, log, name, check)
    if dist.get_rank() == 0:
        print("\n" + log.markdown(), flush=True)
        shutil.rmtree(bench.root, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)


def _one(bench: Bench, log: RunLog, name: str, check: Callable[[], tuple[bool, str]]) -> None:
    """One check on every process; where one fails the first error counts."""
    began = time.time()
    log.started(name)
    watch = threading.Timer(LIMIT_S, lambda: _hung(log, name))
    watch.daemon = True
    watch.start()
    try:
        holds, said = check()
        result = "holds" if holds else "fails"
    except Exception as error:
        where = [frame for frame in traceback.extract_tb(error.__traceback__) if "dlm_bridge" in frame.filename]
        place = f" ({Path(where[-1].filename).name}:{where[-1].lineno})" if where else ""
        result, said = "error", f"{type(error).__name__}: {one_line(error)[:300]}{place}"
        traceback.print_exc()
    everyone: list[Any] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(everyone, (result, said), group=bench.answers)
    except Exception:  # another process hangs: this one's error goes with it
        log.died(name, said)
        os._exit(1)
    watch.cancel()
    bench.clean()
    result, said = sorted(everyone, key=lambda pair: ("error", "fails", "holds").index(pair[0]))[0]
    log.add(RunResult(name, result, said, time.time() - began))


def _hung(log: RunLog, name: str) -> None:
    log.died(name, f"not done after {LIMIT_S} s")
    faulthandler.dump_traceback()  # where each thread is: slow, or waiting for another process
    os._exit(1)


class Runs:
    def __init__(self, bench: Bench, log: RunLog) -> None:
        self.bench, self.log = bench, log

    def all(self) -> dict[str, Callable[[], tuple[bool, str]]]:
        found: dict[str, Callable[[], tuple[bool, str]]] = {}
        killed: dict[str, Any] = {"fsdp": "optim_grads_params"}
        if self.bench.on_cpu:  # where there is no FSDP the rest can be tried
            killed = {}
        else:
            for task in (DENSE, EXPERTS):
                found[f"fsdp optim_grads_params, {task.model}: main params start unrounded"] = self._bound(
                    self.begun, task
                )
            for strategy in STRATEGIES:
                found[f"fsdp {strategy}: resumed, exported"] = self._bound(self.resumed, DENSE, fsdp=strategy)
            found["fsdp optim_grads_params with experts: resumed, exported"] = self._bound(
                self.resumed, EXPERTS, fsdp=STRATEGIES[-1]
            )
            found["fsdp optim_grads_params x ep2: resumed, exported"] = self._bound(
                self.resumed, EXPERTS, fsdp=STRATEGIES[-1], ep=2
            )
        what = "fsdp optim_grads_params" if killed else "dp"
        found[f"{what}: SIGKILL in mid-run, resumed"] = self._bound(self.killed, **killed)
        found["dp: resumed, exported"] = self._bound(self.resumed, DENSE)
        for momentum in (0.0, 0.9):
            settings = {"optimizer": "sgd", "lr": 0.1, "megatron": [f"optimizer.sgd_momentum={momentum}"]}
            found[f"sgd, momentum {momentum}: resumed, exported"] = self._bound(self.resumed, DENSE, **settings)
        found["routers in fp32: resumed, exported"] = self._bound(self.resumed, ROUTERS, routers=True)
        found["tp2 to pp2 with experts, fp32"] = self.another_layout
        found["a save in the background"] = self.background
        found["a save in the background: SIGKILL in its midst, resumed"] = self.killed_save
        if not self.bench.on_cpu:
            found["fp8, delayed scaling"] = self._bound(self.fp8, "delayed")
            found["fp8, current scaling"] = self._bound(self.fp8, "tensorwise")
            found["fp8, delayed scaling, experts"] = self._bound(self.fp8, "delayed", EXPERTS)
            found["fp8, current scaling, experts"] = self._bound(self.fp8, "tensorwise", EXPERTS)
            found["fp8, delayed scaling, fsdp optim_grads_params"] = self._bound(
                self.fp8, "delayed", fsdp=STRATEGIES[-1]
            )
            found["optimizer on the CPU"] = self.offload
            found["optimizer on the CPU: resumed, exported"] = self._bound(
                self.resumed, DENSE, optimizer_cpu_offload=True
            )
            found["precision-aware optimizer: resumed, exported"] = self._bound(
                self.resumed, DENSE, megatron=["optimizer.use_precision_aware_optimizer=true"]
            )
        found["ep2, two micro-batches at a time: as without"] = self._bound(
            self.as_without, {"ep_overlap": True}, 1e-4, EXPERTS, ep=2
        )
        if not self.bench.on_cpu:
            for tp in (1, 2):
                for precision, tolerance in (("fp32", 1e-5), ("bf16", 5e-3)):
                    found[f"cuda graphs, tp{tp}, {precision}: as without"] = self._bound(
                        self.as_without, {"cuda_graphs": True}, tolerance, precision=precision, tp=tp
                    )
            found["userbuffers, tp2: as without"] = self._bound(self.as_without, {"tp_overlap": True}, 5e-3, tp=2)
        found["straggler report"] = self.stragglers
        found["NaN guard"] = self.nan
        return found

    def _bound(self, check: Callable[..., tuple[bool, str]], *arguments: Any, **flags: Any) -> Callable[..., Any]:
        return lambda: check(*arguments, **flags)

    def begun(self, task: Task) -> tuple[bool, str]:
        """What Megatron FSDP's optimizer begins with, in a run whose weights are bf16 and whose source is fp32."""
        from dlm_bridge.parallel.mcore_patches.fsdp import whole
        from dlm_bridge.parallel.weights import live_names, live_tensors, shard_of

        with self.assembled("begun", task, "bf16", fsdp=STRATEGIES[-1]) as trainer:
            live = live_tensors([trainer.chunks[0].module.module])
            checkpoint = trainer.source.bridge.checkpoint
            count, other = 0, []
            for param in checkpoint.params:
                for name in (name for name in live_names(param) if name in live):
                    found = whole(live[name]).cpu()
                    wanted = shard_of(param, param.to_megatron(checkpoint.read_param(param)), found)
                    count += 1
                    if not torch.equal(found[: len(wanted)], wanted):
                        other.append(name)
        equal = "all equal the source's fp32 to the bit" if not other else f"{len(other)} differ, the first {other[0]}"
        return count > 0 and not other, f"{count} main params: {equal}"

    def resumed(self, task: Task, routers: bool = False, **flags: Any) -> tuple[bool, str]:
        """A run; what its last checkpoint is read back as, and exported as; and the run again from its middle.
        `routers`: its routers must be in fp32."""
        with self.run("run", task, "bf16", **flags) as trainer:
            output, live, kept = trainer.output, weights_of(trainer), optimizer_state(trainer)
            if routers and not fp32_weights(trainer):
                return False, "no weight of the run is in fp32"
        losses = losses_of(output)
        with self.assembled("run", task, "bf16", **flags) as trainer:
            restored = self._everywhere(all_equal(kept, optimizer_state(trainer)))
        exported = self._exported(output, live)
        self._back(output)
        with self.run("run", task, "bf16", resume=True, **flags):
            apart = largest_difference(losses, losses_of(output))
        said = (
            f"steps {SAVED + 1} to {STEPS} again: losses {apart:.0e} apart; main params and moments read back "
            f"{'equal to the bit' if restored else 'differ'}; "
            f"{exported or 'dlm-bridge export equals the live weights to the bit, dlm-bridge verify finds no damage'}"
        )
        return apart <= SAME and exported == "" and restored, said

    def killed(self, **flags: Any) -> tuple[bool, str]:
        """All processes kill themselves between two saves; torchrun starts them again."""
        name = "killed"
        output = self.bench.root / name
        whole = self.bench.root / "killed.losses"
        if not self.log.interrupted:
            with self.run("whole", DENSE, "bf16", **flags) as trainer:
                losses = losses_of(trainer.output)
            if dist.get_rank() == 0:
                whole.write_text(json.dumps(losses))
            self.barrier()
            watch = threading.Thread(target=self._kill_after, args=(output / "metrics.jsonl", SAVED + 1), daemon=True)
            watch.start()
            with self.run(name, DENSE, "bf16", **flags):
                return False, "the run ended before it was killed"
        before = losses_of(output)
        saved = sorted(path.name for path in (output / "checkpoints").glob("iter_*"))
        with self.run(name, DENSE, "bf16", resume=True, **flags):
            again = losses_of(output)
        wanted = {int(step): loss for step, loss in json.loads(whole.read_text()).items()}
        apart = largest_difference(wanted, again)
        said = f"killed after step {max(before)} with {', '.join(saved)}; all {len(again)} losses {apart:.0e} apart"
        return apart <= SAME and len(again) == STEPS and len(saved) == 1, said

    def _kill_after(self, metrics: Path, step: int) -> None:
        """SIGKILL to this process once a run has written a step's figures."""
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
            time.sleep(0.002)
        self.log.kills()
        os.kill(os.getpid(), signal.SIGKILL)

    def killed_save(self) -> tuple[bool, str]:
        """The process that writes the second checkpoint in the background kills itself and its trainer where all files
        are there but the digests; torchrun starts the trainers again."""
        from dlm_bridge.parallel.train import checkpoints

        output, whole = self.bench.root / "killed_save", self.bench.root / "killed_save.losses"
        root = output / "checkpoints"
        if not self.log.interrupted:
            with self.run("whole", DENSE, "bf16", async_save=True) as trainer:
                losses = losses_of(trainer.output)
            if dist.get_rank() == 0:
                whole.write_text(json.dumps(losses))
            self.barrier()

            def write_digests(folder: Path, rank: int) -> None:
                if f"{STEPS:07d}" in folder.name:
                    self.log.kills()
                    os.kill(os.getppid(), signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                write(folder, rank)

            write, checkpoints.write_rank_digests = checkpoints.write_rank_digests, write_digests
            with self.run("killed_save", DENSE, "bf16", async_save=True):
                return False, "the run ended before it was killed"
        tracker = (root / "latest_checkpointed_iteration.txt").read_text().strip()
        saved = sorted(path.name for path in root.glob("iter_*"))
        unfinished = [path.name for path in root.glob(".iter_*")]
        with self.run("killed_save", DENSE, "bf16", resume=True, async_save=True) as trainer:
            again, live = losses_of(output), weights_of(trainer)
        wanted = {int(step): loss for step, loss in json.loads(whole.read_text()).items()}
        apart, left = largest_difference(wanted, again), [path.name for path in root.glob(".iter_*")]
        exported = self._exported(output, live)
        said = (
            f"killed with {', '.join(saved)} complete and {len(unfinished)} not; all {len(again)} losses {apart:.0e} "
            f"apart; {exported or 'the last checkpoint is exported to the bit'}; {len(left)} leftovers"
        )
        before = saved == [f"iter_{SAVED:07d}"] and tracker == str(SAVED) and len(unfinished) == 1
        return before and apart <= SAME and exported == "" and not left, said

    def another_layout(self) -> tuple[bool, str]:
        with self.run("tp2", EXPERTS, "fp32", tp=2) as trainer:
            losses, output = losses_of(trainer.output), trainer.output
        self._back(output)
        with self.run("tp2", EXPERTS, "fp32", resume=True, pp=2):
            again = losses_of(output)
        apart = largest_difference(losses, again)
        return apart <= 1e-4, f"steps {SAVED + 1} to {STEPS} at pp2 from tp2's checkpoint: losses {apart:.0e} apart"

    def background(self) -> tuple[bool, str]:
        with self.run("sync", DENSE, "bf16") as trainer:
            live = weights_of(trainer)
        with self.run("async", DENSE, "bf16", async_save=True) as trainer:
            output = trainer.output
        exported = self._exported(output, live)
        names = sorted(path.name for path in (output / "checkpoints").glob("iter_*"))
        said = f"{', '.join(names)}: {exported or 'weights equal to the bit those of saves in the foreground'}"
        return exported == "" and len(names) == STEPS // SAVED, said

    def fp8(self, recipe: str, task: Task = DENSE, **flags: Any) -> tuple[bool, str]:
        with self.run("bf16", task, "bf16", **flags) as trainer:
            wanted = losses_of(trainer.output)
        with self.run("fp8", task, "fp8", fp8_recipe=recipe, **flags) as trainer:
            found, output = losses_of(trainer.output), trainer.output
        self._back(output)
        with self.run("fp8", task, "fp8", resume=True, fp8_recipe=recipe, **flags):
            again = losses_of(output)
        apart, resumed = largest_difference(wanted, found), largest_difference(found, again)
        said = f"{STEPS} steps: losses {apart:.0e} from bf16's; resumed from the middle {resumed:.0e} apart"
        return apart <= 2e-2 and resumed <= 1e-3, said

    def offload(self) -> tuple[bool, str]:
        with self.run("on", DENSE, "bf16") as trainer:
            wanted = losses_of(trainer.output)
        with self.run("off", DENSE, "bf16", optimizer_cpu_offload=True) as trainer:
            found = losses_of(trainer.output)
        apart = largest_difference(wanted, found)
        return apart <= 1e-3, f"{STEPS} steps: losses {apart:.0e} from those of the optimizer on the GPU"

    def as_without(
        self, options: dict[str, Any], tolerance: float, task: Task = DENSE, precision: str = "bf16", **flags: Any
    ) -> tuple[bool, str]:
        """A run with some options more against the run without: losses, validations among them, and weights."""
        found = []
        for name, more in (("without", {}), ("with", options)):
            with self.run(name, task, precision, eval_interval=SAVED, **flags, **more) as trainer:
                found.append((losses_of(trainer.output, validations=True), weights_of(trainer)))
        (wanted, weights), (losses, others) = found
        apart = largest_difference(wanted, losses)
        other = [name for name, tensor in weights.items() if not torch.equal(others[name], tensor)]
        said = f"{len(other)} of {len(weights)} weights differ" if other else "all weights equal to the bit"
        return apart <= tolerance, f"{STEPS} steps: losses {apart:.0e} apart; {said}"

    def stragglers(self) -> tuple[bool, str]:
        said = io.StringIO()
        with self.run("stragglers", DENSE, "bf16", said=said, straggler_interval=SAVED):
            pass
        if dist.get_rank():
            return True, ""
        lines = [line for line in said.getvalue().splitlines() if "rank" in line]
        return len(lines) == STEPS // SAVED, lines[0] if lines else "no line"

    def nan(self) -> tuple[bool, str]:
        """A rate at which weights overflow."""
        try:
            with self.run("nan", DENSE, "bf16", lr=1e30):
                return False, "the run went on"
        except DlmBridgeError as error:
            return "loss is nan" in str(error) or "not finite" in str(error) or "norm is" in str(error), str(error)

    @contextlib.contextmanager
    def run(
        self, name: str, task: Task, precision: str, resume: bool = False, said: Any = None, **flags: Any
    ) -> Iterator[Any]:
        """The trainer of a whole run that has just ended."""
        from rich.console import Console

        from dlm_bridge.parallel.train import assembly

        config = self._config(name, task, precision, **flags)
        if not resume and dist.get_rank() == 0:
            shutil.rmtree(config.checkpoint.output, ignore_errors=True)
        self._leave(config)
        made: list[Any] = []

        def assemble(*arguments: Any) -> Any:
            made.append(original(*arguments))
            return made[-1]

        original, assembly.assemble = assembly.assemble, assemble
        try:
            console = Console(file=said, width=500) if said else Console(quiet=True)
            assembly.train(config, resume, console)
            self.barrier()
            yield made[0]
        finally:
            assembly.assemble = original
            self._closed(made)

    @contextlib.contextmanager
    def assembled(self, name: str, task: Task, precision: str, **flags: Any) -> Iterator[Any]:
        """The trainer of a run as it is read back from its last checkpoint if it has one, before a step."""
        from rich.console import Console

        from dlm_bridge.parallel.train import assembly, checkpoints

        config = self._config(name, task, precision, **flags)
        self._leave(config)
        found = checkpoints.find_iteration(Path(config.checkpoint.output))
        step, folder = found.step, found.folder
        trainer = assembly.assemble(config, Console(quiet=True), folder, step)
        try:
            yield trainer
        finally:
            self._closed([trainer])

    def barrier(self) -> None:
        dist.barrier(group=self.bench.answers)

    def _everywhere(self, mine: bool) -> bool:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine, group=self.bench.answers)
        return all(every)

    def _closed(self, made: list[Any]) -> None:
        for trainer in made:
            trainer.close()
            if trainer.processes.cpu_group is not dist.group.WORLD:
                dist.destroy_process_group(trainer.processes.cpu_group)

    def _leave(self, config: Any) -> None:

        self.barrier()
        make_way(config.parallel.layout, config.parallel.context, config.parallel.optimizer_instances)

    def _config(self, name: str, task: Task, precision: str, **flags: Any) -> Any:
        usual: dict[str, Any] = {
            "output": str(self.bench.root / name),
            "steps": STEPS,
            "save_interval": SAVED,
            "eval_interval": 0,
            "lr": 1e-3,
            "adam_eps": 1e-8,
            "clip_grad": 1.0,
        }
        return self.bench.config(task, precision, {}).replace(**{**usual, **flags})

    def _back(self, output: Path) -> None:
        """Make a run's checkpoint in the middle its newest."""
        if dist.get_rank() == 0:
            root = output / "checkpoints"
            shutil.rmtree(root / f"iter_{STEPS:07d}")
            (root / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
        self.barrier()

    def _exported(self, output: Path, live: dict[str, torch.Tensor]) -> str:
        """What is wrong with `dlm-bridge export` and `verify` of a run's last checkpoint; nothing: ""."""
        said = [""]
        if dist.get_rank() == 0:
            said = [export_difference(output, live)]
        dist.broadcast_object_list(said, group=self.bench.answers)
        return said[0]


if __name__ == "__main__":
    main()
