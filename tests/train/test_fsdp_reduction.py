"""When Megatron FSDP sums gradients over ranks: with whole gradients on each rank at the end of a step only."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlm_bridge.train.config import TrainConfig


@pytest.mark.parametrize("fsdp", [None, "optim", "optim_grads", "optim_grads_params"])
def test_whole_gradients_are_summed_at_the_end(fsdp: str | None, tmp_path: Path) -> None:
    from dlm_bridge.train.megatron.setup import data_parallel_config

    config = TrainConfig(
        task="pretrain", model="model", data=["data"], output=str(tmp_path), engine="megatron", steps=1, fsdp=fsdp
    )
    found = data_parallel_config(config)
    assert found.overlap_grad_reduce == (fsdp != "optim")
    assert found.overlap_param_gather
