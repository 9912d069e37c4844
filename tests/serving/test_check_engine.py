"""scripts/check_engine.py, with our own server as the engine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_engine.py"
ROWS = [{"prompt": "a"}, {"prompt": "return b + c"}, {"messages": [{"role": "user", "content": "def"}]}]
TEXTS = ROWS[:2]


def check(model: Path, folder: Path, rows: list[dict[str, Any]], *engine: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [str(model), "--prompts", str(prompts), "--new-tokens", "8", "--url", f"http://127.0.0.1:{port}", "--"]
    command = [sys.executable, str(SCRIPT), *words, sys.executable, *engine, "--port", port]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_texts_of_the_same_model_are_equal_and_of_another_are_not(qwen3: Path, llada: Path, tmp_path: Path) -> None:
    serve = ("-m", "dlm_bridge.cli", "serve")
    same = check(qwen3, tmp_path, ROWS, *serve, str(qwen3))
    assert (same.returncode, "3 of 3 texts are equal" in same.stdout) == (0, True), same.stdout + same.stderr
    other = check(qwen3, tmp_path, TEXTS, *serve, str(llada), "--set", "block_length=8")
    assert (other.returncode, "row 1, from character" in other.stdout) == (1, True), other.stdout + other.stderr


def test_an_engine_that_does_not_start(tmp_path: Path) -> None:
    found = check(tmp_path, tmp_path, TEXTS, "-c", "raise SystemExit('no such engine')")
    assert (found.returncode, "no such engine" in found.stderr) == (1, True)
