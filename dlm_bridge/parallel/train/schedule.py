"""megatron-core's pipeline schedule over the micro-batches of a step, and its callbacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from dlm_bridge.parallel import platform
from dlm_bridge.parallel.batch import MicroBatch
from dlm_bridge.parallel.core import finalize_model_grads, get_forward_backward_func


def run_schedule(
    chunks: Sequence[Any],
    batches: Sequence[MicroBatch],
    inputs: Callable[[MicroBatch], dict[str, Any]],
    cp: int,
    forward_only: bool,
    timed: Callable[[], contextlib.AbstractContextManager[Any]] = nullcontext,
) -> list[torch.Tensor]:
    """Run megatron-core's pipeline schedule over micro-batches of the same shape.

    Args:
        batches: this rank's part of each micro-batch: 1 / cp of each row.
        inputs: returns the keyword arguments of a forward pass for a micro-batch on the device.
        timed: context manager in which each forward pass runs.

    Returns the sums of each micro-batch on the last stage's ranks, an empty list on others. Unless `forward_only`, the
    gradients of the losses, summed over all ranks, are in the chunks' buffers.
    """
    device = platform.current().device()
    no_tokens = torch.zeros((), dtype=torch.int, device=device)

    def step(data: Iterator[MicroBatch], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
        batch = next(data).to(device)
        if return_schedule_plan:  # megatron-core runs it, with another micro-batch's backward pass
            plan = model.build_schedule_plan(**inputs(batch))
            planned = plan.state.labels
            return plan, lambda output: (output, no_tokens, planned.sums)
        with timed():
            return model(**inputs(batch)), loss

    def loss(output: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return output[0], no_tokens, output[1]

    rows, length = batches[0].input_ids.shape
    several = len(chunks) > 1
    found: list[torch.Tensor] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(batches) for _ in chunks] if several else iter(batches),
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(batches),
        seq_length=length * cp,
        micro_batch_size=rows,
        forward_only=forward_only,
    )
    return found


def connect_schedule(chunks: Sequence[Any], optimizer: Any) -> None:
    """Set the callbacks of megatron-core's schedules: loss scaling, gradient reduction, no_sync."""
    transformer = chunks[0].config
    transformer.grad_scale_func = optimizer.scale_loss
    transformer.finalize_model_grads_func = _finalize_model_grads
    if chunks[0].ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]


def set_learning_rate(optimizer: Any, lr: float, weight_decay: float) -> None:
    """Set the learning rate and weight decay of each parameter group of megatron-core's optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay * group["wd_mult"]


def optimizer_weights(optimizer: Any) -> list[torch.Tensor]:
    """Weights that this rank's part of megatron-core's optimizer updates."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


@contextlib.contextmanager
def eval_mode(chunks: Sequence[Any]) -> Iterator[None]:
    """Context manager with layers in evaluation mode: without dropout."""
    for chunk in chunks:
        chunk.eval()
    yield
    for chunk in chunks:
        chunk.train()


@contextlib.contextmanager
def gathered_weights(chunks: Sequence[Any]) -> Iterator[None]:
    """Context manager, outside of a training step, in which all weights are gathered and forward passes do not gather
    them again."""
    overlapped = [chunk for chunk in chunks if _gathers_in_forward(chunk)]
    for chunk in overlapped:
        chunk.disable_forward_pre_hook()
    yield
    for chunk in overlapped:
        chunk.enable_forward_pre_hook()


def _finalize_model_grads(model: Any, num_tokens: Any = None, **kwargs: Any) -> None:
    """Sum the gradients over ranks without dividing by the number of tokens: the loss's weights contain the
    divisor."""
    finalize_model_grads(model, None, **kwargs)


def _gathers_in_forward(chunk: Any) -> bool:
    return chunk.ddp_config.overlap_param_gather and not chunk.ddp_config.use_megatron_fsdp
