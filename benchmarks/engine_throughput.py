"""Throughput of a block diffusion model in `generate` and in SGLang: the same weights, prompts of the same lengths.

    python benchmarks/engine_throughput.py --output DIR -- python -m sglang.launch_server --dllm-algorithm NAME
    python benchmarks/engine_throughput.py --output DIR --only ours              one after the other, where SGLang has
    python benchmarks/engine_throughput.py --output DIR --only engine -- COMMAND      an environment of its own

The model is LLaDA2.0-mini's shape or SDAR-4B's, with random weights in bf16, saved to DIR/model (33 GB or 8 GB).
Greedy, as many new tokens of each row, whatever they are. With random weights no token is above SGLang's threshold of
0.95, so that each forward pass commits one token of each row; ours are told to do the same. SGLang runs one more of a
block, which writes its keys and values; ours are written in the next block's first one. Each way takes the prompts
twice, of which the first time does not count: it compiles and records.

SGLang knows LLaDA2's config by the checkpoint's own configuration_llada2_moe.py: --code takes a folder that has it, as
an exported one does. SDAR needs none.

A line for each way: seconds, new tokens per second; then the ratio. DIR/rows.jsonl has the same lines. To the engine's
command are added the folder, the port and the number of rows.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.check_engine import request, running  # noqa: E402

PORT = 30477
SHORTEST, LONGEST = 40, 240  # tokens of a prompt, most of them short, as GSM8K's


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--size", choices=("llada2-mini", "sdar-4b", "llada2-tiny", "sdar-tiny"), default="llada2-mini"
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--only", choices=("ours", "engine"))
    parser.add_argument("--execution", choices=("eager", "graph", "compiled"), default="graph", help="of ours")
    parser.add_argument("--code", type=Path, help="a folder with the .py files and auto_map of the public checkpoint")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for the engine's start")
    parser.add_argument("engine", nargs="*", metavar="COMMAND", help="after --: starts the engine")
    options = parser.parse_args()
    if not options.engine and options.only != "ours":
        parser.error("the engine's command is missing: -- python -m sglang.launch_server ...")
    options.output.mkdir(parents=True, exist_ok=True)
    if options.only != "engine":
        measure_ours(options)
    if options.only != "ours":
        measure_engine(options)
    rows = [json.loads(line) for line in (options.output / "rows.jsonl").read_text().splitlines()]
    last = {row["way"]: row for row in rows if all(row[name] == getattr(options, name) for name in ("size", "rows"))}
    if len(last) == 2:
        print(f"ratio: {last['engine']['seconds'] / last['ours']['seconds']:.2f}", flush=True)


def prompts(options: argparse.Namespace, seed: int) -> list[list[int]]:
    """As many for each seed, and of the same lengths."""
    lengths, tokens = random.Random(0), random.Random(seed)
    sizes = [SHORTEST + int((LONGEST - SHORTEST) * lengths.random() ** 2) for _ in range(options.rows)]
    return [[tokens.randrange(400) for _ in range(size)] for size in sizes]


def measure_ours(options: argparse.Namespace) -> None:
    """Save the model and run `generate`."""
    import torch

    from benchmarks.generation_peers import model_of_shape
    from benchmarks.throughput import left_padded

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of_shape(options.size, device)
    folder = options.output / "model"
    if not folder.exists():
        began = time.perf_counter()
        model.save_pretrained(folder)
        print(f"saved in {time.perf_counter() - began:.0f} s", flush=True)
    block = model.config.block_size
    settings: dict[str, Any] = {"temperature": 0.0, "eos_token_id": None, "pad_token_id": 0, "block_length": block}
    sdar = options.size.startswith("sdar")
    settings |= {"denoising_steps": block} if sdar else {"steps": block, "threshold": 1.0}

    def run(seed: int) -> None:
        tokens, real = left_padded(prompts(options, seed), device)
        size, execution = options.new_tokens, options.execution
        model.generate(tokens, attention_mask=real, gen_length=size, execution=execution, **settings).tolist()

    report(options, "ours", run)


def measure_engine(options: argparse.Namespace) -> None:
    """Start the engine and send all prompts at once."""
    folder = options.output / "model"
    if options.code is not None:
        for file in options.code.glob("*.py"):
            shutil.copy(file, folder)
        config, theirs = (json.loads((one / "config.json").read_text()) for one in (folder, options.code))
        (folder / "config.json").write_text(json.dumps({**theirs, **config, "auto_map": theirs["auto_map"]}))
    url = f"http://127.0.0.1:{PORT}"
    command = [*options.engine, "--model-path", str(folder), "--trust-remote-code", "--skip-tokenizer-init"]
    command += ["--dtype", "bfloat16", "--max-running-requests", str(options.rows), "--disable-radix-cache"]
    command += ["--host", "127.0.0.1", "--port", str(PORT), "--skip-server-warmup"]

    def run(seed: int) -> None:
        sampling = {"max_new_tokens": options.new_tokens, "temperature": 0, "ignore_eos": True}
        answer: Any = request(f"{url}/generate", {"input_ids": prompts(options, seed), "sampling_params": sampling})
        counts = {len(answer[number]["output_ids"]) for number in range(options.rows)}
        if counts != {options.new_tokens}:
            raise SystemExit(f"the engine gave {sorted(counts)} new tokens, not {options.new_tokens}")

    with running(command, url, options.timeout, options.output / "engine.log"):
        report(options, "engine", run)


def report(options: argparse.Namespace, way: str, run: Callable[[int], None]) -> None:
    run(1)
    began = time.perf_counter()
    run(2)
    seconds = time.perf_counter() - began
    line = {
        "way": way,
        "size": options.size,
        "rows": options.rows,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(options.rows * options.new_tokens / seconds, 1),
    }
    print(json.dumps(line), flush=True)
    with (options.output / "rows.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
