"""Local checkpoints of the Megatron engine on two processes, each a node of its own: the run goes on from the newest
that all ranks have, in a folder of their own or in the other node's, to the very same figures and files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dlm_bridge.convert.manifest import FILE_DIGESTS, check_files
from tests import launcher
from tests.processes import environments
from tests.train.conftest import read_metrics, without_speed
from tests.train.test_damaged_checkpoints import flip

pytest.importorskip("megatron.core")
pytest.importorskip("nvidia_resiliency_ext")
pytestmark = pytest.mark.slow

FLAGS = (
    "--engine megatron --from-scratch --global-batch-size 4 --seq-length 16 --lr 0.01 --eval-interval 0 "
    "--save-interval 4 --steps 8 --precision bf16"
)
LAYOUTS = {"data parallel": "", "pipeline": "--pp 2", "instances": "--optimizer-instances 2"}
FALLEN_BACK = "resuming from the checkpoint of step 4: there is no newer local checkpoint"
Launch = Callable[..., tuple[bool, str]]


@pytest.fixture(scope="module")
def launch(seed_folder: Path, corpus: Path) -> Launch:
    """Run or resume in `root`: whether both processes ended well, and what they said."""

    def _launch(root: Path, flags: str, resume: bool = False, local: bool = True, **extra: str) -> tuple[bool, str]:
        words = f"pretrain --model {seed_folder} --data {corpus} --output {root / 'run'} {FLAGS} {flags}".split()
        words += ["--local-folder", str(root / "local"), "--local-interval", "1"] if local else []
        words += ["--resume"] if resume else []
        logs = [root / f"log_{rank}.txt" for rank in range(2)]
        each = [environment | {"LOCAL_WORLD_SIZE": "1", **extra} for environment in environments(2)]
        ended = launcher.run("tests.parallel.local_worker", words, each, logs, 600)
        return ended, " ".join(" ".join(log.read_text() for log in logs).split())

    return _launch


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def whole(launch: Launch, layout: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has happened to."""
    root = tmp_path_factory.mktemp("whole")
    ended, said = launch(root, layout, local=False)
    assert ended, said
    return root / "run"


@pytest.fixture(scope="module")
def killed(launch: Launch, layout: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed before step 7, whose local checkpoints are of step 6."""
    root = tmp_path_factory.mktemp("killed")
    ended, _ = launch(root, layout, KILLED_AT="7")
    assert not ended
    assert names(root) == ["rank-0/step-0000006.rank-0", "rank-1/step-0000006.rank-1"]
    return root


def names(root: Path) -> list[str]:
    return sorted(f"{path.parent.name}/{path.name}" for path in (root / "local").rglob("step-*"))


def is_equal(run: Path, whole: Path) -> None:
    """The figures, and every byte of the last checkpoint: weights, optimizer, what a resume needs."""
    assert without_speed(read_metrics(run)) == without_speed(read_metrics(whole))
    last = "checkpoints/iter_0000008"
    assert not check_files(run / last)
    found, wanted = (json.loads((each / last / FILE_DIGESTS).read_text())["files"] for each in (run, whole))
    assert {**found, ".metadata": ""} == {**wanted, ".metadata": ""}  # which names the save


@pytest.mark.parametrize("case", ["whole", "damaged", "missing"])
def test_a_killed_run(case: str, launch: Launch, layout: str, killed: Path, whole: Path, tmp_path: Path) -> None:
    root = shutil.copytree(killed, tmp_path / "root")
    if case == "damaged":
        (file,) = (root / "local").rglob("step-0000006.rank-1/state.pt")
        flip(file)
    if case == "missing":
        (folder,) = (root / "local").rglob("step-0000006.rank-0")
        shutil.rmtree(folder)
    ended, said = launch(root, layout, resume=True)
    assert ended, said
    assert {
        "whole": "resuming from the local checkpoint of step 6",
        "damaged": "step-0000006.rank-1: is damaged: state.pt",
        "missing": "the local checkpoint of step 6 is incomplete: rank 0 has none",
    }[case] in said
    assert (FALLEN_BACK in said) == (case != "whole")
    is_equal(root / "run", whole)


def test_a_rank_that_is_killed_while_it_writes(launch: Launch, layout: str, whole: Path, tmp_path: Path) -> None:
    """The other has written its own: the checkpoint before is the newest that both have."""
    ended, _ = launch(tmp_path, layout, KILLED_RANK="1", KILLED_WRITING="6")
    assert not ended
    assert {"rank-0/step-0000005.rank-0", "rank-1/step-0000005.rank-1"} <= set(names(tmp_path))
    assert "rank-1/step-0000006.rank-1" not in names(tmp_path)
    ended, said = launch(tmp_path, layout, resume=True)
    assert ended, said
    assert "resuming from the local checkpoint of step 5, which is newer than the checkpoint of step 4" in said
    is_equal(tmp_path / "run", whole)


def test_another_node_has_a_copy(launch: Launch, layout: str, whole: Path, tmp_path: Path) -> None:
    """Of the rank whose disk is new; and of the rank whose own file is damaged."""
    flags = f"{layout} --local-copies 2"
    ended, _ = launch(tmp_path, flags, KILLED_AT="6")
    assert not ended
    assert names(tmp_path) == [f"rank-{node}/step-0000005.rank-{rank}" for node in (0, 1) for rank in (0, 1)]
    (start,) = (tmp_path / "local").glob("run-*/*")
    shutil.rmtree(start / "rank-1")
    ended, _ = launch(tmp_path, flags, resume=True, KILLED_AT="8")
    said = " ".join((tmp_path / "log_0.txt").read_text().split())
    assert "resuming from the local checkpoint of step 5" in said
    assert "backprop through" not in said  # the weights that are sent to the other node
    assert names(tmp_path) == [f"rank-{node}/step-0000007.rank-{rank}" for node in (0, 1) for rank in (0, 1)]

    (start,) = (tmp_path / "local").glob("run-*/*")
    flip(start / "rank-0/step-0000007.rank-0/state.pt")
    ended, said = launch(tmp_path, flags, resume=True)
    assert ended, said
    assert "rank-0/step-0000007.rank-0: is damaged" in said
    assert "resuming from the local checkpoint of step 7" in said
    is_equal(tmp_path / "run", whole)


def test_a_copy_that_cannot_be_written(launch: Launch, layout: str, whole: Path, tmp_path: Path) -> None:
    """The other node has both states: the run ends rather than go on with fewer copies, and resumes from them."""
    flags = f"{layout} --local-copies 2"
    ended, said = launch(tmp_path, flags, FULL_RANK="1", FULL_AT="6")
    assert not ended
    assert "no space left on the disk" in said
    assert names(tmp_path) == ["rank-0/step-0000006.rank-0", "rank-0/step-0000006.rank-1"]
    ended, said = launch(tmp_path, flags, resume=True)
    assert ended, said
    assert "resuming from the local checkpoint of step 6" in said
    is_equal(tmp_path / "run", whole)
