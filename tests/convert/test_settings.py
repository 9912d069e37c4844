"""Settings of conversions: declared once, for the command line and for Python."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dlm_bridge import Bridge, Layout
from dlm_bridge.convert.settings import (
    ExportSettings,
    HubSettings,
    HubSourceSettings,
    MegatronSettings,
    MegatronSourceSettings,
    settings_from,
)
from dlm_bridge.errors import LayoutError, SettingError
from tests.convert.helpers import run_cli
from tests.refusals import refused


@pytest.mark.parametrize(
    ("method", "settings", "own"),
    [
        (Bridge.from_hf, HubSourceSettings, {"path_or_id"}),
        (Bridge.from_megatron, MegatronSourceSettings, {"root"}),
        (Bridge.to_megatron, MegatronSettings, {"self", "output"}),
        (Bridge.to_hf, ExportSettings, {"self", "output"}),
    ],
)
def test_keywords_are_the_declared_settings(method: Any, settings: type, own: set[str]) -> None:
    assert set(inspect.signature(method).parameters) - own == {each.name for each in fields(settings)}


def test_an_unknown_keyword_is_answered_with_the_nearest(llada: Path, tmp_path: Path) -> None:
    with refused(SettingError, "vocab_multipel", "vocab_multiple"):
        Bridge.from_hf(llada).to_megatron(tmp_path / "m", vocab_multipel=4)
    with refused(SettingError, "dequantise_fp8", "dequantize_fp8"):
        Bridge.from_hf(llada, dequantise_fp8=True)


def test_averaged_is_another_name_of_ema(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert settings_from(MegatronSourceSettings, averaged=True) == MegatronSourceSettings(ema=True)
    with refused(SettingError, "ema", "averaged"):
        settings_from(MegatronSourceSettings, averaged=True, ema=False)
    _, _, named = run_cli(capsys, "export", "--averaged", tmp_path / "none", tmp_path / "out")
    _, _, again = run_cli(capsys, "export", "--ema", tmp_path / "none", "--averaged", tmp_path / "out")
    assert named == again
    assert str(tmp_path / "none") in named


@pytest.mark.parametrize(
    ("settings", "values", "field"),
    [
        (MegatronSettings, {"format": "zip"}, "format"),
        (MegatronSettings, {"key_style": "x"}, "key_style"),
        (MegatronSettings, {"key_style": None}, "key_style"),
        (MegatronSettings, {"format": None}, "format"),
        (MegatronSettings, {"dtype": "int8"}, "dtype"),
        (MegatronSettings, {"vocab_multiple": 0}, "vocab_multiple"),
        (HubSettings, {"shard_size": 0}, "shard_size"),
        (HubSettings, {"workers": 0}, "workers"),
        (HubSettings, {"processes": 0}, "processes"),
    ],
)
def test_refused_values(settings: type, values: dict[str, Any], field: str) -> None:
    with refused(SettingError, field):
        settings(**values)


@pytest.mark.parametrize("size", ["x", "5XB", "-1", "0", "0.1B", "iB"])
def test_refused_shard_sizes(size: str) -> None:
    with refused(SettingError, "shard_size"):
        HubSettings(shard_size=size)


def test_the_legacy_format_pads_every_rank_alike() -> None:
    with refused(LayoutError, "vocab_multiple", "tp=2"):
        MegatronSettings(format="torch", layout=Layout(tp=2), vocab_multiple=3)
