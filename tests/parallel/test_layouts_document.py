"""GPU results in a document: the newest of each row stays, with the launch that it is of."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.layouts.cells import Cell
from benchmarks.layouts.document import merge
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
