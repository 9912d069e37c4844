"""An engine that speaks OpenAI's API serves a Hub folder: do its greedy texts equal those of `dlm-bridge generate`?

    dlm-bridge import demo-output/smollm2 megatron --tp 2
    dlm-bridge export megatron exported
    python scripts/check_engine.py exported --prompts prompts.jsonl --new-tokens 64 --url http://127.0.0.1:8000 -- \\
        vllm serve exported --dtype float32 --port 8000

Rows of --prompts hold "messages" or "prompt", of any length. The engine is started, asked for all rows at once, and
stopped. A line says how many texts are equal; where one is not, both are shown from the first difference on. Greedy
texts of two programs are equal where rounding decides no token, so give the engine fp32. DiffusionGemma begins from
random tokens: take one that is certain of its answers, such as one fine-tuned on them. Exits with 1 where any differs.

A diffusion model's texts depend on its sampler: `--set NAME=VALUE` gives `generate` the engine's own setting. SGLang's
LowConfidence commits every token above its threshold of 0.95, one at least, until a block has no mask:
`--set threshold=0.95` of SDAR's sampler, and what LLaDA2's does by itself. Where the engine's machine has
no dlm-bridge, write the texts elsewhere with `generate --jsonl PROMPTS --output TEXTS` and give --expected TEXTS.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SHOWN = 3  # texts that differ


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the Hub folder that the engine serves")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a prompt or messages a row")
    parser.add_argument("--new-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--url", required=True, help="where the engine listens, such as http://127.0.0.1:8000")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for its start (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of our sampler")
    parser.add_argument("--expected", type=Path, help="texts that `generate --output` wrote; otherwise made here")
    parser.add_argument("--log", type=Path, help="file of what the engine prints; otherwise shown where it fails")
    parser.add_argument("engine", nargs="+", metavar="COMMAND", help="after --: starts the engine")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.prompts.read_text(encoding="utf-8").splitlines()]
    log = given.log or Path(tempfile.mkdtemp()) / "engine.log"
    with running(given.engine, given.url, given.timeout, log) as name:
        began = time.monotonic()
        with ThreadPoolExecutor(len(rows)) as threads:
            found = list(threads.map(lambda row: ask(given.url, name, row, given.new_tokens), rows))
        print(f"engine: {len(rows)} texts, {time.monotonic() - began:.1f} s", flush=True)
    wanted = texts(given.expected) if given.expected else expected(given)
    if len(wanted) != len(rows):
        raise SystemExit(f"{given.expected}: {len(wanted)} texts for the {len(rows)} prompts of {given.prompts}")
    differ = [number for number, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]]
    print(f"{len(rows) - len(differ)} of {len(rows)} texts are equal")
    for number in differ[:SHOWN]:
        theirs, ours = found[number], wanted[number]
        pairs = enumerate(zip(theirs, ours, strict=False))
        same = next((place for place, pair in pairs if pair[0] != pair[1]), min(len(theirs), len(ours)))
        print(f"row {number + 1}, from character {same}: {theirs[same:][:60]!r}, here {ours[same:][:60]!r}")
    return int(bool(differ))


@contextlib.contextmanager
def running(command: list[str], url: str, timeout: float, log: Path) -> Iterator[str]:
    """The engine while the block runs, as the name of its model. Raises SystemExit where it does not start."""
    with log.open("wb") as file:
        engine = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        began = time.monotonic()
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                name = request(f"{url}/v1/models")["data"][0]["id"]
                break
            if engine.poll() is not None or time.monotonic() - began > timeout:
                ended = log.read_text(encoding="utf-8", errors="replace")[-4000:]
                raise SystemExit(f"{ended}\nthe engine did not start within {time.monotonic() - began:.0f} s: {log}")
            time.sleep(0.5)
        print(f"engine: ready after {time.monotonic() - began:.0f} s", flush=True)
        yield name
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGTERM)
        try:
            engine.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()


def ask(url: str, name: str, row: dict[str, Any], new_tokens: int) -> str:
    """The engine's greedy text of a row."""
    body = {"model": name, "max_tokens": new_tokens, "temperature": 0}
    if "messages" in row:
        answer = request(f"{url}/v1/chat/completions", body | {"messages": row["messages"]})
        return str(answer["choices"][0]["message"]["content"])
    return str(request(f"{url}/v1/completions", body | {"prompt": row["prompt"]})["choices"][0]["text"])


def request(address: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    sent = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(sent, timeout=600) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        if body is None:
            raise
        raise SystemExit(f"{address}: {error.code}: {error.read().decode(errors='replace')[:500]}") from None


def expected(given: argparse.Namespace) -> list[str]:
    """The greedy texts of `dlm-bridge generate` in fp32."""
    config = json.loads((given.folder / "config.json").read_text(encoding="utf-8"))
    greedy = [] if "canvas_length" in config else ["--temperature", "0"]  # DiffusionGemma has no such setting
    settings = [word for pair in given.set for word in ("--set", pair)]
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "texts.jsonl"
        words = ["--jsonl", str(given.prompts), "--output", str(output), "--gen-length", str(given.new_tokens)]
        command = [sys.executable, "-m", "dlm_bridge.cli", "generate", str(given.folder), *words]
        subprocess.run([*command, *greedy, *settings, "--dtype", "fp32"], check=True)
        return texts(output)


def texts(file: Path) -> list[str]:
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
