"""One of two processes: LoRA layers of megatron-core's own linear layers, built as Megatron Bridge builds its adapters
(an inner and an outer projection, the inner's rank gathered), load what `adapter import` wrote and run.

python -m tests.interop.adapter_worker FOLDER      with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set

FOLDER has canonical/ and fused/, Megatron adapters of two layers, and expected.pt: by style and Megatron module the
unsharded change of the fused weight in layer 1.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlm_bridge import Layout
from tests.processes import work

HIDDEN, FFN, RANK, SCALE = 32, 48, 4, 2.0
# Style -> adapter's place under a layer -> input and output sizes, whether the input is cut, whether rows are two.
LAYERS: dict[str, dict[str, tuple[int, int, bool, bool]]] = {
    "canonical": {
        "self_attention.linear_qkv.adapter.adapter_q": (HIDDEN, 32, False, False),
        "self_attention.linear_qkv.adapter.adapter_k": (HIDDEN, 16, False, False),
        "self_attention.linear_proj.adapter": (HIDDEN, HIDDEN, True, False),
    },
    "fused": {
        "self_attention.linear_qkv.adapter": (HIDDEN, 64, False, False),
        "mlp.linear_fc1.adapter": (HIDDEN, 2 * FFN, False, True),
        "mlp.linear_fc2.adapter": (FFN, HIDDEN, True, False),
    },
}


def check(folder: Path, style: str, place: str) -> None:
    """The loaded layer's output is the change of the weight times the input, cut as the weight is."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    columns, rows, cut, gated = LAYERS[style][place]
    config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True)
    plain: dict[str, Any] = {"config": config, "bias": False, "init_method": torch.nn.init.zeros_}
    key = f"decoder.layers.{place}."
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    states: dict[str, Any] = {}  # of both layers: megatron-core wants a tensor covered whole
    for number in range(2):
        offsets = ((0, number, 2),)
        if cut:
            inner = RowParallelLinear(columns, RANK, input_is_parallel=True, skip_bias_add=True, **plain)
        else:
            inner = ColumnParallelLinear(columns, RANK, gather_output=True, **plain)
        outer = ColumnParallelLinear(RANK, rows, gather_output=cut, **plain)
        state = inner.sharded_state_dict(f"{key}linear_in.", offsets, metadata)
        state |= outer.sharded_state_dict(f"{key}linear_out.", offsets, metadata)
        if gated:
            weight = f"{key}linear_out.weight"
            state[weight] = apply_swiglu_sharded_factory(state[weight], offsets)
        states[f"layer{number}"] = state
    loaded = dist_checkpointing.load(states, str(folder / style / "iter_0000000"))["layer1"]
    for layer, name in ((inner, "linear_in"), (outer, "linear_out")):
        layer.load_state_dict({"weight": loaded[f"{key}{name}.weight"]}, strict=False)
    rank = dist.get_rank()
    inputs = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    wanted = inputs @ torch.load(folder / "expected.pt")[style][place].T
    shard = inputs.chunk(2, dim=-1)[rank].contiguous() if cut else inputs
    found = SCALE * outer(inner(shard)[0])[0]
    if gated:
        wanted = torch.cat([half.chunk(2, dim=-1)[rank] for half in wanted.chunk(2, dim=-1)], dim=-1)
    elif not cut:
        wanted = wanted.chunk(2, dim=-1)[rank]
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-5, atol=1e-5)


def main(folder: Path) -> None:
    from dlm_bridge.parallel import groups

    torch.set_num_threads(1)
    groups.initialize(Layout(tp=2))
    checks = [
        (f"{style} {place}", partial(check, folder, style, place)) for style in LAYERS for place in LAYERS[style]
    ]
    work(folder, checks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
