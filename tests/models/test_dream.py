"""What only Dream has: a tokenizer class of its own, and a generation_config.json with nulls in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dlm_bridge  # noqa: F401
from dlm_bridge.errors import CheckpointError
from tests.checkpoints import write_tokenizer
from tests.families.dream import CASE, TOKENIZER
from tests.refusals import refused

from transformers import AutoTokenizer, Qwen2Tokenizer  # isort: skip

GENERATION_CONFIG: dict[str, Any] = {
    "_from_model_config": True,
    "alg": "origin",
    "alg_temp": None,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "eps": 0.001,
    "mask_token_id": None,
    "output_history": False,
    "pad_token_id": 151643,
    "steps": 512,
    "temperature": 0.0,
    "top_k": None,
    "top_p": None,
    "transformers_version": "4.46.2",
}
TEXTS = [
    "the other — thé",
    "e\u0301 12345 I'll  \n\n x",
    "<|im_start|>user\n<|mask|><|mask|> a<|endoftext|>",
    "你好 😀",
]


def test_tokenizer_is_qwen2s_under_the_hubs_name(tmp_path: Path) -> None:
    """A folder with a tokenizer and no model; the code that its auto_map names never runs."""
    (tmp_path / "hub").mkdir()
    write_tokenizer(tmp_path / "hub", TOKENIZER)
    (tmp_path / "hub" / "tokenizer.json").unlink()  # Dream publishes vocab.json and merges.txt
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hub")
    assert type(tokenizer).__name__ == "DreamTokenizer"
    plain = Qwen2Tokenizer.from_pretrained(tmp_path / "hub")
    for text in TEXTS:
        assert tokenizer(text).input_ids == plain(text).input_ids
    assert tokenizer.mask_token == "<|mask|>"
    assert tokenizer.bos_token == "<|beginoftext|>"
    assert tokenizer("the").input_ids == [257]  # no bos is added
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (
        json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())["tokenizer_class"] == "DreamTokenizer"
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("the").input_ids == [257]


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import dlm_bridge; from transformers import AutoTokenizer",
        "from transformers import AutoTokenizer; import dlm_bridge",
    ],
    ids=["before", "after"],
)
def test_tokenizer_loads_whichever_is_imported_first(tmp_path: Path, imports: str) -> None:
    write_tokenizer(CASE.write(tmp_path / "hub"), TOKENIZER)
    code = f"{imports}; import sys; print(type(AutoTokenizer.from_pretrained(sys.argv[1])).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "hub")], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["DreamTokenizer"]


def test_nulls_in_generation_config_are_unset(tmp_path: Path) -> None:
    folder = CASE.write(tmp_path / "hub")
    (folder / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG))
    model = CASE.load(folder)
    assert model.config.mask_token_id == 151666
    assert model.generation_config.mask_token_id is None
    model.save_pretrained(tmp_path / "saved")
    assert CASE.load(tmp_path / "saved").config.mask_token_id == 151666


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    folder = CASE.write(tmp_path / "hub", use_sliding_window=True, sliding_window=8)
    with refused(CheckpointError, "config.json", "use_sliding_window"):
        CASE.load(folder)
