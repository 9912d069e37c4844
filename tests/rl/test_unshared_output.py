"""The checks of `tests.train.test_unshared_output` for reinforcement learning with a value model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.test_unshared_output import check_unshared_save

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow
FLAGS = "--method tracerl --trace-steps 1 --value-model --value-lr 1e-3 --gae-lambda 0.9 --group-size 8 "
FLAGS += "--global-batch-size 32 --micro-batch-size 8 --seq-length 16 --gen-length 4 --steps 4 --save-interval 2"


@pytest.mark.parametrize("engine", ["--sharding fsdp", "--engine megatron --tp 2"])
def test_a_save(engine: str, tmp_path: Path, policy_folder: Path, problems: Path, reward: str) -> None:
    words = f"rl --model {policy_folder} --data {problems} --reward {reward} --output run {FLAGS} {engine}"
    check_unshared_save(words, tmp_path)
