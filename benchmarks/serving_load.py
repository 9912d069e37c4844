"""Load test of `dlm-bridge serve --replicas N`: is any text lost or mixed up while a replica is killed?

    python benchmarks/serving_load.py demo-output/llada --replicas 2 --seconds 120 --kill-after 60

Starts the server, keeps --clients requests open for --seconds, and kills a replica after --kill-after. Every request
has its own prompt, number of tokens, temperature and seed; one in three is a stream, and the prompts of a group have
the same beginning. A request must be answered; only a stream that had begun may end with an error, which is counted,
after what must be the beginning of its text, and is sent again. Every text is then compared with that of `generate`
for its prompt, settings and seed. --serve gives the server further words, such as --serve=--device=cpu.

Prints a JSON object. Exits with 1 if a request failed, a text differs, or the replica was not replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402
import psutil  # noqa: E402

SHARED = 140  # characters that the prompts of a group begin with
GROUPS = 8
SETTINGS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 8},
    {"max_tokens": 16, "temperature": 0.8},
    {"max_tokens": 32, "temperature": 1.0},
)
BATCH = 32  # texts that are sampled together for the comparison
START_S = 900.0  # maximum time until the server answers
KILLS = 1


@dataclass
class Results:
    """What the clients got."""

    texts: dict[int, str] = field(default_factory=dict)  # by the request's number
    broken: list[tuple[int, str]] = field(default_factory=list)  # beginnings of streams that ended with an error
    failures: list[str] = field(default_factory=list)
    longest_s: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--kill-after", type=float, default=60.0, help="seconds until a replica is killed")
    parser.add_argument("--clients", type=int, default=32, help="requests that are open at once")
    parser.add_argument("--serve", action="append", default=[], metavar="WORD", help="option of the server")
    options = parser.parse_args()
    results = Results()
    with serving(options.folder, options.replicas, options.serve) as (process, address):
        began = time.monotonic()
        asyncio.run(load(process, address, options, results))
        seconds = time.monotonic() - began
        ready = wait_ready(address, options.replicas)
        metrics = counters(address)
    texts = results.texts
    wrong = different(options.folder, options.serve, results)
    report = {
        "seconds": round(seconds, 1),
        "requests": len(texts),
        "failures": results.failures[:5],
        "different": wrong[:5],
        "broken_streams": len(results.broken),
        "retries": int(metrics["dlm_bridge_router_retries_total"]),
        "replaced": int(metrics["dlm_bridge_router_replaced_total"]),
        "ready": ready,
        "longest_s": round(results.longest_s, 1),
        "requests_per_s": round(len(texts) / seconds, 1),
    }
    print(json.dumps(report), flush=True)
    return int(bool(results.failures or wrong or report["replaced"] != KILLS or ready != options.replicas))


@contextmanager
def serving(folder: Path, replicas: int, words: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server while the block runs, and its address. Its processes must end with it."""
    command = [sys.executable, "-m", "dlm_bridge.cli", "serve", str(folder), "--port", "0"]
    command += ["--replicas", str(replicas), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        if found is None:
            raise SystemExit(f"the server did not start: exit code {process.wait()}")
        yield process, found[0]
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait()
        _, left = psutil.wait_procs(family, timeout=10)
        for orphan in left:
            orphan.kill()
        if left:
            raise SystemExit(f"{len(left)} processes outlived the server")


def request_of(number: int) -> dict[str, Any]:
    """A request whose text can only be its own."""
    group, own = random.Random(number % GROUPS), random.Random(number)
    beginning = "".join(group.choice("abcdef ") for _ in range(SHARED))
    prompt = f"{beginning} {number} " + "".join(own.choice("abcdef ") for _ in range(own.randrange(1, 40)))
    return {"prompt": prompt, "seed": number, "stream": number % 3 == 0, **SETTINGS[number % len(SETTINGS)]}


async def load(process: subprocess.Popen[str], address: str, options: argparse.Namespace, results: Results) -> None:
    """Send requests from all clients until the time is over; after a part of it, kill a replica."""
    loop = asyncio.get_running_loop()
    ending, numbers = loop.time() + options.seconds, iter(range(10**9))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    async def kill() -> None:
        await asyncio.sleep(options.kill_after)
        psutil.Process(process.pid).children()[0].send_signal(signal.SIGKILL)

    async def client(http: httpx.AsyncClient) -> None:
        while loop.time() < ending:
            number, began = next(numbers), loop.time()
            while not await ask(http, number, results):
                pass
            results.longest_s = max(results.longest_s, loop.time() - began)

    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits, trust_env=False) as http:
        await asyncio.gather(kill(), *(client(http) for _ in range(options.clients)))


async def ask(http: httpx.AsyncClient, number: int, results: Results) -> bool:
    """Send a request. Returns False if it must be sent again: its stream ended with an error."""
    given = request_of(number)
    try:
        if not given["stream"]:
            answer = await http.post("/v1/completions", json=given)
            if answer.status_code != 200:
                results.failures.append(f"{number}: {answer.status_code} {answer.text[:200]}")
            else:
                results.texts[number] = answer.json()["choices"][0]["text"]
            return True
        pieces: list[str] = []
        async with http.stream("POST", "/v1/completions", json=given) as answer:
            if answer.status_code != 200:
                results.failures.append(f"{number}: {answer.status_code} {(await answer.aread())[:200]!r}")
                return True
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    results.texts[number] = "".join(pieces)
                    return True
                if line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if event.get("error", {}).get("code") == "replica_lost":
                        results.broken.append((number, "".join(pieces)))
                        return False
                    pieces.append(event["choices"][0]["text"])
        results.failures.append(f"{number}: the stream ended without [DONE]")
    except (httpx.HTTPError, KeyError, ValueError) as error:
        results.failures.append(f"{number}: {error!r}")
    return True


def wait_ready(address: str, replicas: int) -> int:
    """Number of replicas that are ready, once all are or the time is over."""
    deadline = time.monotonic() + START_S
    while (ready := httpx.get(f"{address}/health").json()["ready"]) < replicas and time.monotonic() < deadline:
        time.sleep(0.5)
    return int(ready)


def counters(address: str) -> dict[str, float]:
    """Metrics by name, summed over their labels."""
    found: dict[str, float] = defaultdict(float)
    for line in httpx.get(f"{address}/metrics", timeout=60).text.splitlines():
        if not line.startswith("#"):
            found[re.split(r"[{ ]", line, maxsplit=1)[0]] += float(line.rpartition(" ")[2])
    return found


def different(folder: Path, words: Sequence[str], results: Results) -> list[str]:
    """Requests whose text is not that of `generate`."""
    from dlm_bridge.generation.offline import write_texts
    from dlm_bridge.generation.token_sampling import row_seeds
    from dlm_bridge.loading import Placement, load_model

    loaded = load_model(folder, Placement("cpu") if "--device=cpu" in words else Placement())
    numbers, wanted = defaultdict(list), dict[int, str]()
    for number in results.texts:
        numbers[number % len(SETTINGS)].append(number)
    for kind, group in numbers.items():
        settings = {name.replace("max_tokens", "gen_length"): value for name, value in SETTINGS[kind].items()}
        for start in range(0, len(group), BATCH):
            part = group[start : start + BATCH]
            prompts = [loaded.tokenizer(request_of(number)["prompt"])["input_ids"] for number in part]
            seeds = [row_seeds(number, [prompt])[0] for number, prompt in zip(part, prompts, strict=True)]
            texts = write_texts(loaded.model, loaded.tokenizer, prompts, {**settings, "seed": seeds}).texts
            wanted.update(zip(part, texts, strict=True))
    wrong = [
        f"{number}: {text!r}, not {wanted[number]!r}"
        for number, text in results.texts.items()
        if text != wanted[number]
    ]
    for number, text in results.broken:
        if number in wanted and not wanted[number].startswith(text):
            wrong.append(f"{number}: {text!r}, not the beginning of {wanted[number]!r}")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
