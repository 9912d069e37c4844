"""--push-to-hub of a Megatron run, whose checkpoint is exported for the upload."""

from __future__ import annotations

from pathlib import Path

from tests.mock_hub import Hub
from tests.train.conftest import Run


def test_a_megatron_run_is_exported_and_pushed_with_its_card(tmp_path: Path, on_megatron: Run, hub: Hub) -> None:
    on_megatron(tmp_path / "run", steps=2, eval_interval=0, push_to_hub="me/model")
    assert {"config.json", "model.safetensors", "README.md"} <= set(hub.files)
    assert b"| last step | 2 |" in hub.files["README.md"]
    assert not list((tmp_path / "run").glob(".push-*"))
