"""megatron-core's step with Transformer Engine's Adam, taken by one kernel that clips and rounds too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dlm_bridge.parallel.core import is_float8tensor
from dlm_bridge.parallel.fused import available


def fuses(part: Any) -> bool:
    """Whether the kernel does what the optimizer of `part`, one of megatron-core's, would do: AdamW over fp32."""
    adam = getattr(part, "optimizer", None)
    return (
        available()
        and hasattr(adam, "adam_w_mode")  # Transformer Engine's
        and adam.adam_w_mode
        and not (adam.capturable or adam.master_weights or adam.use_decoupled_grad)
        and set(adam.name_to_dtype_map.values()) == {torch.float32}
        and all(group["bias_correction"] for group in adam.param_groups)
        and not getattr(part, "is_stub_optimizer", False)
    )


@contextmanager
def clipping(part: Any, share: torch.Tensor) -> Iterator[None]:
    """Inside, `part.step_with_ready_grads()` multiplies gradients by `share` [1], fp32 on the device, while it reads
    them, and writes the model's weights in half precision with the masters."""
    halves = dict(_halves(part))
    part.optimizer.step = lambda: _step(part.optimizer, share, halves)
    if halves:
        part._copy_main_params_to_model_params = lambda: None
    try:
        yield
    finally:
        del part.optimizer.step
        if halves:
            del part._copy_main_params_to_model_params


def _halves(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each master, and what of the model is its rounding; nothing where FP8 weights are quantised from the masters."""
    distributed = hasattr(part, "shard_fp32_from_float16_groups")
    models = getattr(part, "model_float16_groups" if distributed else "float16_groups", [])
    masters = getattr(part, "shard_fp32_from_float16_groups" if distributed else "fp32_from_float16_groups", [])
    pairs = [pair for groups in zip(models, masters, strict=True) for pair in zip(*groups, strict=True)]
    if any(is_float8tensor(model) for model, _ in pairs):
        return
    for model, master in pairs:
        if not distributed:
            yield master, model.data
        elif master is not None:  # its place among the bucket's weights, from where the other ranks gather it
            index, _, bucket = part.model_param_gbuf_map[model]
            mine = part._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            yield master, part.buffers[index].buckets[bucket].param_data.view(-1)[mine.start : mine.end]


def _step(adam: Any, share: torch.Tensor, halves: dict[torch.Tensor, torch.Tensor]) -> None:
    """As Transformer Engine's, whose state it is."""
    from dlm_bridge.parallel.fused.adam import Adam, adam_step

    for group in adam.param_groups:
        group["step"] = group.get("step", 0) + 1
        settings = Adam(
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=float(group["weight_decay"]),
            step=int(group["step"]),
        )
        for master in group["params"]:
            if not adam.state[master]:
                adam.initialize_state(master, False)
            if master.grad is None:
                continue
            state = adam.state[master]
            flat = (
                tensor.detach().view(-1) for tensor in (master, master.grad, state["exp_avg"], state["exp_avg_sq"])
            )
            adam_step(*flat, halves.get(master), share, settings)
