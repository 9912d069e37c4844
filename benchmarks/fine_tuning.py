"""Ways to train a model on one machine, each against one process; a row as soon as there is one.

    python benchmarks/fine_tuning.py --processes 2 --jobs 4                     on one GPU (shared) or on two
    python benchmarks/fine_tuning.py --processes 2 --model tiny --precision fp32      on a CPU

Micro-batches, data parallelism, FSDP2 (also recomputed and offloaded to the CPU), a run that FSDP2 began and one
process goes on with, FP8, and LoRA adapters: replicated, sharded and over quantized bases. Each row is what
`dlm-bridge pretrain` does, from the same weights on the same tokens, of which there are so few that they are learned
from the first step on. `apart` is the largest difference between a step's loss and that of the run that it is compared
with, as a share of how far training has moved the latter's loss from that of untrained weights; `norm` is the relative
difference of the first step's gradient norms. A base in 4 bits is compared with the same weights rounded to 4 bits
and kept in bf16: rounding alone changes what is learned, so that the unrounded base is no measure of it. A run whose
loss rises above that of untrained weights is off, too: where training diverges, rounding decides what comes of it,
and nothing can be compared. The exit code is 1 where a row is off, failed or was not run. Processes that outnumber
the GPUs share them and communicate through the host (layouts/host_transport.py).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# Read when torch is imported: the processes of a row are forked from this one, which must not have initialised CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a pool of processes would take longer than it saves
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.layouts.document import put_table  # noqa: E402
from tests.processes import free_port  # noqa: E402

STEPS = 8
LIMIT_S = 150  # of one row
LEARNED = 0.05  # how far training must move a loss at least, as a share of it
DIVERGED = 1.1  # what a loss may be of the untrained weights' in the same step
TOKENS = 12  # that occur
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    "small": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 32},
}
RATES = {"tiny": 1e-2, "small": 1e-3, "8b": 1e-4}
ADAPTER_RATES = {"tiny": 3e-2, "small": 1e-3, "8b": 3e-4}
SEQUENCES = {"tiny": 64, "small": 512, "8b": 4096}
VOCABULARIES = {"tiny": 256, "small": 8192, "8b": 126_464}
ILLADA = {
    "architectures": ["ILLaDAForCausalLM"],
    "model_type": "illada",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}
# What is imported before a row's processes are forked.
PRELOADED = (
    "dlm_bridge.train.accelerate.trainer",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
)
FIGURES = ("compared with", "apart", "norm", "last loss", "peak GiB")
HEAD = ("run", "precision", "processes", "result", *FIGURES, "seconds")


Rows = list[dict[str, Any]]  # of metrics.jsonl


@dataclass(frozen=True)
class Tolerance:
    loss: float
    norm: float


TOLERANCES = {"fp32": Tolerance(1e-3, 1e-4), "bf16": Tolerance(1e-1, 3e-2)}
FP8 = Tolerance(2e-1, 1e-1)
QUANTIZED = Tolerance(3e-1, math.inf)  # other weights and activations, other gradients


@dataclass(frozen=True)
class Run:
    """A run, and the one whose losses it must have."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False  # on one process
    like: str = "one process"
    steps: int = STEPS
    continues: str = ""  # the run whose folder it resumes
    needs: str = ""  # a package
    model: str = "model"  # the folder of its weights
    tolerance: Tolerance | None = None


FSDP: dict[str, Any] = {"sharding": "fsdp"}
OFFLOADED = FSDP | {"cpu_offload": True}
LORA: dict[str, Any] = {"lora_rank": 16}
FLOAT8: dict[str, Any] = {"precision": "fp8"}
ADAPTED, HALF = "LoRA, one process", "FSDP2, half of the steps"
ROUNDED = "LoRA, base rounded to 4 bits, one process"
UNTRAINED = "one process, learning rate 0"
RUNS = (
    Run(UNTRAINED, {"lr": 0.0}, alone=True, like=UNTRAINED),
    Run("one process", alone=True, like="one process"),
    Run(ADAPTED, LORA, alone=True, like=ADAPTED),
    Run(HALF, FSDP, steps=STEPS // 2),
    Run("one process, micro-batches of 2", {"micro_batch_size": 2}, alone=True),
    Run("data parallel"),
    Run("FSDP2", FSDP),
    Run("FSDP2, recomputed", FSDP | {"gradient_checkpointing": True}),
    Run("FSDP2, offloaded", OFFLOADED),
    Run("FSDP2, offloaded, one process", OFFLOADED, alone=True),
    Run("FSDP2, resumed by one process", alone=True, continues=HALF),
    Run("LoRA, data parallel", LORA, like=ADAPTED),
    Run("LoRA, FSDP2", LORA | FSDP, like=ADAPTED),
)
HALF_PRECISION_RUNS = (
    Run("FP8, one process", FLOAT8, alone=True, needs="torchao", tolerance=FP8),
    Run("FP8, data parallel", FLOAT8, needs="torchao", tolerance=FP8),
    Run("FP8, FSDP2", FLOAT8 | FSDP, needs="torchao", tolerance=FP8),
    Run(
        "LoRA, 8bit base, one process",
        LORA | {"lora_quantize": "8bit"},
        alone=True,
        like=ADAPTED,
        needs="bitsandbytes",
        tolerance=QUANTIZED,
    ),
    Run(ROUNDED, LORA, alone=True, like=ROUNDED, needs="bitsandbytes", model="rounded"),
    Run(
        "LoRA, 4bit base, one process",
        LORA | {"lora_quantize": "4bit"},
        alone=True,
        like=ROUNDED,
        needs="bitsandbytes",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--precision", choices=tuple(TOLERANCES), nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--only", default="", help="runs whose name has this, and those they are compared with")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="what has not begun by then is not run")
    parser.add_argument("--transport", choices=("direct", "host"), help="default: host where processes share a GPU")
    parser.add_argument("--output", type=Path, help="folder of the runs; a temporary one by default")
    parser.add_argument("--document", type=Path, help="a page whose table between <!-- fine_tuning --> marks to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench(arguments, arguments.output or Path(temporary))
        return bench.run()


@dataclass
class Running:
    """A run under way."""

    run: Run
    precision: str
    processes: list[Any]
    log: Path
    began: float

    def sentinels(self) -> list[Any]:
        return [process.sentinel for process in self.processes if process.is_alive()]

    def ended(self) -> bool:
        """Whether all processes have; once one fails or the time is over, the others are killed."""
        failed = any(process.exitcode for process in self.processes)
        if failed or time.monotonic() - self.began > LIMIT_S:
            for process in self.processes:
                process.kill()
                process.join()
        return not self.sentinels()

    def said(self) -> str:
        """Why it failed, "" where it did not."""
        codes = [process.exitcode for process in self.processes]
        if not any(codes):
            return ""
        logs = [self.log.with_suffix(f".{rank}.log") for rank in range(len(codes))]
        lines = [line for log in logs for line in log.read_text().splitlines() if "Error: " in line]
        return (lines or [f"not done after {LIMIT_S} s" if {*codes} == {-signal.SIGKILL} else "failed"])[-1][:200]


class Bench:
    def __init__(self, arguments: argparse.Namespace, root: Path) -> None:
        self.arguments, self.root = arguments, root
        self.devices = torch.cuda.device_count()  # by NVML
        self.began = time.monotonic()
        self.table: list[tuple[str, ...]] = []
        self.results: dict[tuple[str, str], str] = {}
        self.next_device = itertools.count()
        for module in PRELOADED:
            importlib.import_module(module)
        self.context: Any = multiprocessing.get_context("fork")
        if self.devices and not self._fork_has_cuda():
            print("CUDA does not start in a forked process: each run imports everything anew", flush=True)
            self.context = multiprocessing.get_context("spawn")

    def run(self) -> int:
        """All runs; the exit code."""
        for folder in ("runs", "logs", "config", "model", "rounded", "data"):
            shutil.rmtree(self.root / folder, ignore_errors=True)
            (self.root / folder).mkdir(parents=True)
        # Whatever it does to CUDA ends with it.
        writer = self.context.Process(target=_write_inputs, args=(self.arguments, self.root))
        writer.start()
        writer.join()
        if writer.exitcode:
            raise SystemExit("no model, or no data")
        print(f"{self.arguments.model}, {self.devices} GPUs, {time.monotonic() - self.began:.0f} s of preparation\n")
        print(_line(HEAD) + "\n" + "|" + "---|" * len(HEAD), flush=True)
        waiting = list(self._chosen())
        running: list[Running] = []
        while waiting or running:
            for run, precision in [*waiting]:
                if self._skipped(run, precision):
                    waiting.remove((run, precision))
                elif len(running) < self.arguments.jobs and self._ready(run, precision):
                    waiting.remove((run, precision))
                    running.append(self._start(run, precision))
            sentinels = [sentinel for one in running for sentinel in one.sentinels()]
            if sentinels:
                wait(sentinels, timeout=5)
            for one in [*running]:
                if one.ended():
                    running.remove(one)
                    self._judge(one)
        return self._finish()

    def _chosen(self) -> Iterator[tuple[Run, str]]:
        for precision in self.arguments.precision:
            runs = RUNS + HALF_PRECISION_RUNS * (precision == "bf16")
            named = [run for run in runs if self.arguments.only in run.name]
            compared = {name for run in named for name in (run.like, run.continues)}
            compared |= {run.like for run in runs if run.name in compared} | {UNTRAINED}
            yield from ((run, precision) for run in runs if run in named or run.name in compared)

    def _ready(self, run: Run, precision: str) -> bool:
        return all((name, precision) in self.results for name in _earlier(run))

    def _skipped(self, run: Run, precision: str) -> bool:
        """Whether it is not to be run; then its row says why."""
        why = ""
        if run.needs and importlib.util.find_spec(run.needs) is None:
            why = f"skipped: {run.needs} is not installed"
        elif run.needs == "torchao" and not self.devices:
            why = "skipped: FP8 needs a GPU"
        elif time.monotonic() - self.began > self.arguments.seconds:
            why = f"not run: {self.arguments.seconds:.0f} s are over"
        elif any(self.results.get((name, precision), "equal") != "equal" for name in _earlier(run)):
            why = "not run: what it is compared with has failed"
        if why:
            self._add(run, precision, why)
        return bool(why)

    def _start(self, run: Run, precision: str) -> Running:
        world = 1 if run.alone else self.arguments.processes
        name = f"{precision}-{run.name}".replace(", ", "-").replace(" ", "-")
        if run.continues:
            shutil.copytree(self._output(run.continues, precision), self._output(run.name, precision))
        options = {
            "model": str(self.root / run.model),
            "data": [str(self.root / "data/pair")],
            "output": str(self._output(run.name, precision)),
            "steps": run.steps,
            "seq_length": SEQUENCES[self.arguments.model],
            "global_batch_size": 8,
            "micro_batch_size": 1,
            "length_variation": 0.0,
            "lr_schedule": "constant",
            "lr": (ADAPTER_RATES if "lora_rank" in run.options else RATES)[self.arguments.model],
            "save_interval": 0,
            "eval_interval": 0,
            "precision": precision,
            **run.options,
        }
        transport = self.arguments.transport or ("host" if 0 < self.devices < world else "direct")
        log, port, processes = self.root / "logs" / name, str(free_port()), []
        for rank in range(world):
            environment = {"CUDA_VISIBLE_DEVICES": str(next(self.next_device) % max(self.devices, 1))}
            if world > 1:
                local = rank % (self.devices or world)
                environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local)}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": str(world)}
            own = log.with_suffix(f".{rank}.log")
            processes.append(self.context.Process(target=_train, args=(options, environment, transport, own)))
            processes[-1].start()
        return Running(run, precision, processes, log, time.monotonic())

    def _judge(self, ended: Running) -> None:
        run, precision = ended.run, ended.precision
        seconds = f"{time.monotonic() - ended.began:.0f}"
        failed = ended.said()
        if not failed and len(_rows(self._output(run.name, precision))) != run.steps:
            failed = "steps are missing"
        if failed:
            self._add(run, precision, f"failed: {failed}", seconds=seconds)
            return
        rows, wanted, untrained = (_rows(self._output(name, precision)) for name in (run.name, run.like, UNTRAINED))
        limit = run.tolerance or TOLERANCES[precision]
        result, apart, norm = compared(rows, wanted, untrained, limit, learns=run.name != UNTRAINED)
        peak = rows[-1]["peak_memory"]
        itself = run.like == run.name
        figures = (
            "" if itself else run.like,
            "" if itself else f"{apart:.1e} (limit {limit.loss:.0e})",
            "" if itself or run.continues else f"{norm:.1e} (limit {limit.norm:.0e})",
            f"{rows[-1]['loss']:.5f}",
            "" if peak is None else f"{peak / 2**30:.2f}",
        )
        self._add(run, precision, result, *figures, seconds=seconds)

    def _add(self, run: Run, precision: str, result: str, *figures: str, seconds: str = "") -> None:
        self.results[run.name, precision] = result.split(":")[0]
        world = "1" if run.alone else str(self.arguments.processes)
        figures = figures or ("",) * len(FIGURES)
        self.table.append((run.name, run.options.get("precision", precision), world, result, *figures, seconds))
        print(_line(self.table[-1]), flush=True)

    def _finish(self) -> int:
        wrong = [one for one in self.results.values() if one not in ("equal", "skipped")]
        counts = ", ".join(
            f"{sum(one == kind for one in self.results.values())} {kind}"
            for kind in ("equal", "off", "failed", "not run", "skipped")
        )
        summary = f"{time.strftime('%-d %B %Y')}, {conditions()}, {self.arguments.model} model: {counts}."
        print(f"\n{summary} {time.monotonic() - self.began:.0f} s.", flush=True)
        if self.arguments.document is not None:
            put_table(self.arguments.document, "fine_tuning", HEAD, self.table, summary)
        return int(bool(wrong))

    def _output(self, name: str, precision: str) -> Path:
        return self.root / "runs" / precision / name.replace(", ", "-").replace(" ", "-")

    def _fork_has_cuda(self) -> bool:
        process = self.context.Process(target=_touch_cuda)
        process.start()
        process.join()
        return process.exitcode == 0


def _write_inputs(arguments: argparse.Namespace, root: Path) -> None:
    """The model, of random weights, and the data: documents in which few tokens occur."""
    from dlm_bridge.data.indexed import IndexedWriter
    from dlm_bridge.loading.source import ModelSource
    from dlm_bridge.train.config import TrainConfig
    from dlm_bridge.train.setup import model_source

    name = arguments.model
    vocabulary, shape = VOCABULARIES[name], SHAPES[name]
    config = ILLADA | shape | {"vocab_size": vocabulary, "mask_token_id": vocabulary - 1}
    folder = root / "config"
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": shape["num_attention_heads"]}))
    model = ModelSource(str(folder), seed=0).load()
    model.save_pretrained(root / "model")
    if "bf16" in arguments.precision and importlib.util.find_spec("bitsandbytes"):
        quantized = TrainConfig.from_flags(
            model=str(root / "model"),
            data=["mock"],
            output="o",
            precision="bf16",
            **LORA,
            lora_quantize="4bit",
        )
        model_source(quantized).load().dequantize().save_pretrained(root / "rounded")
    numbers = np.random.default_rng(0)
    length = SEQUENCES[name]
    with IndexedWriter(root / "data/pair", np.dtype(np.uint16)) as writer:
        for _ in range(STEPS * 8 + 16):
            writer.add(numbers.integers(5, 5 + TOKENS, length).astype(np.uint16), [length])


def _train(options: dict[str, Any], environment: dict[str, str], transport: str, log: Path) -> None:
    """One process of a run."""
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.update(environment)
    try:
        if transport == "host" and "RANK" in environment:
            _join_through_host(environment)
        from dlm_bridge.train.accelerate.trainer import train
        from dlm_bridge.train.config import TrainConfig

        train(TrainConfig.from_flags(**options), resume=True)  # of what is not there it begins
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stderr.flush()
    os._exit(0)


def _join_through_host(environment: Mapping[str, str]) -> None:
    """A process group that Accelerate finds; its messages go through the host's memory."""
    import torch.distributed as dist

    from benchmarks.layouts import host_transport

    host_transport.register()
    dist.init_process_group(
        host_transport.NAME, rank=int(environment["RANK"]), world_size=int(environment["WORLD_SIZE"])
    )


def _touch_cuda() -> None:
    torch.zeros(1, device="cuda")


def conditions() -> str:
    """What it ran on."""
    from benchmarks.layouts.tables import conditions as of_layouts

    return of_layouts(("torch", "transformers", "accelerate", "torchao", "bitsandbytes"))


def compared(
    rows: Rows, wanted: Rows, untrained: Rows, limit: Tolerance, learns: bool = True
) -> tuple[str, float, float]:
    """Whether a run's metrics are those of another one, how far their losses are apart as a share of how far training
    has moved them from those of untrained weights, and their first gradient norms."""
    pairs = [(row["loss"], other["loss"]) for row, other in zip(wanted, untrained, strict=True)]
    learned = max(abs(loss - other) for loss, other in pairs)
    apart, loss, other, step = max(
        (abs(row["loss"] - other["loss"]) / (learned or math.inf), row["loss"], other["loss"], step)
        for step, (row, other) in enumerate(zip(rows, wanted[: len(rows)], strict=True), 1)
    )
    norm = abs(rows[0]["grad_norm"] / wanted[0]["grad_norm"] - 1)
    for number, (reached, before) in enumerate(pairs, 1):
        if learns and reached > DIVERGED * before:
            return f"off: step {number} of the reference diverges, from {before:.4f} to {reached:.4f}", apart, norm
    if learns and learned < LEARNED * untrained[0]["loss"]:
        return f"off: training moved the loss by {learned:.1e} only", apart, norm
    if apart > limit.loss:
        return f"off: the loss of step {step} is {loss:.4f}, not {other:.4f}", apart, norm
    return "equal" if norm <= limit.norm else "off: other gradients", apart, norm


def _earlier(run: Run) -> set[str]:
    """The runs that must have ended before it."""
    return {UNTRAINED, run.like, run.continues} - {run.name, ""}


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rows(output: Path) -> Rows:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
