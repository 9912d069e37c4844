"""The command line as a user meets it: bad words and bad input are one line on stderr and exit code 2."""

from __future__ import annotations

import json
import logging
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
        (["import", "a", "b", "--tp", "x"], "--tp: must be a whole number, not 'x'"),
        (["import", "a", "b", "--tp=1.5"], "--tp: must be a whole number, not '1.5'"),
        (["generate", "m", "--temperature", "warm"], "--temperature: must be a number, not 'warm'"),
        (["sft", "m", "--global_batch_size=many"], "--global-batch-size: must be a whole number, not 'many'"),
        (["sft", "m", "--preview", "0"], "--preview: must be at least 1, not 0"),
        (["generate", "m", "--prompt"], "(see dlm-bridge generate --help)"),
        (["pretrain", "--cp", "auto"], "docs/megatron.md"),
        (["pretrain", "--cp", "x"], "--cp: must be a whole number, not 'x'"),
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
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    first_words = [line.split()[0] for line in lines if line.strip()]
    assert all(first_words.count(spec.name) == 1 for spec in families() if not spec.derived_from)


@pytest.mark.parametrize("name", ["llada2_moe", "LLaDA2MoeModelLM", "inclusionai/llada2.0-FLASH"])
def test_a_family_by_its_name_architecture_or_hub_id(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(monkeypatch, "families", name, "--json") == 0
    assert [row["family"] for row in json.loads(capsys.readouterr().out)["families"]] == ["llada2_moe"]
    assert run(monkeypatch, "families", name) == 0
    assert "inclusionAI/LLaDA2.1-flash" in capsys.readouterr().out


def test_a_family_that_is_not_supported_and_near_misses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "families", "MDLM") == 0
    assert UNSUPPORTED["MDLM"].split()[0] in capsys.readouterr().out
    for name, nearest in (("lada", "llada"), ("LLaDAModelML", "LLaDAModelLM"), ("mdml", "MDLM")):
        assert run(monkeypatch, "families", name) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert f"the nearest is {nearest};" in said


@pytest.mark.extension("parallel")
def test_env_is_one_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "env") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for patches in (True, False):
        assert run(monkeypatch, "env", *["--patches"] * patches) == 0
        assert ("Patches of megatron-core" in capsys.readouterr().out) is patches


def test_families_lists_all_that_convert_to_dlm_makes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "families", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["families"]
    becomes = {row["family"]: row["becomes"] for row in rows if row["becomes"]}
    assert {name: tuple(forms.values()) for name, forms in becomes.items()} == TARGETS
    assert list(becomes["qwen3_moe"]) == [
        "idlm", "block-causal", "bidirectional", "shifted", "block-causal-shifted", "nemotron",
    ]  # fmt: skip
    assert becomes["bailing_moe_v2"]["block-causal"] == "llada2_moe"
    for family in ("qwen3", "gpt_oss"):
        assert run(monkeypatch, "families", family) == 0
        table = " ".join(capsys.readouterr().out.split("convert-to-dlm", 1)[1].split())  # lines wrap
        for form, name in becomes[family].items():
            assert f"--to {form}: family {name}" in table
