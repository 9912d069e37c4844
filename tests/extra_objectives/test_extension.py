"""Objectives of an extension: their names, and what is said without it."""

from __future__ import annotations

from pathlib import Path

from dlm_bridge.extra_objectives import EXTENSION
from dlm_bridge.models.families import families
from dlm_bridge.objectives.registry import OBJECTIVES, objectives
from tests.test_registration import copy_without, run


def test_the_extension_s_objectives_are_no_family_s() -> None:
    assert {*EXTENSION.objectives} <= {*objectives()} - {*OBJECTIVES}
    assert not {spec.objective for spec in families()} & {*EXTENSION.objectives}


WITHOUT = """
from dlm_bridge.errors import SettingError
from dlm_bridge.objectives.registry import find_objective
try:
    find_objective("multi_bd")
except SettingError as error:
    print(error)
"""


def test_without_the_folder(tmp_path: Path) -> None:
    copy_without(tmp_path, "extra_objectives")
    done = run(WITHOUT, tmp_path)
    assert "multi_bd" in done.stdout
    assert "lacks dlm_bridge.extra_objectives" in done.stdout
