"""GPU results in a document: the newest of each row stays, with the launch that it is of; when a result is one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fine_tuning import Tolerance, compared
from benchmarks.layouts.cells import Cell
from benchmarks.layouts.document import merge, update_table
from dlm_bridge.errors import DlmBridgeError

EMPTY = "".join(f"<!-- {name} -->\n<!-- end of {name} -->\nkept {name}\n" for name in ("launches", "gpu", "runs"))


def cells(path: Path, date: str, *found: Cell) -> Path:
    return written(path, {"conditions": "2 ranks on a GPU", "date": date, "cells": [asdict(cell) for cell in found]})


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_newest_result_of_a_row_stays(tmp_path: Path) -> None:
    document = tmp_path / "matrix.md"
    document.write_text(EMPTY)
    key = ("fsdp optim", 2, "llada masked", "fp32")
    other = Cell("cp2 p2p", 2, "dream shifted", "bf16", "equal", 1e-6, 0.09, None, 0.1, 0.07, 1.6)
    first = cells(tmp_path / "1.json", "1 May 2026", Cell(*key, "differs", 0.0, 1.0), other)
    merge(document, [first], [])
    assert "| fsdp optim | llada masked | fp32 | differs | 0.0e+00 / 1.0e+00 |  | 1 |" in document.read_text()
    refused = Cell("fsdp optim_grads_params x pp2", 2, "llada masked", "fp32", "refused", said="no pipeline")
    unrun = Cell("cp2 p2p", 2, "dream shifted", "bf16")
    second = cells(tmp_path / "2.json", "2 May 2026", Cell(*key, "equal", 0.0, 1e-7), refused, unrun)
    rows = [{"name": "NaN guard", "result": "holds", "said": "step 2 | nan", "seconds": 1.0}]
    runs = written(tmp_path / "3.json", {"conditions": "2 ranks", "date": "2 May 2026", "rows": rows})
    merge(document, [second], [runs])
    text = document.read_text()
    assert "1. 1 May 2026: 2 ranks on a GPU.\n2. 2 May 2026: 2 ranks on a GPU.\n3. 2 May 2026: 2 ranks.\n" in text
    assert "| fsdp optim | llada masked | fp32 | equal | 0.0e+00 / 1.0e-07 |  | 2 |" in text
    assert "| fsdp optim_grads_params x pp2 | llada masked | fp32 | refused | no pipeline |  | 2 |" in text
    assert "| cp2 p2p | dream shifted | bf16 | equal | 1.0e-06 / 9.0e-02 | 1.0e-01 / 7.0e-02 (1.6 x) | 1 |" in text
    assert "| NaN guard | holds | step 2 / nan | 3 |" in text
    assert "`fsdp optim` (sdar block, qwen3 causal" in text
    assert all(f"kept {name}" in text for name in ("launches", "gpu", "runs"))
    merge(document, [second], [runs])
    assert document.read_text() == text


def test_a_document_without_places_for_the_tables(tmp_path: Path) -> None:
    document = tmp_path / "matrix.md"
    document.write_text("# Nothing\n")
    with pytest.raises(DlmBridgeError, match="launches"):
        merge(document, [], [])


def test_a_row_replaces_the_one_of_the_same_name(tmp_path: Path) -> None:
    document = tmp_path / "tests.md"
    document.write_text("before\n<!-- tests -->\n<!-- end of tests -->\nafter\n")
    for row in (("a", "H100", "1"), ("b", "H100", "2"), ("a", "H200", "3"), ("a", "H100", "4")):
        update_table(document, "tests", ("what", "on", "passed"), row, keys=2)
    lines = ["| what | on | passed |", "|---|---|---|", "| a | H100 | 4 |", "| b | H100 | 2 |", "| a | H200 | 3 |"]
    table = "\n".join(lines)
    assert document.read_text() == f"before\n<!-- tests -->\n\n{table}\n\n<!-- end of tests -->\nafter\n"


@pytest.mark.parametrize(
    ("losses", "norm", "result", "apart"),
    [
        ([6.0, 4.0], 1.0, "equal", 0.0),
        ([6.0, 4.02], 1.0, "equal", 0.01),
        ([6.0, 4.2], 1.0, "off: the loss of step 2 is 4.2000, not 4.0000", 0.1),
        ([6.0, 6.0], 1.0, "off: the loss of step 2 is 6.0000, not 4.0000", 1.0),  # it has learned nothing
        ([6.0, 4.0], 1.01, "off: other gradients", 0.0),
        ([6.0], 1.0, "equal", 0.0),  # half of the steps
    ],
)
def test_a_run_is_equal_within_its_tolerance(losses: list[float], norm: float, result: str, apart: float) -> None:
    rows, wanted, untrained = (
        [{"loss": loss, "grad_norm": first} for loss in series]
        for series, first in ((losses, norm), ([6.0, 4.0], 1.0), ([6.0, 6.0], 1.0))
    )
    found = compared(rows, wanted, untrained, Tolerance(0.05, 1e-3))
    assert found == (result, pytest.approx(apart), pytest.approx(norm - 1))
    assert compared(rows, untrained, untrained, Tolerance(9.0, 9.0))[0].startswith("off: training moved")
    diverging = [{"loss": loss, "grad_norm": 1.0} for loss in (6.0, 9.0)]
    assert compared(diverging, diverging, untrained, Tolerance(9.0, 9.0))[0].startswith("off: step 2 of the reference")
