"""The fp32 rows that Megatron FSDP's optimizer updates begin with what the source stores, not with its rounding. FSDP
itself needs GPUs: here its parameters are stood in for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlm_bridge import Bridge, Layout
from tests.interop.cases import models

pytestmark = pytest.mark.usefixtures("world_of_one")


class Chunk:
    """What FSDP's wrapper shows of one of several data parallel ranks: fp32 rows of each parameter."""

    ddp_config = SimpleNamespace(use_megatron_fsdp=True)

    def __init__(self, model: Any, rank: int, ranks: int) -> None:
        named = []
        for name, parameter in model.named_parameters():
            first, last = (len(parameter) * number // ranks for number in (rank, rank + 1))
            row = parameter[0].numel()
            rows = parameter.detach()[first:last].float().clone()
            part = slice(first * row, last * row)
            named.append(
                (
                    name,
                    SimpleNamespace(
                        orig_param=parameter,
                        megatron_fsdp_slice=part,
                        _local_tensor=rows,
                        to_local=lambda rows=rows: rows,
                    ),
                )
            )
        self.param_and_grad_buffer = SimpleNamespace(optimizer_named_parameters=named)
        self.module = SimpleNamespace(module=model)

    def rows(self) -> dict[str, torch.Tensor]:
        return {name: held._local_tensor for name, held in self.param_and_grad_buffer.optimizer_named_parameters}


class Alone:
    """Under FSDP megatron-core returns its optimizer itself, not a chain of one."""

    optimizer = SimpleNamespace(gpu_params_map_cpu_copy={})


@pytest.mark.parametrize("optimizer", [Alone(), SimpleNamespace(chained_optimizers=[Alone()])], ids=["alone", "chain"])
@pytest.mark.parametrize("name", ["gqa", "llada_moe"])
def test_main_params_begin_with_what_the_source_stores(name: str, optimizer: Any, tmp_path: Path) -> None:
    from dlm_bridge.parallel.weights import load_main_params

    models()[name].write(tmp_path)
    bridge = Bridge.from_hf(tmp_path)
    (exact,) = bridge.build_megatron_model(Layout(), torch.float32)
    (model,) = bridge.build_megatron_model(Layout(), torch.bfloat16)
    for rank in range(3):
        chunk, wanted = Chunk(model, rank, 3), Chunk(exact, rank, 3).rows()
        assert not all(torch.equal(rows, wanted[key]) for key, rows in chunk.rows().items())
        load_main_params([chunk], optimizer, bridge.checkpoint)
        assert [key for key, rows in chunk.rows().items() if not torch.equal(rows, wanted[key])] == []


def test_what_mends_an_optimizer_takes_one_that_is_no_chain() -> None:
    from dlm_bridge.parallel.mcore_patches.optimizers import (
        patch_offloading_resume,
        patch_param_order,
        patch_sgd_resume,
    )

    routers, matrices = [torch.zeros(2), torch.zeros(3)], [torch.zeros(4)]
    alone = SimpleNamespace(
        model_fp32_groups=[routers],
        model_float16_groups=[matrices],
        model_param_group_index_map={},
        init_state_fn=None,
        optimizer=None,
    )
    for patch in (patch_offloading_resume, patch_param_order, patch_sgd_resume):
        patch(alone)
    assert list(alone.model_param_group_index_map.values()) == [(0, 0), (0, 1), (0, 2)]
    assert alone.init_state_fn is not None
