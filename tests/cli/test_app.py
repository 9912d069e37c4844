"""The command line as a user meets it: bad words and bad input are one line on stderr and exit code 2."""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from pathlib import Path

import pytest

from dlm_bridge import hub
from dlm_bridge.cli.app import main
from dlm_bridge.convert.to_dlm import TARGETS
from dlm_bridge.models.families import UNSUPPORTED, families


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", *words])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["import"], "Missing argument 'HF' (see dlm-bridge import --help)"),
        (["import", "a", "b", "--tp", "x"], "'--tp'"),
        (["pretrain", "--cp", "auto"], "docs/megatron.md"),
        (["pretrain", "--cp", "x"], "'--cp'"),
        (["verify", "--foo"], "No such option: --foo (see dlm-bridge verify --help)"),
        (["nosuch"], "No such command 'nosuch'"),
        (["inspect", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_bad_usage_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert run(monkeypatch, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("dlm-bridge: ")
    assert err.count("\n") == 1


def test_an_unreadable_file_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").mkdir()
    assert run(monkeypatch, "inspect", str(tmp_path)) == 2
    err = capsys.readouterr().err
    assert str(tmp_path) in err
    assert err.count("\n") == 1


def test_a_log_message_cannot_drive_the_terminal_and_ours_is_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = logging.getLogRecordFactory()
    try:
        assert run(monkeypatch, "--version") == 0
        for name in ("library", "dlm_bridge_of_others", "dlm_bridge.hub"):
            logging.getLogger(name).warning("must be an integer, got %s\x1b[31m", 100_000 * "x")
    finally:
        logging.setLogRecordFactory(made)
    *of_libraries, ours = caplog.messages
    assert of_libraries == ["must be an integer, got " + 100_000 * "x" + "\\x1b[31m"] * 2
    assert ours.startswith("must be an integer, got x")
    assert len(ours) < 2000
    assert "\x1b" not in ours


def test_a_warning_cannot_drive_the_terminal_and_ours_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    assert run(monkeypatch, "--version") == 0
    shown = warnings.formatwarning(f"a name: {5000 * 'x'}\x1b[31m", UserWarning, "file.py", 1)
    assert f"a name: {5000 * 'x'}\\x1b[31m" in shown
    assert shown.endswith("\n")
    ours = warnings.formatwarning(5000 * "x", UserWarning, hub.__file__, 1)
    assert len(ours) < 2000


def test_no_words_is_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch) == 0
    assert "Commands" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["import", "export", "reshard", "inspect", "verify", "pretrain", "sft", "generate", "convert-to-dlm"]
)
def test_every_command_has_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    assert f"dlm-bridge {command} " in capsys.readouterr().out.split("Example", 1)[1]


def test_families_lists_every_architecture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "families", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [row["family"] for row in listed["families"]] == [spec.name for spec in families()]
    assert {name for row in listed["families"] for name in row["architectures"]} == {
        name for spec in families() for name in spec.architectures
    }
    assert listed["unsupported"] == UNSUPPORTED
    assert run(monkeypatch, "families") == 0
    assert "llada" in capsys.readouterr().out


def test_families_lists_all_that_convert_to_dlm_makes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "families", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["families"]
    becomes = {row["family"]: row["becomes"] for row in rows if row["becomes"]}
    assert {name: tuple(forms.values()) for name, forms in becomes.items()} == TARGETS
    assert list(becomes["qwen3_moe"]) == ["shifted", "block-causal", "bidirectional", "idlm", "nemotron"]
    assert becomes["bailing_moe_v2"]["block-causal"] == "llada2_moe"
    assert run(monkeypatch, "families") == 0
    table = capsys.readouterr().out.split("convert-to-dlm", 1)[1]
    for forms in becomes.values():
        for form, name in forms.items():
            assert re.search(rf" {form} +│ {name} ", table), name
