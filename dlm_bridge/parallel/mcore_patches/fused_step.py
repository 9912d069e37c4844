"""The step of one of megatron-core's optimizers, taken by kernels that clip and round in the same pass over memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from dlm_bridge.parallel.core import is_float8tensor, param_is_not_shared, param_is_not_tensor_parallel_duplicate
from dlm_bridge.parallel.fused import available


class StepInputs(NamedTuple):
    """What goes with a master."""

    gradient: torch.Tensor | None
    half: torch.Tensor | None = None  # of the model, the master's rounding


class FusedOptimizerStep:
    """`part` is one of megatron-core's optimizers, and keeps all state; its checkpoints stay as they are."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.optimizer = part.optimizer
        self.adam = hasattr(self.optimizer, "adam_w_mode")
        self.distributed = hasattr(part, "shard_fp32_from_float16_groups")
        # In half precision without a loss scale nothing is to be done to the model's gradients before they are read:
        # megatron-core copies them to fp32 first.
        self.direct = hasattr(part, "float16_groups") and not self.distributed and part.grad_scaler is None
        self.weights: dict[torch.Tensor, StepInputs] = {}  # by master, as of this step
        self._groups: dict[int, Any] = {}  # fused.update's Group, by the parameter group's number
        self._shards: DistributedShards | None = None

    @classmethod
    def of(cls, part: Any) -> FusedOptimizerStep | None:
        """None where the kernels would do something else than the part's own optimizer does."""
        optimizer = getattr(part, "optimizer", None)
        if not available() or optimizer is None or getattr(part, "is_stub_optimizer", False):
            return None
        return cls(part) if _is_plain_adamw(optimizer) or _is_plain_sgd(optimizer) else None

    def prepare_grads(self) -> bool:
        """As the part's own: whether gradients overflowed."""
        if self.distributed:
            if self._shards is None or not self._shards.hold():
                self._shards = DistributedShards(self.part)
            overflowed = not self._shards.give_gradients() and self.part.prepare_grads()
        else:
            overflowed = not self.direct and self.part.prepare_grads()
        self.weights = {} if overflowed else self._weights()
        return overflowed

    def get_main_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """As the part's own, but in the model's dtype where they are not copied."""
        if not self.direct:
            return self.part.get_main_grads_for_grad_norm()
        group = getattr(self.part, "tp_group", None)
        return [
            weight.gradient
            for master, weight in self.weights.items()
            if weight.gradient is not None
            and param_is_not_shared(master)
            and param_is_not_tensor_parallel_duplicate(master, group)
        ]

    @contextmanager
    def clipping(self, share: torch.Tensor) -> Iterator[None]:
        """Inside, the part's `step_with_ready_grads()` multiplies gradients by `share`, a scalar on the device, while
        it reads them, and writes the model's weights in half precision with the masters."""
        rounds = any(weight.half is not None for weight in self.weights.values())
        self.optimizer.step = lambda: self._step(share)
        if rounds:
            self.part._copy_main_params_to_model_params = lambda: None
        try:
            yield
        finally:
            self.weights = {}
            del self.optimizer.step
            if rounds:
                del self.part._copy_main_params_to_model_params

    def _weights(self) -> dict[torch.Tensor, StepInputs]:
        weights = {
            master: StepInputs(master.grad) for group in self.optimizer.param_groups for master in group["params"]
        }
        if self._shards is not None:
            halves = self._shards.halves
            return {master: StepInputs(gradient, halves.get(master)) for master, (gradient, _) in weights.items()}
        part = self.part
        if self.direct:
            for group in part.fp32_from_fp32_groups:
                weights |= {master: StepInputs(master.main_grad) for master in group}
        pairs = list(_pairs(getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", [])))
        quantised = _quantised(pairs)
        for model, master in pairs:
            gradient = model.main_grad if self.direct else master.grad
            weights[master] = StepInputs(gradient, None if quantised else model.data)
        return weights

    def _step(self, share: torch.Tensor) -> None:
        from dlm_bridge.parallel.fused.optimizer_step import AdamSettings, FusedParamGroup, StepTensors

        state = self.optimizer.state
        for number, group in enumerate(self.optimizer.param_groups):
            together = self._groups.setdefault(number, FusedParamGroup())
            parameters = []
            for master in group["params"]:
                if self.adam and not state[master]:
                    self.optimizer.initialize_state(master, False)
                gradient, half = self.weights[master]
                if gradient is not None:
                    averages = (state[master]["exp_avg"], state[master]["exp_avg_sq"]) if self.adam else ()
                    parameters.append(StepTensors(master.detach(), gradient, half, *averages))
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            if self.adam:
                group["step"] = group.get("step", 0) + 1
                beta1, beta2 = group["betas"]
                adam = AdamSettings(lr, beta1, beta2, group["eps"], decay, int(group["step"]))
                together.adam_step(parameters, share, adam)
            else:
                together.sgd_step(parameters, share, lr, decay)


class DistributedShards:
    """This rank's shares of gradients and of weights in half precision, where the distributed optimizer's buffers have
    them: megatron-core looks each up anew at every step, which takes a GPU's time where there are many experts."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self._places = self._now()
        halves = list(_pairs(part.model_float16_groups, part.shard_fp32_from_float16_groups))
        others = list(_pairs(part.model_fp32_groups, part.shard_fp32_groups))
        # Copied where they are not fp32, and looked at first where there is a loss scale: by megatron-core.
        as_they_are = all(model.main_grad.dtype == torch.float32 for model, _ in (*halves, *others))
        self.gradients: dict[torch.Tensor, torch.Tensor] | None = None
        if part.grad_scaler is None and as_they_are:
            self.gradients = {master: self._gradient(model) for model, master in (*halves, *others)}
        self.halves = {} if _quantised(halves) else {master: self._half(model) for model, master in halves}

    def hold(self) -> bool:
        """Whether the buffers lie where they lay."""
        return self._places == self._now()

    def give_gradients(self) -> bool:
        """To the masters. False where that is megatron-core's to do."""
        if self.gradients is None:
            return False
        for master, gradient in self.gradients.items():
            master.grad = gradient
        return True

    def _now(self) -> list[int]:
        return [
            tensor.data_ptr()
            for buffer in self.part.buffers
            for bucket in buffer.buckets
            for tensor in (bucket.param_data, bucket.grad_data)
            if tensor is not None
        ]

    def _gradient(self, model: Any) -> torch.Tensor:
        mine = self.part._get_model_param_range_map(model)["param"]
        return model.main_grad.view(-1)[mine.start : mine.end]

    def _half(self, model: Any) -> torch.Tensor:
        """Its place in the bucket, from where other ranks gather it."""
        index, _, bucket = self.part.model_param_gbuf_map[model]
        mine = self.part._get_model_param_range_map(model)["gbuf_world_in_bucket"]
        return self.part.buffers[index].buckets[bucket].param_data.view(-1)[mine.start : mine.end]


def _pairs(models: list[list[Any]], masters: list[list[Any]]) -> Iterator[tuple[Any, Any]]:
    """The model's weights with this rank's masters of them."""
    for group in zip(models, masters, strict=True):
        yield from (pair for pair in zip(*group, strict=True) if pair[1] is not None)


def _quantised(pairs: list[tuple[Any, Any]]) -> bool:
    """Whether the model's weights are made from the masters by megatron-core."""
    return any(is_float8tensor(model) for model, _ in pairs)


def _is_plain_adamw(optimizer: Any) -> bool:
    """Whether this is Transformer Engine's AdamW over fp32, which has these attributes."""
    return (
        getattr(optimizer, "adam_w_mode", False)
        and hasattr(optimizer, "initialize_state")
        and not (optimizer.capturable or optimizer.master_weights or optimizer.use_decoupled_grad)
        and set(optimizer.name_to_dtype_map.values()) == {torch.float32}
        and all(group["bias_correction"] for group in optimizer.param_groups)
    )


def _is_plain_sgd(optimizer: Any) -> bool:
    """Whether this is gradient descent without momentum. Transformer Engine's keeps velocities all the same."""
    return type(optimizer).__name__ == "FusedSGD" and all(
        not (group["momentum"] or group["dampening"] or group["nesterov"]) for group in optimizer.param_groups
    )
