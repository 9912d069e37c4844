"""The model card of a run's checkpoints, and --push-to-hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm_bridge.errors import SettingError
from tests.mock_hub import TOKEN, Hub
from tests.refusals import refused
from tests.train.conftest import Run


def test_the_last_checkpoint_has_a_card_with_data_settings_and_curves(tmp_path: Path, run: Run, corpus: Path) -> None:
    rows = run(tmp_path / "run", steps=4, save_interval=2, eval_interval=2)
    folder = tmp_path / "run/checkpoints/step-0000004"
    card = (folder / "README.md").read_text()
    assert f"| data | {corpus.name} |" in card
    assert "| objective | masked |" in card
    assert str(tmp_path) not in card
    cells = [line.strip("| ").split(" | ") for line in card.splitlines()]
    table = cells[cells.index(["step", "loss", "eval loss", "lr"]) + 2 :][:4]
    assert [int(each[0]) for each in table] == [1, 2, 3, 4]
    assert [float(each[1]) for each in table] == [pytest.approx(row["loss"], rel=1e-3) for row in rows]
    assert "| last step | 2 |" in (tmp_path / "run/checkpoints/step-0000002/README.md").read_text()
    assert len(run(tmp_path / "run", resume=True, steps=5, save_interval=0)) == 5  # no file is called changed


def test_a_finished_run_is_pushed_with_its_card(tmp_path: Path, run: Run, hub: Hub) -> None:
    run(tmp_path / "run", steps=2, save_interval=0, push_to_hub="me/model", hub_private=True)
    paths = [path for _, path, _ in hub.requests]
    assert paths.count("/api/repos/create") == 2  # before and after training
    assert sum("/commit/" in path for path in paths) == 1
    assert hub.created.get("visibility") == "private" or hub.created.get("private") is True
    assert b'from_pretrained("me/model")' in hub.files["README.md"]
    assert b"| last step | 2 |" in hub.files["README.md"]
    assert "model.safetensors" in hub.files
    assert not {"config.yaml", "trainer_state.pt"} & set(hub.files)


def test_a_token_is_checked_before_training(tmp_path: Path, run: Run, hub: Hub) -> None:
    hub.status = 401
    with refused(SettingError, "push_to_hub") as error:
        run(tmp_path / "run", steps=1, push_to_hub="me/model")
    assert TOKEN not in str(error)
    assert not (tmp_path / "run").exists()


def test_refuses(tmp_path: Path, run: Run) -> None:
    with refused(SettingError, "push_to_hub"):
        run(tmp_path / "run", steps=1, push_to_hub="no id")
    with refused(SettingError, "hub_private"):
        run(tmp_path / "run", steps=1, hub_private=True)
