"""--family: what a config cannot tell is named, from scratch, from weights and at a resume; nothing is guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.models.modeling_difflm import DiffLM
from dlm_bridge.models.modeling_diffullama import LlamaForCausalLM
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.setup import model_source
from tests.families import a2d, difflm, diffullama, dream
from tests.refusals import refused
from tests.train.conftest import Run, without_speed

SHORT: dict[str, Any] = {"data": ["mock"], "warmup_steps": 0, "eval_interval": 0, "lr_schedule": "constant"}


def _folder(config: dict[str, Any], folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "mask_token_id": 99}))
    return str(folder)


@pytest.mark.parametrize(
    ("case", "model_class", "objective"),
    [(diffullama.CASE, LlamaForCausalLM, "shifted_floor"), (difflm.CASES[0], DiffLM, "masked_fraction")],
    ids=["diffullama", "difflm"],
)
@pytest.mark.fast("difflm")
def test_a_run_of_a_named_family(case: Any, model_class: type, objective: str, tmp_path: Path, run: Run) -> None:
    options = {**SHORT, "model": _folder(case.config, tmp_path / "model"), "family": case.name, "save_interval": 1}
    whole = run(tmp_path / "whole", steps=2, **options)
    written = (tmp_path / "whole/config.yaml").read_text()
    assert f"family: {case.name}\n" in written
    assert f"objective:\n  objective: {objective}\n" in written
    run(tmp_path / "resumed", steps=1, **options)
    assert without_speed(run(tmp_path / "resumed", resume=True, steps=2, **options)) == without_speed(whole)
    # What was saved is what the family's own class reads, and a second run starts from.
    saved = str(tmp_path / "whole/checkpoints/step-0000002")
    given = {**options, "model": saved, "output": "unused", "from_scratch": False}
    assert type(model_source(TrainConfig.from_flags(**given)).load()) is model_class


def test_a_llama_config_is_a_llama_unless_it_is_named(tmp_path: Path, run: Run) -> None:
    scratch = run(
        tmp_path / "run", steps=1, **SHORT, model=_folder(diffullama.CONFIG, tmp_path / "m"), family="diffullama"
    )
    saved = str(tmp_path / "run/checkpoints/step-0000001")
    assert len(scratch) == 1
    config = TrainConfig.from_flags(model=saved, data=["mock"], output="unused")
    assert type(model_source(config).load()) is transformers.LlamaForCausalLM


def test_bad_families_are_refused_in_one_line(tmp_path: Path, run: Run) -> None:
    model = _folder(dream.CONFIG, tmp_path / "dream")
    windows = _folder({**dream.CONFIG, "use_sliding_window": True}, tmp_path / "windows")
    unnamed = tmp_path / "unnamed"
    unnamed.mkdir()
    (unnamed / "config.json").write_text(json.dumps({"hidden_size": 8}))
    save_file({"weight": torch.zeros(1)}, unnamed / "model.safetensors")
    for changes, message in (
        ({"model": model, "family": "nope"}, "'nope'.* llada"),
        ({"model": model, "family": "llada"}, "DreamModel"),
        ({"model": windows}, "use_sliding_window = True"),
        ({"model": str(unnamed), "from_scratch": False}, "family"),
    ):
        with pytest.raises(DlmBridgeError, match=message) as raised:
            run(tmp_path / "run", steps=1, **{**SHORT, **changes})
        assert "\n" not in str(raised.value)


def test_a_mask_token_that_no_config_names_is_asked_for(tmp_path: Path, run: Run) -> None:
    """dLLM's A2D checkpoints leave it to the tokenizer; Llama's has no usual one."""
    model = tmp_path / "model"
    model.mkdir()
    case = next(case for case in a2d.CASES if case.name == "a2d_llama")
    config = {key: value for key, value in case.config.items() if key != "mask_token_id"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(DlmBridgeError, match=r"mask.token.id") as error:
        run(tmp_path / "refused", steps=1, model=str(model), **SHORT)
    assert "\n" not in str(error.value)
    with refused(SettingError, "mask_token_id", "100000"):
        run(tmp_path / "outside", steps=1, model=str(model), mask_token_id=100000, **SHORT)
    assert len(run(tmp_path / "run", steps=1, model=str(model), mask_token_id=7, **SHORT)) == 1
    saved = json.loads((tmp_path / "run/checkpoints/step-0000001/config.json").read_text())
    assert saved["mask_token_id"] == 7
