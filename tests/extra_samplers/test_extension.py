"""Samplers of an extension: their names, and what is said without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm_bridge.extra_samplers import EXTENSION
from dlm_bridge.generation import SAMPLERS
from dlm_bridge.models.families import families
from tests.test_registration import COMMAND, copy_without, run


def test_the_extension_names_its_samplers_as_they_name_themselves() -> None:
    known = list(SAMPLERS)
    assert [name for name in known if name in EXTENSION.samplers] == list(EXTENSION.samplers)
    assert [SAMPLERS[name].name for name in EXTENSION.samplers] == list(EXTENSION.samplers)
    assert not {spec.sampler.get("algorithm") for spec in families()} & {*EXTENSION.samplers}


@pytest.mark.slow
def test_without_the_folder(llada: Path, tmp_path: Path) -> None:
    copy_without(tmp_path, "extra_samplers")
    done = run(COMMAND, tmp_path, "generate", str(llada), "--prompt", "the cat", "--algorithm", "wino")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("dlm-bridge: ")]
    assert "wino" in line
    assert "dlm_bridge.extra_samplers" in line
