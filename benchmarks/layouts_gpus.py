"""Everything about layouts that a machine's one, two or four GPUs can show, in one command and at once.

    python benchmarks/layouts_gpus.py --output layouts --seconds 240     cells2, cells4, runs: a .json and .md of each

On two GPUs or more, layouts of two ranks talk through NCCL; those of four share GPUs where there are fewer, and talk
through the host (layouts_transport.py). With one GPU all of them do. What has no result in docs/support_matrix.md yet
comes first. The three parts run side by side, because most of their time is Python's and the compiler's.
Then: python benchmarks/support_matrix.py --gpu cells2.json cells4.json --runs runs.json
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent
TWO = ("^fsdp", "^cp2 (a2a|allgather):", "nemotron|deepseek_v3", "^cp2 p2p:", "packed$")
FOUR = (r"a2a\+p2p", "^cp2 p2p x", "^fsdp .* x (tp2|cp2)", "^cp4 (a2a|allgather):", "^cp4 p2p:", r"etp2: .*packed$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder")
    parser.add_argument("--seconds", type=float, default=240, help="what has not begun by then is not run")
    parser.add_argument("--parts", default="cells2,cells4,runs")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    devices = torch.cuda.device_count()
    scripts = {
        "cells2": ("layouts.py", 2, ["--references", "/tmp/layouts.references", *_cells(TWO)]),
        "cells4": ("layouts.py", 4, ["--references", "/tmp/layouts.references", *_cells(FOUR)]),
        "runs": ("layouts_runs.py", 2, []),
    }
    environment = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    running = {}
    for name in options.parts.split(","):
        script, ranks, arguments = scripts[name]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "20"]
        command += ["--nproc-per-node", str(ranks), str(HERE / script), "--output", str(options.output / name)]
        command += ["--seconds", str(options.seconds), *arguments]
        command += ["--transport", "direct" if ranks <= devices else "host"]
        log = (options.output / f"{name}.log").open("w")
        running[name] = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT
        )
    deadline = time.time() + options.seconds + 45
    while time.time() < deadline and any(process.poll() is None for process in running.values()):
        time.sleep(0.2)
    late = {name: process for name, process in running.items() if process.poll() is None}
    for process in late.values():
        process.terminate()  # torchrun gives its processes 30 seconds, then kills them
    for name, process in late.items():
        process.wait()
        print(f"{name}: stopped after {options.seconds + 45:.0f} s", flush=True)
    for name in running:
        table = options.output / f"{name}.md"
        print(f"\n{name}: {table.read_text() if table.exists() else 'no table: see ' + name + '.log'}", flush=True)


def _cells(patterns: tuple[str, ...]) -> list[str]:
    return [word for pattern in patterns for word in ("--cells", pattern)]


if __name__ == "__main__":
    main()
