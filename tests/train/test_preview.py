"""The preview of fine-tuning: rows as the model gets them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dlm_bridge.cli.app import main
from dlm_bridge.objectives.batches import IGNORE_INDEX
from dlm_bridge.train.config import TrainConfig
from dlm_bridge.train.setup import load_data, model_source, resolve_objective
from tests.data.chats import MARKED, conversation, write_rows

SHOWN = 3


@pytest.fixture
def show(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`dlm-bridge sft` in this process: its exit code."""
    write_rows(tmp_path / "chats.jsonl", [conversation(number) for number in range(8)])
    (tmp_path / "marked.jinja").write_text(MARKED)
    monkeypatch.chdir(tmp_path)

    def _show(*flags: str) -> int:
        options = ["--model", values["model"], "--from-scratch", "--data", "chats.jsonl", "--seq-length", "64"]
        options += ["--chat-template", "marked.jinja"]
        monkeypatch.setattr(sys, "argv", ["dlm-bridge", "sft", *options, *flags])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(str(stopped.value.code or 0))

    return _show


@pytest.mark.parametrize("flags", [(), ("--packing", "--eos-padding", "none"), ("--eos-padding", "row")])
def test_rows_are_those_that_are_trained(
    show: Any, values: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    before = sorted(tmp_path.iterdir())
    assert show("--preview", str(SHOWN), "--json", *flags) == 0
    assert sorted(tmp_path.iterdir()) == before  # nothing is written
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    given = {"task": "sft", "model": values["model"], "from_scratch": True, "data": ["chats.jsonl"], "seq_length": 64}
    given |= {"chat_template": "marked.jinja", "split": "100,0,0", "output": str(tmp_path / "run")}
    given |= {"packing": True, "eos_padding": "none"} if "--packing" in flags else {}
    given |= {"eos_padding": "row"} if "row" in flags else {}
    config = TrainConfig.from_flags(**given)
    model = model_source(config).load()
    config, objective = resolve_objective(config, model)
    train, _, tokenizer = load_data(config, model, objective.mask_token)
    rows = train.blocks.rows(range(min(SHOWN, len(train))))  # type: ignore[attr-defined]
    assert len(shown) == len(rows.input_ids)
    assert tokenizer.chat_template == MARKED
    for row, ids, labels in zip(shown, rows.input_ids.tolist(), rows.labels.tolist(), strict=True):
        length = len(row["input_ids"])
        assert row == {
            "input_ids": ids[:length],
            "trained": [label != IGNORE_INDEX for label in labels[:length]],
            "text": tokenizer.decode(ids[:length]),
        }
        assert any(row["trained"])
        assert all(label == IGNORE_INDEX for label in labels[length:])
    if "row" in flags:
        assert len(shown[0]["input_ids"]) == 64


def test_trained_tokens_are_coloured(
    show: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert show("--preview", "1") == 0
    out = capsys.readouterr().out
    assert "user:\ndef f0" in out
    assert "\x1b[1;32m" in out.partition("assistant:")[2]
    assert "\x1b[1;32m" not in out.partition("assistant:")[0].partition("user:")[2]


def test_padding_that_is_trained_is_counted(show: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--preview", "1", "--json", "--eos-padding", "row") == 0
    text = json.loads(capsys.readouterr().out)["text"]
    end = re.search(r"(<[^<>]+>)\1+$", text)
    assert end is not None
    assert show("--preview", "1", "--eos-padding", "row") == 0
    out = capsys.readouterr().out.strip()
    assert out.endswith(f"{end[1]} x {text.count(end[1], end.start())}")
    assert 2 * end[1] not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--preview", "2", "--dry-run"), "--preview and --dry-run"),
        (("--json",), "--json needs --dry-run"),
        (("--preview", "0"), "--preview"),
        (("--preview", "2", "--data", "absent.jsonl"), "absent.jsonl"),
        (("--preview", "2", "--chat-template", "absent"), "--chat-template: absent"),
    ],
)
def test_a_preview_refuses_in_a_line(
    show: Any, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert show(*flags) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_run_keeps_its_template(values: dict[str, Any], show: Any, tmp_path: Path) -> None:
    assert show("--output", "run", "--steps", "1", "--global-batch-size", "2", "--split", "100,0,0") == 0
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert AutoTokenizer.from_pretrained(saved).chat_template == MARKED
