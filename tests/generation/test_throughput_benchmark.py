"""benchmarks/throughput.py from end to end, with tiny shapes on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import throughput
from dlm_bridge.generation.runtime import runner

TINY = ["--new-tokens", "16", "--block-length", "8", "--shortest", "3", "--longest", "12", "--steps-per-block", "4"]


@pytest.fixture(autouse=True)
def _packing_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "supports_packing", runner.supports_packing)


@pytest.mark.slow
def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each cache's peer and ways, and the ratios of those that have a peer."""
    words = ["--size", "tiny", "sdar-tiny", "llada2-tiny", "--batch", "2", "--batches", "2", *TINY]
    words += ["--ways", "plain", "roofline", "eager", "continuous", "--json", str(tmp_path / "rows")]
    throughput.main(words)
    rows = {row["row"]: row for row in map(json.loads, (tmp_path / "rows").read_text().splitlines())}
    ours = ("eager", "continuous")
    names = [f"tiny/2/none/{way}" for way in ("plain", *ours)]
    names += ["tiny/2/dual/eager", *(f"tiny/2/dual-ragged/{way}" for way in ours)]
    names += [f"{size}/2/block/{way}" for size in ("sdar-tiny", "llada2-tiny") for way in ("roofline", *ours)]
    assert list(rows) == names
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in names)
    assert all(row["new_tokens"] == 4 * 16 for row in rows.values())
    assert all(rows[f"tiny/2/none/{way}"]["forwards"] == 2 * 8 for way in ("plain", "eager"))
    assert rows["tiny/2/none/eager"]["tokens_per_forward"] == 2
    for name, row in rows.items():
        compared = name.endswith(ours) and "/dual" not in name
        assert (row["ratio"] is not None) == (row["ratio_per_forward"] is not None) == compared
    plain, eager = (rows[f"tiny/2/none/{way}"] for way in ("plain", "eager"))
    assert eager["ratio"] == pytest.approx(plain["seconds"] / eager["seconds"], rel=1e-2)


def test_only_what_is_asked_for_and_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size", "tiny", "--batch", "2", *TINY, "--ways", "plain", "eager"]
    throughput.main([*words, "--only", "*/none/eager", "--padding", "masked", "--json", str(tmp_path / "rows")])
    assert not (tmp_path / "rows").exists()
    throughput.main([*words, "--only", "*/none/eager*", "--padding", "masked", "--json", str(tmp_path / "rows")])
    assert [json.loads(row)["row"] for row in (tmp_path / "rows").open()] == ["tiny/2/none/eager/masked"]
    capsys.readouterr()
    throughput.main([*words, "--limit-seconds", "0"])
    assert "tiny/2/none/plain tiny/2/none/eager" in capsys.readouterr().out.splitlines()[-1]


def test_a_line_through_points_of_a_line() -> None:
    fixed, slope = throughput.line_through([(x, 3 + 0.5 * x) for x in (1.0, 2.0, 8.0, 100.0)])
    assert (fixed, slope) == pytest.approx((3, 0.5))
