"""Processes that see different folders, as hosts do whose output is not shared or whose network file system shows
changes late: each has its own working directory, and paths are relative.

python -m tests.train.views_worker FOLDER
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from dlm_bridge.convert.manifest import FILE_DIGESTS, digests_of, file_names, write_digests
from dlm_bridge.distributed import raised_everywhere
from dlm_bridge.errors import CheckpointError
from dlm_bridge.hub import TRACKER
from dlm_bridge.train import checkpoints
from dlm_bridge.train.checkpoints import STATE, ResumePoint, find_resume_point, named_checkpoints
from dlm_bridge.train.config import TrainConfig
from tests.processes import work
from tests.refusals import refused

ROOT = Path("checkpoints")
FIRST, LAST = ROOT / "step-0000002", ROOT / "step-0000004"
CUT = LAST / "c.bin"


def checks(root: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    for name, check in CHECKS.items():
        yield name, partial(in_own_view, root, name, check)


def in_own_view(root: Path, name: str, check: Callable[[int], None]) -> None:
    """Run a check in this rank's copy of a run with two checkpoints."""
    rank = dist.get_rank()
    view = root / name / f"host-{rank}"
    for folder in (view / FIRST, view / LAST):
        folder.mkdir(parents=True)
        for file in (STATE, "a.bin", "b.bin", "c.bin"):
            (folder / file).write_bytes(file.encode() * 100)
        write_digests(folder, digests_of(folder, file_names(folder)))
    os.chdir(view)
    dist.barrier()
    with mock.patch.object(checkpoints, "LOOK_AGAIN_S", 0.0):
        check(rank)
    dist.barrier()


def find() -> ResumePoint:
    return find_resume_point(named_checkpoints(ROOT), STATE)


@contextlib.contextmanager
def late(change: Callable[[], None]) -> Iterator[None]:
    """Context in which a change becomes visible after a second, and ranks look again for longer."""
    timer = threading.Timer(1.0, change)
    timer.start()
    with mock.patch.object(checkpoints, "LOOK_AGAIN_S", 60.0):
        yield
    timer.join()


def views_are_equal(_: int) -> None:
    assert find() == ResumePoint(4, LAST)


def both_lack_a_file(_: int) -> None:
    CUT.unlink()
    point = find()
    assert (point.step, point.folder) == (2, FIRST)
    assert [folder for folder, _ in point.damaged] == [LAST]


def both_read_damage(_: int) -> None:
    for name in ("b.bin", "c.bin"):  # one is read by either rank
        (LAST / name).write_bytes(b"x" * 500)
    assert [folder for folder, _ in find().damaged] == [LAST]


def lacks_the_newest(blind: int, rank: int) -> None:
    if rank == blind:
        shutil.rmtree(LAST)
    with refused(CheckpointError, LAST, "rank 0", "rank 1"):
        find()


def lacks_all(blind: int, rank: int) -> None:
    if rank == blind:
        shutil.rmtree(ROOT)
    with refused(CheckpointError, FIRST, "rank 0", "rank 1"):
        find()


def lacks_a_file(name: str, rank: int) -> None:
    if rank == 1:
        (LAST / name).unlink()
    with refused(CheckpointError, LAST / name, "rank 0", "rank 1"):
        find()


def sees_a_shorter_file(rank: int) -> None:
    if rank == 1:
        CUT.write_bytes(b"c")
    with refused(CheckpointError, CUT, "rank 0", "rank 1"):
        find()


def sees_it_late(rank: int) -> None:
    hidden = LAST.rename(ROOT / ".hidden") if rank == 1 else LAST
    dist.barrier()
    with late(lambda: None if rank == 0 else shutil.move(hidden, LAST)):
        assert find() == ResumePoint(4, LAST)


def reads_damage_alone(bad: int, rank: int) -> None:
    if rank == bad:
        for name in ("b.bin", "c.bin"):
            (LAST / name).write_bytes(b"x" * 500)
    with refused(CheckpointError, LAST, "rank 0", "rank 1", ".bin"):
        find()
    assert LAST.is_dir()


def _iterations(tracked: str) -> None:
    from dlm_bridge.convert.formats.dcp import DCP_METADATA

    for folder in (FIRST, LAST):
        (folder / FILE_DIGESTS).unlink()
        (folder / STATE).rename(folder / DCP_METADATA)
        write_digests(folder, digests_of(folder, file_names(folder)))
        folder.rename(folder.with_name(folder.name.replace("step-", "iter_")))
    (ROOT / TRACKER).write_text(tracked)


def trackers_differ(rank: int) -> None:
    from dlm_bridge.parallel.train.checkpoints import find_iteration

    _iterations("42"[rank])
    with refused(CheckpointError, ROOT / TRACKER, "rank 0", "rank 1"):
        find_iteration(Path())


def lacks_all_iterations(blind: int, rank: int) -> None:
    from dlm_bridge.parallel.train.checkpoints import find_iteration

    _iterations("4")
    if rank == blind:
        for folder in ROOT.glob("iter_*"):
            shutil.rmtree(folder)
    with refused(CheckpointError, ROOT / "iter_0000002", "rank 0", "rank 1"):
        find_iteration(Path())


def local_records_differ(rank: int) -> None:
    from dlm_bridge.parallel.train.local_checkpoints import LocalCheckpoints, Record

    if rank == 0:
        Record(start="a").write(Path())
    config = TrainConfig.from_flags(
        engine="megatron", model="model", data=["data"], output=".", steps=1, local_folder="local"
    )
    with refused(CheckpointError, Path("local_checkpoints.json"), "rank 0", "rank 1"):
        LocalCheckpoints(config)


def _written(rank: int) -> list[checkpoints.RankFiles]:
    """A checkpoint of which this rank has written a file."""
    from dlm_bridge.distributed import from_all

    (FIRST / f"__{rank}_0.distcp").write_bytes(b"rank" * 100)
    return from_all(checkpoints.rank_files(FIRST, rank))


def a_rank_s_files_are_missing(rank: int) -> None:
    written = _written(rank)
    with refused(CheckpointError, FIRST / "__1_0.distcp", "rank 1"), raised_everywhere():
        if rank == 0:
            checkpoints.gather_digests(FIRST, written)


def a_rank_s_files_come_late(rank: int) -> None:
    written = _written(rank)
    with late(lambda: (FIRST / "__1_0.distcp").write_bytes(b"rank" * 100)), raised_everywhere():
        if rank == 0:
            checkpoints.gather_digests(FIRST, written)


CHECKS: dict[str, Callable[[int], None]] = {
    "views are equal": views_are_equal,
    "both lack a file": both_lack_a_file,
    "both read damage": both_read_damage,
    "the first rank lacks the newest": partial(lacks_the_newest, 0),
    "the second rank lacks the newest": partial(lacks_the_newest, 1),
    "the first rank lacks all": partial(lacks_all, 0),
    "the second rank lacks all": partial(lacks_all, 1),
    "lacks a file": partial(lacks_a_file, "c.bin"),
    "lacks the digests": partial(lacks_a_file, FILE_DIGESTS),
    "sees a shorter file": sees_a_shorter_file,
    "sees it late": sees_it_late,
    "the first rank reads damage": partial(reads_damage_alone, 0),
    "the second rank reads damage": partial(reads_damage_alone, 1),
    "trackers differ": trackers_differ,
    "the first rank lacks all iterations": partial(lacks_all_iterations, 0),
    "the second rank lacks all iterations": partial(lacks_all_iterations, 1),
    "local records differ": local_records_differ,
    "a rank's files are missing": a_rank_s_files_are_missing,
    "a rank's files come late": a_rank_s_files_come_late,
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    work(Path(sys.argv[1]), checks(Path(sys.argv[1])))
