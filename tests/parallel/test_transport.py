"""Collectives through the host, by which benchmarks/layouts lets ranks share a GPU, are what they stand for."""

from __future__ import annotations

from pathlib import Path

from tests.processes import OK, launch


def test_every_collective_is_exact(tmp_path: Path) -> None:
    report = launch("tests.parallel.transport_worker", tmp_path, processes=3, timeout_s=120)
    assert len(report) == 9
    assert {name: said for name, said in report.items() if said != [OK] * 3} == {}
