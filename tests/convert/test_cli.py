"""The conversion commands as people and scripts call them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dlm_bridge import Bridge, Layout
from tests.checkpoints import write_llada
from tests.convert.helpers import run_cli, save_dcp, tree
from tests.convert.test_torch_dist import expected, hub_tensors

Capture = pytest.CaptureFixture[str]


def test_the_whole_way(tmp_path: Path, llada: Path, capsys: Capture) -> None:
    m, m2, out = tmp_path / "m", tmp_path / "m2", tmp_path / "out"
    code, shown, err = run_cli(capsys, "import", llada, m, "--tp", 2, "--pp", 2)
    assert (code, err) == (0, "")
    assert "tp 2, pp 2" in shown
    assert run_cli(capsys, "reshard", m, m2, "--pp", 3, "--pipeline-split", "2,1")[0] == 0
    assert run_cli(capsys, "export", m2, out)[0] == 0
    assert tree(out) == tree(llada)
    for a, b in ((llada, m), (m, m2), (m2, out), (out, llada)):
        assert run_cli(capsys, "verify", a, b)[0] == 0
    assert run_cli(capsys, "verify", m2)[0] == 0


def test_a_path_that_is_no_utf_8(tmp_path: Path, llada: Path, capsys: Capture) -> None:
    folder = tmp_path / os.fsdecode(b"it\xff")
    shutil.copytree(llada, folder)
    for command in (
        ("import", folder, tmp_path / "megatron", "--tp", 2),
        ("verify", tmp_path / "megatron", folder),
        ("export", tmp_path / "megatron", folder / "hub"),
        ("verify", folder / "hub"),
        ("inspect", folder / "hub"),
    ):
        code, out, err = run_cli(capsys, *command)
        assert code == 0, err
        (out + err).encode()  # what is printed is


def test_json_is_one_object_and_nothing_else(tmp_path: Path, llada: Path, capsys: Capture) -> None:
    m, out = tmp_path / "m", tmp_path / "out"
    for command, keys in (
        (
            ("import", llada, m, "--tp", 2),
            {"action": "import", "format": "torch_dist", "dry_run": False, "tensors": 39},
        ),
        (
            ("reshard", m, tmp_path / "m2", "--tp", 1, "--dry-run"),
            {"action": "reshard", "dry_run": True, "seconds": None},
        ),
        (("export", m, out, "--shard-size", "1GB"), {"action": "export", "format": "huggingface"}),
        (("inspect", m), {"format": "torch_dist", "family": "llada", "iteration": 0}),
        (("inspect", out), {"format": "huggingface", "architecture": "LLaDAModelLM"}),
        (("verify", m, out), {"equal": True, "tensors": 39, "differences": []}),
    ):
        code, shown, err = run_cli(capsys, *command, "--json")
        assert (code, err) == (0, "")
        assert keys.items() <= json.loads(shown).items()
    assert not (tmp_path / "m2").exists()


@pytest.mark.parametrize(
    "options",
    [  # the last one is named
        ("--tp", "0"),
        ("--tp", "3"),
        ("--pp", "8"),
        ("--vp", "2"),
        ("--ep", "2"),
        ("--pp", "3", "--pipeline-split"),
        ("--pp", "2", "--pipeline-split", "x"),
        ("--pp", "2", "--pipeline-split", "3,3"),
        ("--family", "nope"),
        ("--format", "nope"),
        ("--format", "torch", "--key-style", "x"),
        ("--dtype", "int8"),
        ("--workers", "0"),
        ("--vocab-multiple", "-3"),
        ("--format", "torch", "--tp", "2", "--vocab-multiple", "3"),
        ("--revision", "main"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_bad_usage_is_one_line(
    tmp_path: Path, llada: Path, capsys: Capture, options: tuple[str, ...], dry: tuple[str, ...]
) -> None:
    named = [word for word in options if word.startswith("--")][-1]
    given = options[:-1] if options[-1] == "--pipeline-split" else options  # the remedy, not the mistake
    code, out, err = run_cli(capsys, "import", llada, tmp_path / "m", *given, *dry)
    assert (code, out) == (2, "")
    assert named in err
    assert err.startswith("dlm-bridge: ")
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_export_of_a_foreign_checkpoint(tmp_path: Path, llada: Path, capsys: Capture) -> None:
    save_dcp(expected(hub_tensors(llada)), tmp_path / "m" / "iter_0000003")
    (tmp_path / "m" / "latest_checkpointed_iteration.txt").write_text("3")
    code, _, err = run_cli(capsys, "export", tmp_path / "m", tmp_path / "out")
    assert code == 2
    assert all(flag in err for flag in ("--like", "--hf-config"))
    assert run_cli(capsys, "export", tmp_path / "m", tmp_path / "out", "--like", llada)[0] == 0
    assert tree(tmp_path / "out") == tree(llada)
    assert run_cli(capsys, "export", tmp_path / "m", tmp_path / "c", "--hf-config", llada / "config.json")[0] == 0
    assert run_cli(capsys, "verify", llada, tmp_path / "c")[0] == 0
    assert run_cli(capsys, "verify", tmp_path / "m", llada)[0] == 0


def test_family_overrides_the_config(tmp_path: Path, capsys: Capture) -> None:
    source = write_llada(tmp_path / "hub", architectures=["Renamed"])
    assert run_cli(capsys, "import", source, tmp_path / "m")[0] == 2
    assert run_cli(capsys, "import", source, tmp_path / "m", "--family", "llada")[0] == 0
    assert run_cli(capsys, "export", tmp_path / "m", tmp_path / "out")[0] == 0
    assert tree(tmp_path / "out") == tree(source)


@pytest.mark.parametrize("command", ["import", "export", "reshard", "inspect", "verify"])
def test_help_has_an_example(capsys: Capture, command: str) -> None:
    code, out, _ = run_cli(capsys, command, "--help")
    assert code == 0
    assert f"Example: dlm-bridge {command}" in " ".join(out.split())


def test_reshard_asks_for_a_layout(tmp_path: Path, llada: Path, capsys: Capture) -> None:
    Bridge.from_hf(llada).to_megatron(tmp_path / "m", Layout(tp=2))
    code, _, err = run_cli(capsys, "reshard", tmp_path / "m", tmp_path / "out", "--workers", 1)
    assert (code, "--tp" in err) == (2, True)
    assert not (tmp_path / "out").exists()
    assert run_cli(capsys, "reshard", tmp_path / "m", tmp_path / "out", "--tp", 1)[0] == 0
