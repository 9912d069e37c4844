"""Everything about layouts that a machine's one, two or four GPUs can show, in one command and at once.

    python benchmarks/layouts/all_gpus.py --output layouts --seconds 240     a .json and .md of each part

On two GPUs or more, layouts of two ranks talk through NCCL; those of four share GPUs where there are fewer, and talk
through the host (host_transport.py). With one GPU all of them do. What has no result in docs/support_matrix.md yet
comes first. All parts run side by side, because most of their time is Python's and the compiler's: with few cores or
little time choose some by --parts.
Then: python benchmarks/support_matrix.py --gpu layouts/cells*.json --runs layouts/runs*.json
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
# Of layouts of two ranks and of four, and whole runs: what is launched together, in the order in which it is run.
TWO = (
    ("userbuffers", "two micro-batches at a time"),
    ("^fsdp optim:", "^fsdp optim_grads_params:", "^fsdp .* x (ep2|pp2): .*(llada|moe) (masked|block)$"),
    ("^cp2 p2p: .*_moe (masked|block)$", "^cp2 p2p: (rnd1|dream)", "^(cp2 p2p|tp2.*): llada_moe masked packed$"),
    ("^cp2 (a2a|allgather): .*_moe", "^cp2 (a2a|allgather)"),
    ("nemotron|deepseek_v3", "^fsdp", "^cp2 p2p", "packed$"),
)
FOUR = (
    ("^cp2 p2p x (pp2|ep2)",),
    ("^cp4 p2p", "^cp4 allgather", "^cp4 a2a:", "etp2: .*packed$"),
    ("^fsdp .* x (tp2|cp2)", "instances", r"a2a\+p2p", "^cp2 p2p x tp2"),
)
RUNS = (
    "as without",
    "main params start|fsdp optim:",
    "fsdp optim_grads:|fp8, delayed",
    "fsdp optim_grads_params: resumed|straggler",
    "fsdp optim_grads_params with experts",
    "fsdp optim_grads_params x ep2",
    "SIGKILL",
    "dp: resumed|fp8, current",
    "in the background|on the CPU|NaN",
    "tp2 to pp2",
    "fp8, .*(experts|fsdp)",
    "precision-aware",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--seconds", type=float, default=240, help="what has not begun by then is not run")
    parser.add_argument("--limit", type=float, help="seconds after which all is stopped; default: 45 more")
    parser.add_argument("--parts", default="", help="a regular expression on cells2_0, cells4_0, runs_0 and so on")
    options = parser.parse_args()
    began, limit = time.time(), options.limit or options.seconds + 45
    options.output.mkdir(parents=True, exist_ok=True)
    devices = torch.cuda.device_count()
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    pairs = itertools.cycle([f"{first},{first + 1}" for first in range(0, devices - 1, 2)] or ["0"])
    running = {}
    for name, (script, ranks, arguments) in _parts().items():
        if not re.search(options.parts, name):
            continue
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "20"]
        command += ["--nproc-per-node", str(ranks), str(HERE / script), "--output", str(options.output / name)]
        command += ["--seconds", str(options.seconds), *arguments]
        command += ["--transport", "direct" if ranks <= devices else "host"]
        visible = {"CUDA_VISIBLE_DEVICES": next(pairs)} if ranks == 2 and devices > 2 else {}
        log = (options.output / f"{name}.log").open("w")
        running[name] = subprocess.Popen(
            command, env={**os.environ, **environment, **visible}, stdout=log, stderr=subprocess.STDOUT
        )
    while time.time() - began < limit and any(process.poll() is None for process in running.values()):
        time.sleep(0.2)
    late = {name: process for name, process in running.items() if process.poll() is None}
    for process in late.values():
        process.terminate()  # torchrun gives its processes 30 seconds, then kills them
    for name, process in late.items():
        process.wait()
        print(f"{name}: stopped after {limit:.0f} s", flush=True)
    for name in running:
        table = options.output / f"{name}.md"
        print(f"\n{name}: {table.read_text() if table.exists() else 'no table: see ' + name + '.log'}", flush=True)


def _parts() -> dict[str, tuple[str, int, list[str]]]:
    """By name: the script, its number of ranks, and its options."""
    cells = {f"cells2_{number}": (2, each) for number, each in enumerate(TWO)}
    cells |= {f"cells4_{number}": (4, each) for number, each in enumerate(FOUR)}
    found = {
        name: ("one_step.py", ranks, ["--references", "/tmp/layouts.references", *_cells(each)])
        for name, (ranks, each) in cells.items()
    }
    return found | {f"runs_{n}": ("runs.py", 2, ["--only", each]) for n, each in enumerate(RUNS)}


def _cells(patterns: tuple[str, ...]) -> list[str]:
    return [word for pattern in patterns for word in ("--cells", pattern)]


if __name__ == "__main__":
    main()
