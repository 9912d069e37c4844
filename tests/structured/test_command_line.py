"""`dlm-bridge generate` with a constraint: options, and a field of the rows of a file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, cli, llada, qwen3  # noqa: F401  fixtures

jsonschema = pytest.importorskip("jsonschema")

HOT = ["--prompt", "the cat", "--temperature", 1, "--seed", 1]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(params=["llada", "qwen3"])
def model(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def test_options_constrain_the_text(cli: Cli, model: Path, tmp_path: Path) -> None:  # noqa: F811
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    (text,) = (
        one["text"] for one in cli.report(model, *HOT, "--gen-length", 10, "--regex", "[a-f]+-[0-9]{2,}")["samples"]
    )
    assert re.fullmatch("[a-f]+-[0-9]{2,}", text)
    (text,) = (
        one["text"] for one in cli.report(model, *HOT, "--gen-length", 8, "--choice", "yes,no,maybe")["samples"]
    )
    assert text in ("yes", "no", "maybe")
    (text,) = (one["text"] for one in cli.report(model, *HOT, "--gen-length", 12, "--json-schema", schema)["samples"])
    jsonschema.validate(json.loads(text), SCHEMA)


def test_rows_have_their_own_constraints(cli: Cli, model: Path, tmp_path: Path) -> None:  # noqa: F811
    rows: list[dict[str, Any]] = [
        {"prompt": "the", "constraint": {"regex": "[0-9]{3}"}},
        {"prompt": "the", "constraint": {"choice": ["left", "right"]}},
        {"prompt": "the"},
        {"prompt": "the", "constraint": {"json": SCHEMA}},
    ]
    given = tmp_path / "in.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [model, "--jsonl", given, "--temperature", 1, "--seed", 2, "--gen-length", 12]
    code, out, err = cli(*words, "--regex", "[xy]+")
    assert code == 0, err
    first, second, third, last = (json.loads(line)["text"] for line in out.splitlines())
    assert re.fullmatch("[0-9]{3}", first)
    assert second in ("left", "right")
    assert re.fullmatch("[xy]+", third)  # the option is for rows without one
    jsonschema.validate(json.loads(last), SCHEMA)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--regex", "a", "--choice", "b"], ["--choice", "--regex"]),
        (["--regex", "(a", "--gen-length", 8], ["character"]),
        (["--regex", "a{9}", "--gen-length", 8], ["9", "8"]),
        (["--json-schema", "missing.json"], ["missing.json"]),
        (["--choice", "", "--gen-length", 8], ["choice"]),
    ],
)
def test_constraints_that_cannot_be_kept_are_one_line(cli: Cli, llada: Path, words: Any, named: Any) -> None:  # noqa: F811
    code, out, err = cli(llada, *HOT, *words)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    for each in named:
        assert each in err


def test_a_rows_bad_constraint_is_named_by_its_line(cli: Cli, llada: Path, tmp_path: Path) -> None:  # noqa: F811
    given = tmp_path / "in.jsonl"
    rows = [{"prompt": "the"}, {"prompt": "the", "constraint": {"regex": "(a"}}, {"prompt": "a", "constraint": "x"}]
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = cli(llada, "--jsonl", given, "--gen-length", 8)
    assert code == 2
    assert f"{given}:2" in err
    assert f"{given}:3" in err
    assert f"{given}:1" not in err
