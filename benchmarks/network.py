"""Cost of a network between two GPUs: training steps over NVLink, and as on two nodes that are connected by TCP.

    python benchmarks/network.py --model 135m --batch 8

NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 send every collective operation through a socket, which here is the loopback
interface: latency and bandwidth are those of the kernel's TCP, not of a network card. Each row is one layout of the
Accelerate engine, the same step on both sides, one after the other: tokens per second of a GPU, and the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from launching import launch

SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
SIDES = {"one node": {}, "two nodes": SOCKETS}
LAYOUTS = {"ddp": ("--set", "sharding=none"), "fsdp2": ("--set", "sharding=fsdp")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="135m")
    parser.add_argument("--batch", type=int, default=8, help="rows of a GPU")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--limit", type=float, default=240, help="seconds for a side (%(default)s)")
    arguments = parser.parse_args()
    for layout in arguments.layouts:
        row: dict[str, object] = {"model": arguments.model, "layout": layout}
        speeds = []
        for side, environment in SIDES.items():
            found = tokens_per_second(arguments, LAYOUTS[layout], environment)
            row[side] = found
            if isinstance(found, float):
                speeds.append(found)
        if len(speeds) == len(SIDES):
            row["ratio"] = round(speeds[1] / speeds[0], 3)
        print(json.dumps(row), flush=True)


def tokens_per_second(
    arguments: argparse.Namespace, layout: tuple[str, ...], environment: dict[str, str]
) -> float | str:
    """Tokens per second of a GPU, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        log, result = Path(folder) / "log.txt", Path(folder) / "result.json"
        words = ["--model", arguments.model, "--batch", str(arguments.batch), "--steps", str(arguments.steps)]
        words += ["--micro-batches", str(arguments.micro_batches), "--seq-length", str(arguments.seq_length)]
        words += ["--precision", arguments.precision, "--only", "ours", "--json", str(result), *layout]
        script = str(Path(__file__).with_name("train_accelerate.py"))
        problem = launch(script, 2, words, arguments.limit, log, {**os.environ, **environment})
        if problem is not None:
            return problem
        return float(json.loads(result.read_text().splitlines()[-1])["ours"]["tokens_per_s"])


if __name__ == "__main__":
    main()
