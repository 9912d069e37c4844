"""Benchmarks on several GPUs end, whatever their processes wait for."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

from launching import launch  # noqa: E402

SCRIPT = """
import os, sys, time
from launching import end_after

def waits_for_another():
    time.sleep(600)

end_after(float(sys.argv[2]))
if sys.argv[1] == "raises" and os.environ["RANK"] == "1":
    raise MemoryError("out of memory")
if sys.argv[1] != "ends":
    waits_for_another()
"""


@pytest.mark.parametrize("how", ["ends", "raises", "waits"])
def test_a_launch_ends_and_says_why(how: str, tmp_path: Path) -> None:
    script, watched = tmp_path / "script.py", []
    script.write_text(SCRIPT)
    # Starting takes a while on a machine that is busy.
    limit = 2 if how == "waits" else 200
    path = {"PYTHONPATH": f"{BENCHMARKS}:{Path(BENCHMARKS).parent}"}
    found = launch(
        str(script), 2, [how, str(limit)], 60 if how == "waits" else limit, tmp_path / "log", path,
        lambda: watched.append(time.monotonic()),
    )  # fmt: skip
    assert watched
    if how == "ends":
        assert found is None
    elif how == "raises":
        assert found is not None
        assert "MemoryError: out of memory" in found
    else:
        assert found is not None
        assert "waits_for_another (script.py:6)" in found
