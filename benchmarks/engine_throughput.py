"""Throughput of a block diffusion model in `dlm-bridge serve` and in SGLang: the same weights, prompts and requests.

    python benchmarks/engine_throughput.py --output DIR --rows 1 16 64 200 -- python -m sglang.launch_server \\
        --dllm-algorithm LowConfidence
    python benchmarks/engine_throughput.py --output DIR --only ours            one after the other, where SGLang has
    python benchmarks/engine_throughput.py --output DIR --only engine -- COMMAND    an environment of its own

The model is LLaDA2.0-mini's shape or SDAR-4B's, with random weights in bf16, saved to DIR/model (33 GB or 8 GB) with a
tokenizer that has a word for each token. Greedy, as many new tokens of each request, whatever they are. With random
weights no token is above SGLang's threshold of 0.95, so that each forward pass commits one token of each row; ours is
told to do the same. SGLang runs one more of a block, which writes its keys and values; ours are written in the next
block's first one.

Both are servers, one after the other, and --rows says how many requests are sent at once to /v1/completions, streamed,
with prompts of --prompt-tokens; --long-prompt adds a case of longer prompts. Each case is run twice, with other
prompts, of which the first time does not count: it compiles and records. The client is this script's, or
SGLang's own `sglang.benchmark.serving` with --client PYTHON, of an environment that has it.

SGLang knows LLaDA2's config by the checkpoint's own configuration_llada2_moe.py: --code takes a folder that has it, as
an exported one does. SDAR needs none.

A line for each server and case: seconds, new tokens per second, the median time to the first token; then the ratios.
DIR/rows.jsonl has the same lines, and what it has is not run again. To the engine's command are added the folder, the
port and the number of rows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.check_engine import request, running  # noqa: E402

LONG_ROWS = 16  # at the most, in the case of long prompts
# Runs SGLang's client for each line of arguments: its imports take longer than most cases.
PEER_CLIENT = """
import contextlib, json, runpy, sys
for line in sys.stdin:
    sys.argv = ["serving", *json.loads(line)]
    with contextlib.redirect_stdout(sys.stderr):
        runpy.run_module("sglang.benchmark.serving", run_name="__main__")
    print("done", flush=True)
"""
Case = tuple[int, int]  # requests, tokens of each prompt
Client = Callable[[str, str, Case, int], dict[str, float]]  # address, name of the model, case, seed: figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--size", choices=("llada2-mini", "sdar-4b", "llada2-tiny", "sdar-tiny"), default="llada2-mini"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[64], help="requests at once, a case each")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument(
        "--long-prompt", type=int, help=f"tokens of a prompt in one more case, of {LONG_ROWS} requests"
    )
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--only", choices=("ours", "engine"))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of our sampler")
    parser.add_argument("--client", type=shlex.split, help="the Python that has SGLang, whose client is then used")
    parser.add_argument("--code", type=Path, help="a folder with the .py files and auto_map of the public checkpoint")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a server's start")
    parser.add_argument("engine", nargs="*", metavar="COMMAND", help="after --: starts the engine")
    options = parser.parse_args()
    if not options.engine and options.only != "ours":
        parser.error("the engine's command is missing: -- python -m sglang.launch_server ...")
    options.output.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options.port = free.getsockname()[1]
    cases = [(rows, options.prompt_tokens) for rows in options.rows]
    if options.long_prompt:
        cases.append((min(max(options.rows), LONG_ROWS), options.long_prompt))
    folder = save(options)
    commands = {"ours": our_server(options, folder, cases), "engine": engine_server(options, folder)}
    with contextlib.ExitStack() as stack:
        client = peer_client(options, stack) if options.client else own_client(options)
        for way in [options.only] if options.only else commands:
            measure(options, way, commands[way], cases, client)
    for case in cases:
        ours, engine = (found(options, way, case) for way in ("ours", "engine"))
        if ours and engine:
            speed = ours["tokens_per_s"] / engine["tokens_per_s"]
            first = engine["first_token_ms"] / ours["first_token_ms"]
            print(
                f"ratio: {case[0]} requests, {case[1]} prompt tokens: {speed:.2f}, first token {first:.2f}", flush=True
            )


def save(options: argparse.Namespace) -> Path:
    """The folder of the model, written if it is not there."""
    folder: Path = options.output / "model"
    done = folder / "tokenizer_config.json"  # written last
    if not done.exists():
        import torch

        from benchmarks.generation_peers import model_of_shape

        began = time.perf_counter()
        model = model_of_shape(options.size, "cuda" if torch.cuda.is_available() else "cpu")
        made = time.perf_counter()
        model.save_pretrained(folder)
        # The client's prompts must not contain the special tokens, which have the last ids.
        words, plain = model.config.vocab_size, model.config.vocab_size - model.config.vocab_size // 16
        write_words(options.output / "prompt_tokenizer", plain)
        write_words(folder, words)
        print(f"model: made in {made - began:.0f} s, saved in {time.perf_counter() - made:.0f} s", flush=True)
    if options.code is not None:
        for file in options.code.glob("*.py"):
            shutil.copy(file, folder)
        config, theirs = (json.loads((one / "config.json").read_text()) for one in (folder, options.code))
        (folder / "config.json").write_text(json.dumps({**theirs, **config, "auto_map": theirs["auto_map"]}))
    return folder


def write_words(folder: Path, size: int) -> None:
    """A tokenizer whose tokens are the words w0, w1, ...: each token has a text, and each text these tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def our_server(options: argparse.Namespace, folder: Path, cases: list[Case]) -> list[str]:
    rows, longest = (max(case[number] for case in cases) for number in (0, 1))
    command = [sys.executable, "-m", "dlm_bridge.cli", "serve", str(folder), "--port", str(options.port)]
    command += [
        "--batch-size",
        str(rows),
        "--queue-size",
        str(rows),
        "--max-length",
        str(longest + options.new_tokens),
    ]
    block = json.loads((folder / "config.json").read_text())["block_size"]
    sdar = options.size.startswith("sdar")
    steps = [f"denoising_steps={block}"] if sdar else [f"steps={block}", "threshold=1.0"]
    for setting in ["temperature=0.0", f"block_length={block}", *steps, *options.set]:
        command += ["--set", setting]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return command


def engine_server(options: argparse.Namespace, folder: Path) -> list[str]:
    command = [*options.engine, "--model-path", str(folder), "--trust-remote-code", "--dtype", "bfloat16"]
    command += ["--max-running-requests", str(max(options.rows)), "--host", "127.0.0.1", "--port", str(options.port)]
    return [*command, "--skip-server-warmup"]


def measure(options: argparse.Namespace, way: str, command: list[str], cases: list[Case], client: Client) -> None:
    """Start the server and run the cases that are not in rows.jsonl."""
    missing = [case for case in cases if not found(options, way, case)]
    if not missing:
        return
    url = f"http://127.0.0.1:{options.port}"
    with running(command, url, options.timeout, options.output / f"{way}.log") as name:
        body = {"model": name, "prompt": "w1 w2 w3", "max_tokens": options.new_tokens, "ignore_eos": True}
        tokens = request(f"{url}/v1/completions", body | {"temperature": 0})["usage"]["completion_tokens"]
        if tokens != options.new_tokens:
            raise SystemExit(f"{way} gave {tokens} new tokens, not {options.new_tokens}")
        for case in missing:
            client(url, name, case, 1)
            line = key(options, way, case) | {"client": "SGLang's" if options.client else "own"}
            line |= client(url, name, case, 2)
            print(json.dumps(line), flush=True)
            with (options.output / "rows.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")


def key(options: argparse.Namespace, way: str, case: Case) -> dict[str, Any]:
    names = ("way", "size", "rows", "prompt_tokens", "new_tokens")
    return dict(zip(names, (way, options.size, *case, options.new_tokens), strict=True))


def found(options: argparse.Namespace, way: str, case: Case) -> dict[str, Any]:
    """The last line of rows.jsonl with these figures, or nothing."""
    file = options.output / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return next((row for row in reversed(rows) if key(options, way, case).items() <= row.items()), {})


def own_client(options: argparse.Namespace) -> Client:
    """Sends all requests of a case at once, each as a stream."""
    import httpx

    words = len(json.loads((options.output / "prompt_tokenizer" / "tokenizer.json").read_text())["model"]["vocab"])

    async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> float:
        """Seconds to the first token."""
        began, first = time.perf_counter(), 0.0
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "choices" not in event:
                    raise SystemExit(f"the server answered {line}")
                if not first and event["choices"][0]["text"]:
                    first = time.perf_counter() - began
        if not first:
            raise SystemExit(f"a request got no text: status {answer.status_code}")
        return first

    async def send(url: str, name: str, case: Case, seed: int) -> dict[str, float]:
        rows, size = case
        numbers = random.Random(seed)
        prompts = [" ".join(f"w{numbers.randrange(words)}" for _ in range(size)) for _ in range(rows)]
        body = {"model": name, "max_tokens": options.new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as http:
            began = time.perf_counter()
            first = await asyncio.gather(*(ask(http, body | {"prompt": prompt}) for prompt in prompts))
            seconds = time.perf_counter() - began
        return figures(seconds, rows * options.new_tokens / seconds, 1000 * statistics.median(first))

    return lambda *given: asyncio.run(send(*given))


def peer_client(options: argparse.Namespace, stack: contextlib.ExitStack) -> Client:
    """SGLang's client, in a process that stays."""
    results, log = options.output / "client.jsonl", options.output / "client.log"
    process = subprocess.Popen(
        [*options.client, "-c", PEER_CLIENT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stack.enter_context(log.open("w")), text=True,
    )  # fmt: skip
    stack.callback(process.kill)

    def send(url: str, name: str, case: Case, seed: int) -> dict[str, float]:
        rows, size = case
        arguments: dict[str, Any] = {
            "backend": "vllm",  # OpenAI's API
            "base-url": url,
            "model": options.output / "prompt_tokenizer",
            "served-model-name": name,
            "tokenizer": options.output / "prompt_tokenizer",
            "dataset-name": "random-ids",
            "random-input-len": size,
            "random-output-len": options.new_tokens,
            "random-range-ratio": 1,
            "num-prompts": rows,
            "warmup-requests": 0,
            "seed": seed,
            "output-file": results,
        }
        words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([*words, "--disable-tqdm"]) + "\n")
        process.stdin.flush()
        if process.stdout.readline() != "done\n":
            raise SystemExit(f"SGLang's client ended: {log.read_text()[-4000:]}")
        result = json.loads(results.read_text().splitlines()[-1])
        if result["completed"] != rows:
            raise SystemExit(f"{result['completed']} of {rows} requests were answered: {log.read_text()[-4000:]}")
        return figures(result["duration"], result["output_throughput"], result["median_ttft_ms"])

    return send


def figures(seconds: float, tokens_per_s: float, first_token_ms: float) -> dict[str, float]:
    values = {"seconds": seconds, "tokens_per_s": tokens_per_s, "first_token_ms": first_token_ms}
    return {name: round(value, 3 if name == "seconds" else 1) for name, value in values.items()}


if __name__ == "__main__":
    main()
