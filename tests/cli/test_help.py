"""Help pages at 80 columns, and what a shell completes."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from rich.console import Console

from dlm_bridge.cli import help
from dlm_bridge.cli.app import app, main
from dlm_bridge.cli.help import in_flags, message, parameter_table
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.generation import SAMPLERS
from dlm_bridge.models.families import families
from dlm_bridge.objectives.registry import objectives

COLUMNS = 80


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below a group, with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", *words])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_cuts_nothing(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option's names and every word of its explanation are whole in one line, in one panel."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    parameters = COMMANDS[words].params
    some_hidden = any(getattr(parameter, "hidden", False) for parameter in parameters)
    page = said(monkeypatch, capsys, *words, "--help-all" if some_hidden else "--help")
    assert "…" not in page
    assert max(map(len, page.splitlines())) <= COLUMNS
    shown = set(page.replace("│", " ").replace(",", " ").split())
    for parameter in parameters:
        if parameter.param_type_name == "option":
            for name in [*parameter.opts, *parameter.secondary_opts]:
                before = "│" if name.startswith("--") else ","  # short names follow the long one
                assert len(re.findall(rf"{before} {re.escape(name)}(?![\w-])", page)) == 1, name
        missing = set(parameter.help.replace(",", " ").split()) - shown
        assert not missing, f"{parameter.name}: {missing} in no line"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_errors_name_flags_of_the_running_command(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A field, and a setting in backquotes in a reason, are printed as a flag or as the name of an argument."""
    monkeypatch.setattr(help, "_command", [COMMANDS[words]])
    for parameter in COMMANDS[words].params:
        names = {parameter.name}
        if parameter.param_type_name == "argument":
            shown = "--model" if parameter.name == "model" else parameter.metavar or parameter.name.upper()
        else:
            shown = next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])
            names.add(shown.lstrip("-").replace("-", "_"))
        for name in names:
            assert message(SettingError(name, "is refused")) == f"{shown}: is refused"
            assert message(CheckpointError(name, "is empty")) == f"{name}: is empty"  # a folder of that name
            assert in_flags(f"set `{name}`, or `{name}=3`") == f"set {shown}, or {shown} 3"
            if getattr(parameter, "secondary_opts", None):
                assert in_flags(f"`{name}=True` or `{name}=False`") == f"{shown} or {parameter.secondary_opts[0]}"
    for field in ("/some/file.jsonl:3", "no_setting", None):
        assert message(SettingError(field, "is `odd`")) == (f"{field}: is `odd`" if field else "is `odd`")


@pytest.mark.parametrize("names", [["-h", "--help"], ["--help", "-h"]])
def test_long_names_come_first(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    option = next(each for each in COMMANDS[("inspect",)].params if each.param_type_name == "option")
    monkeypatch.setattr(option, "opts", names)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(parameter_table([option]))
    assert console.export_text().startswith("--help")


def test_examples_are_commands_that_a_shell_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    page = said(monkeypatch, capsys, "generate", "--help")
    joined = " ".join(re.sub(r"\\ *\n", "", page).split())
    assert "--chat --prompt 'What is a bridge?' --gen-length 128 --show" in joined


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("dlm-bridge import a b --format ", {"torch_dist", "torch"}),
        ("dlm-bridge import a b --dtype ", {"keep", "bf16", "fp16", "fp32"}),
        ("dlm-bridge import a b --key-style te-", {"te-sequential"}),
        ("dlm-bridge generate a --algorithm ", set(SAMPLERS)),
        ("dlm-bridge generate a --cache ", {"none", "block", "prefix", "dual"}),
        ("dlm-bridge generate a --execution ", {"eager", "graph", "compiled"}),
        ("dlm-bridge pretrain --objective ", set(objectives())),
        ("dlm-bridge pretrain --family l", {spec.name for spec in families() if spec.name.startswith("l")}),
        ("dlm-bridge sft --loss-weighting c", {"cart", "clipped"}),
        ("dlm-bridge sft --certainty-", {"--certainty-weight", "--certainty-temperature"}),  # not in --help
        pytest.param(
            *("dlm-bridge plan a --precision fp", {"fp8", "fp16", "fp32"}), marks=pytest.mark.extension("plan")
        ),
        ("dlm-bridge eval a --family sdar", {"sdar", "sdar_moe"}),
    ],
)
def test_values_are_completed(
    line: str, values: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_DLM_BRIDGE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    assert set(said(monkeypatch, capsys).split()) == values
