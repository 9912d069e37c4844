"""Two processes whose output folder is not shared: no checkpoint without the files of both is published or resumed, no
complete one is renamed, and the message names the second rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlm_bridge.convert.manifest import check_files
from tests import launcher
from tests.processes import environments

CASES = [
    "--sharding fsdp",
    pytest.param("--sharding fsdp --ema-decay 0.5", marks=pytest.mark.slow),
    pytest.param("--sharding fsdp --lora-rank 2", marks=pytest.mark.slow),
]
STEPS = (
    "--global-batch-size 4 --seq-length 16 --lr 0.01 --eval-interval 0 --save-interval 2 --steps 4 --precision fp32"
)


def launch(root: Path, words: str, **extra: str) -> tuple[bool, list[str]]:
    """Run in `root`: whether both processes ended well, and what each said."""
    logs = [root / f"log_{rank}.txt" for rank in range(2)]
    (root / "elsewhere").mkdir(exist_ok=True)
    own = {"HERE": str(root), "ELSEWHERE": str(root / "elsewhere"), **extra}
    each = [environment | own for environment in environments(2)]
    ended = launcher.run("tests.train.unshared_worker", words.split(), each, logs, 300)
    return ended, [log.read_text() for log in logs]


def check_unshared_save(words: str, root: Path) -> None:
    """Both processes save the checkpoint of step 2 together; that of step 4 is refused."""
    ended, said = launch(root, words, LEAVES="4")
    check_refused(ended, said)
    folder = root / "run/checkpoints"
    (kept,) = (path for path in folder.iterdir() if path.is_dir() and path.name[:4] in ("step", "iter"))
    assert kept.name.endswith("2")
    assert not [path for path in folder.iterdir() if "00004" in path.name]
    assert not check_files(kept)
    assert any(path.name.startswith("__1_") for path in kept.rglob("*"))  # the second rank's files
    ended, said = launch(root, f"{words} --resume")
    assert ended, said
    (last,) = (path for path in folder.iterdir() if path.name.endswith("00004"))
    assert not check_files(last)


def check_refused(ended: bool, said: list[str]) -> None:
    assert not ended
    assert not any("Traceback" in text for text in said), said
    (line,) = {line for text in said for line in text.splitlines() if "dlm-bridge: " in line}
    assert "rank 1" in line


@pytest.mark.parametrize("flags", CASES)
def test_a_save(flags: str, tmp_path: Path, seed_folder: Path, corpus: Path) -> None:
    model = f"{seed_folder} --from-scratch"
    if "lora" in flags:
        words = f"pretrain --model {model} --data {corpus} --output base {STEPS}"
        assert launch(tmp_path, words)[0]
        model = str(tmp_path / "base/checkpoints/step-0000004")
    check_unshared_save(f"pretrain --model {model} --data {corpus} --output run {STEPS} {flags}", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--sharding fsdp"])
def test_a_resume(flags: str, tmp_path: Path, seed_folder: Path, corpus: Path) -> None:
    """The second process sees no checkpoint, or an older one only."""
    words = f"pretrain --model {seed_folder} --data {corpus} --output run --from-scratch {STEPS} {flags}"
    assert launch(tmp_path, words)[0]
    before = sorted((tmp_path / "run/checkpoints").iterdir())
    check_refused(*launch(tmp_path, f"{words} --resume", LEAVES="start"))
    older = tmp_path / "elsewhere/run/checkpoints"
    older.mkdir(parents=True, exist_ok=True)
    os.symlink(before[0], older / before[0].name)
    check_refused(*launch(tmp_path, f"{words} --resume", LEAVES="start"))
    assert sorted((tmp_path / "run/checkpoints").iterdir()) == before
