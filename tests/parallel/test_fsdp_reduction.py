"""Megatron FSDP sums whole gradients at the end of a step only; what its optimizer gets is one process's gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm_bridge.parallel.mcore_compat import IS_0_16
from dlm_bridge.train.config import TrainConfig
from tests.processes import OK, launch


@pytest.mark.parametrize("fsdp", [None, "optim", "optim_grads", "optim_grads_params"])
def test_whole_gradients_are_summed_at_the_end(fsdp: str | None, tmp_path: Path) -> None:
    from dlm_bridge.parallel.train.mcore_config import data_parallel_config

    config = TrainConfig.from_flags(
        task="pretrain", model="model", data=["data"], output=str(tmp_path), engine="megatron", steps=1, fsdp=fsdp
    )
    found = data_parallel_config(config)
    assert found.overlap_grad_reduce == (fsdp != "optim" or not IS_0_16)
    assert found.overlap_param_gather
    assert (found.bucket_size is not None) == (fsdp is not None)  # else all gradients are in one bucket, whole


def test_the_optimizer_gets_one_process_s_gradients(tmp_path: Path) -> None:
    report = launch("tests.parallel.fsdp_reduction_worker", tmp_path, timeout_s=120)
    assert len(report) == 7
    assert {name: said for name, said in report.items() if said != [OK] * 2} == {}


def test_the_optimizer_of_each_instance_gets_one_process_s_gradients(tmp_path: Path) -> None:
    """--optimizer-instances: gradients are summed inside the instances and between them."""
    report = launch("tests.parallel.fsdp_reduction_worker", tmp_path, processes=4, timeout_s=120)
    assert len(report) == 4
    assert {name: said for name, said in report.items() if said != [OK] * 4} == {}
