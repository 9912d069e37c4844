"""The figure of scripts/countdown.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import countdown


@pytest.mark.parametrize("level", [0.1, 0.9])
def test_the_axis_is_that_of_the_figures_with_their_intervals(
    level: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure.axes[0]))
    rewards = [level + 0.0005 * step for step in range(1, 101)]
    held_out = [[50, level + 0.02], [100, level + 0.05]]
    run = {"steps": list(range(1, 101)), "reward": rewards, "held_out": held_out, "forwards": 1}
    countdown.draw({"accelerate": run, "megatron": run}, [level, 0, 0], 0, tmp_path / "countdown.png")
    (axes,) = drawn
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [label.split(":")[0] for label in labels] == ["accelerate", "megatron"] * 2
    low, high = axes.get_ylim()
    assert 0 <= low < level - countdown.interval(level)
    assert level + 0.05 + countdown.interval(level + 0.05) < high <= 1
    assert high - low < 0.2
    shares = [level, level + 0.02, level + 0.05]
    expected = [[share - countdown.interval(share), share + countdown.interval(share)] for share in shares]
    assert len(axes.containers) == 2
    for bars in axes.containers:
        ends = [segment[:, 1].tolist() for segment in bars.lines[2][0].get_segments()]
        assert ends == [pytest.approx(pair) for pair in expected]
