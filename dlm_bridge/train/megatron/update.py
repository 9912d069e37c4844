"""The step of one of megatron-core's optimizers, taken by kernels that clip and round in the same pass over memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.parallel.core import is_float8tensor, param_is_not_shared, param_is_not_tensor_parallel_duplicate
from dlm_bridge.parallel.fused import available


@dataclass(frozen=True)
class Weight:
    """What goes with a master."""

    gradient: torch.Tensor | None
    half: torch.Tensor | None = None  # of the model, the master's rounding


class Update:
    """`part` is one of megatron-core's optimizers, and keeps all state; its checkpoints stay as they are."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.optimizer = part.optimizer
        self.adam = hasattr(self.optimizer, "adam_w_mode")
        self.distributed = hasattr(part, "shard_fp32_from_float16_groups")
        # In half precision without a loss scale nothing is to be done to the model's gradients before they are read:
        # megatron-core copies them to fp32 first.
        self.direct = hasattr(part, "float16_groups") and not self.distributed and part.grad_scaler is None

    @classmethod
    def of(cls, part: Any) -> Update | None:
        """None where the kernels would do something else than the part's own optimizer does."""
        optimizer = getattr(part, "optimizer", None)
        if not available() or optimizer is None or getattr(part, "is_stub_optimizer", False):
            return None
        return cls(part) if _is_plain_adamw(optimizer) or _is_plain_descent(optimizer) else None

    def prepare_grads(self) -> bool:
        """As the part's own: whether gradients overflowed."""
        return False if self.direct else self.part.prepare_grads()

    def get_main_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """As the part's own, but in the model's dtype where they are not copied."""
        if not self.direct:
            return self.part.get_main_grads_for_grad_norm()
        group = getattr(self.part, "tp_group", None)
        return [
            weight.gradient
            for master, weight in self._weights().items()
            if weight.gradient is not None
            and param_is_not_shared(master)
            and param_is_not_tensor_parallel_duplicate(master, group)
        ]

    @contextmanager
    def clipping(self, share: torch.Tensor) -> Iterator[None]:
        """Inside, the part's `step_with_ready_grads()` multiplies gradients by `share`, a scalar on the device, while
        it reads them, and writes the model's weights in half precision with the masters."""
        weights = self._weights()
        rounds = any(weight.half is not None for weight in weights.values())
        self.optimizer.step = lambda: self._step(weights, share)
        if rounds:
            self.part._copy_main_params_to_model_params = lambda: None
        try:
            yield
        finally:
            del self.optimizer.step
            if rounds:
                del self.part._copy_main_params_to_model_params

    def _weights(self) -> dict[torch.Tensor, Weight]:
        weights = {master: Weight(master.grad) for group in self.optimizer.param_groups for master in group["params"]}
        part = self.part
        if self.direct:
            for group in part.fp32_from_fp32_groups:
                weights |= {master: Weight(master.main_grad) for master in group}
        pairs = list(self._pairs())
        quantised = any(is_float8tensor(model) for model, _ in pairs)  # from the masters, by megatron-core
        for model, master in pairs:
            gradient = model.main_grad if self.direct else master.grad
            half = None if quantised else model.data
            if half is not None and self.distributed:  # its place in the bucket, from where other ranks gather it
                index, _, bucket = part.model_param_gbuf_map[model]
                mine = part._get_model_param_range_map(model)["gbuf_world_in_bucket"]
                half = part.buffers[index].buckets[bucket].param_data.view(-1)[mine.start : mine.end]
            weights[master] = Weight(gradient, half)
        return weights

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        """The model's weights in half precision with this rank's masters of them."""
        if self.distributed:
            models, masters = self.part.model_float16_groups, self.part.shard_fp32_from_float16_groups
        else:
            models = getattr(self.part, "float16_groups", [])
            masters = getattr(self.part, "fp32_from_float16_groups", [])
        for group in zip(models, masters, strict=True):
            yield from (pair for pair in zip(*group, strict=True) if pair[1] is not None)

    def _step(self, weights: dict[torch.Tensor, Weight], share: torch.Tensor) -> None:
        from dlm_bridge.parallel.fused.update import Adam, adam_step, gradient_step

        for group in self.optimizer.param_groups:
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            if self.adam:
                group["step"] = group.get("step", 0) + 1
                beta1, beta2 = group["betas"]
                adam = Adam(lr, beta1, beta2, group["eps"], decay, int(group["step"]))
            for master in group["params"]:
                if self.adam and not self.optimizer.state[master]:
                    self.optimizer.initialize_state(master, False)
                if (gradient := weights[master].gradient) is None:
                    continue
                half = weights[master].half
                half = None if half is None else half.view(-1)
                flat, gradient = master.detach().view(-1), gradient.view(-1)
                if self.adam:
                    state = self.optimizer.state[master]
                    average, square = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
                    adam_step(flat, gradient, average, square, half, share, adam)
                else:
                    gradient_step(flat, gradient, half, share, lr, decay)


def _is_plain_adamw(optimizer: Any) -> bool:
    """Whether this is Transformer Engine's AdamW over fp32, which has these attributes."""
    return (
        getattr(optimizer, "adam_w_mode", False)
        and hasattr(optimizer, "initialize_state")
        and not (optimizer.capturable or optimizer.master_weights or optimizer.use_decoupled_grad)
        and set(optimizer.name_to_dtype_map.values()) == {torch.float32}
        and all(group["bias_correction"] for group in optimizer.param_groups)
    )


def _is_plain_descent(optimizer: Any) -> bool:
    """Whether this is gradient descent without momentum. Transformer Engine's keeps velocities all the same."""
    return type(optimizer).__name__ == "FusedSGD" and all(
        not (group["momentum"] or group["dampening"] or group["nesterov"]) for group in optimizer.param_groups
    )
