"""`dlm-bridge serve --replicas` with models: its texts under load while a replica is killed, and the end of all
processes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dlm_bridge.generation.offline import write_texts
from dlm_bridge.loading import Placement, load_model
from tests.cli.conftest import llada  # noqa: F401  fixture

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from tests.cli.test_serve import WAIT_S, serving  # noqa: E402

ROOT = Path(__file__).parents[2]
KEY = {"Authorization": "Bearer secret"}


@pytest.mark.slow
def test_a_load_test_with_a_killed_replica(llada: Path) -> None:  # noqa: F811
    command = [sys.executable, "benchmarks/serving_load.py", str(llada), "--serve=--device=cpu", "--clients=8"]
    done = subprocess.run(
        [*command, "--seconds=10", "--kill-after=3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"replaced": 1' in done.stdout
    assert "replica 0 was killed" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "words", "processes"),
    [
        (signal.SIGTERM, 0, ("--replicas", "2"), 2),
        (signal.SIGINT, 130, ("--replicas", "2"), 2),
        (signal.SIGKILL, -9, ("--replicas", "1", "--nproc-per-node", "2"), 3),
    ],
)
def test_no_process_outlives_the_server(
    llada: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
    words: tuple[str, ...],
    processes: int,
) -> None:
    """Nor the text of a request depends on the replica."""
    loaded = load_model(llada, Placement("cpu"))
    monkeypatch.setenv("DLM_BRIDGE_PLATFORM", "cpu")
    settings = {"temperature": 1.0, "seed": 3}
    wanted = write_texts(
        loaded.model, loaded.tokenizer, [loaded.tokenizer("the")["input_ids"]], {"gen_length": 16, **settings}
    )
    with serving(llada, *words, device=None) as (process, address):
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == processes
        assert all("secret" not in " ".join(each.cmdline()) for each in family)
        request = {"prompt": "the", "max_tokens": 16, **settings}
        answer = httpx.post(f"{address}/completions", json=request, headers=KEY, timeout=WAIT_S)
        assert answer.json()["choices"][0]["text"] == wanted.texts[0]
        with httpx.stream(
            "POST",
            f"{address}/completions",
            json={"prompt": "the", "max_tokens": 248, "n": 64, "stream": True, "block_length": 8},
            headers=KEY,
            timeout=WAIT_S,
        ) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(number)
            if number != signal.SIGKILL:
                assert re.search('"code": ?"closed"', [line for line in lines if line][-1])
        out, err = process.communicate(timeout=WAIT_S)
        assert not psutil.wait_procs(family, timeout=30)[1]
    assert process.returncode == code
    assert "Traceback" not in out + err
    assert err.count("interrupted") == (number == signal.SIGINT)
