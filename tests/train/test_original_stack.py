"""What is trained stays loadable by the programs that its model came from: code and tokenizer, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import dlm_bridge  # noqa: F401
from dlm_bridge.train.checkpoints import save_tokenizer
from tests.families import dream, sdar
from tests.families.case import FamilyCase

CASES = [dream.CASE, sdar.CASES[0]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_tokenizers_files_are_those_that_it_was_read_from(case: FamilyCase, tmp_path: Path) -> None:
    source, target = case.write(tmp_path / "hub"), tmp_path / "saved"
    target.mkdir()
    save_tokenizer(AutoTokenizer.from_pretrained(source), target)
    saved = {path.name: path.read_bytes() for path in target.iterdir()}
    code = case.tokenizer["auto_map"]["AutoTokenizer"][0].split(".")[0] + ".py"
    assert set(saved) == {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", code}
    assert all(content == (source / name).read_bytes() for name, content in saved.items())


def test_a_changed_tokenizer_is_saved_as_it_is(tmp_path: Path) -> None:
    source, target = dream.CASE.write(tmp_path / "hub"), tmp_path / "saved"
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    save_tokenizer(tokenizer, target)
    again = AutoTokenizer.from_pretrained(target)
    assert (again.chat_template, again.pad_token) == ("{{ messages }}", "<new>")


def test_code_that_the_models_code_imports_comes_along(tmp_path: Path) -> None:
    source = dream.CASE.write(tmp_path / "hub")
    (source / "modeling_dream.py").write_text("from .generation_utils import Mixin\nimport .deep\nraise SystemExit\n")
    (source / "generation_utils.py").write_text("from .deeper.still import more\nfrom . import modeling_dream\n")
    (source / "deep.py").write_text("raise SystemExit\n")
    (source / "unrelated.py").write_text("raise SystemExit\n")
    dream.CASE.load(source).save_pretrained(tmp_path / "saved")
    code = {path.name for path in (tmp_path / "saved").glob("*.py")}
    named = json.loads((source / "config.json").read_text())["auto_map"].values()
    assert code == {f"{name.split('.')[0]}.py" for name in named} | {"generation_utils.py", "deep.py"}
    assert all((tmp_path / "saved" / name).read_bytes() == (source / name).read_bytes() for name in code)
