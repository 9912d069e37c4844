"""Both forms of torch_dist, with `common.pt` (megatron-core 0.16) and without (0.19), are what megatron-core reads."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.processes import assert_ok, launch


def test_megatron_core_reads_the_forms_that_are_written_and_is_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("megatron.core")
    forms = ("0.16",) if version("megatron-core").startswith("0.16.") else ("0.16", "0.19")
    report = launch("tests.interop.forms_worker", tmp_path_factory.mktemp("forms"), processes=1, arguments=forms)
    for name in ("written", *forms):
        assert_ok(name, report, processes=1)
