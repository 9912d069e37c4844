"""Step of a megatron-core optimizer by kernels that clip and round in the same pass over memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from dlm_bridge.parallel import mcore_compat, platform
from dlm_bridge.parallel.core import is_float8tensor, param_is_not_shared, param_is_not_tensor_parallel_duplicate
from dlm_bridge.parallel.mcore_patches.optimizers import float16_params, fp32_params, is_distributed, param_range


class StepInputs(NamedTuple):
    """Inputs of the step for one main param."""

    gradient: torch.Tensor | None
    model_param: torch.Tensor | None = None  # bf16 or fp16, written with the main param; None if there is none


class FusedOptimizerStep:
    """Fused step of `part`, one of megatron-core's optimizers. All state stays in `part`, and so do its
    checkpoints."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.optimizer = part.optimizer
        self.adam = hasattr(self.optimizer, "adam_w_mode")
        self.distributed = is_distributed(part)
        # In bf16 without a loss scale the model's gradients are read directly; megatron-core copies them to fp32.
        self.direct = hasattr(part, "float16_groups") and not self.distributed and part.grad_scaler is None
        self.inputs: dict[torch.Tensor, StepInputs] = {}  # by main param, in this step
        self._groups: dict[int, Any] = {}  # FusedParamGroup by number
        self._shards: DistributedShards | None = None

    @classmethod
    def of(cls, part: Any) -> FusedOptimizerStep | None:
        """Create the fused step; None if the kernels do not compute the same step as the part's own optimizer."""
        optimizer = getattr(part, "optimizer", None)
        if optimizer is None or getattr(part, "is_stub_optimizer", False):
            return None
        if not platform.current().uses_fused_kernels():
            return None
        return cls(part) if _is_plain_adamw(optimizer) or _is_plain_sgd(optimizer) else None

    def prepare_grads(self) -> bool:
        """Same as the part's own: returns True if gradients overflowed."""
        if self.distributed:
            if self._shards is None or not self._shards.valid():
                self._shards = DistributedShards(self.part)
            overflowed = not self._shards.set_gradients() and self.part.prepare_grads()
        else:
            overflowed = not self.direct and self.part.prepare_grads()
        self.inputs = {} if overflowed else self._step_inputs()
        return overflowed

    def grads_for_norm(self) -> list[torch.Tensor]:
        """Same as the part's own; in the model's dtype if gradients are not copied."""
        if not self.direct:
            return mcore_compat.grads_for_norm(self.part)
        group = getattr(self.part, "tp_group", None)
        return [
            weight.gradient
            for main, weight in self.inputs.items()
            if weight.gradient is not None
            and param_is_not_shared(main)
            and param_is_not_tensor_parallel_duplicate(main, group)
        ]

    @contextmanager
    def clipping(self, clip_coef: torch.Tensor) -> Iterator[None]:
        """Context manager in which the part's `step_with_ready_grads()` multiplies gradients by `clip_coef`, a scalar
        on the device, as it reads them, and writes the model's bf16 or fp16 params with the main params."""
        rounds = any(each.model_param is not None for each in self.inputs.values())
        self.optimizer.step = lambda: self._step(clip_coef)
        if rounds:
            self.part._copy_main_params_to_model_params = lambda: None
        try:
            yield
        finally:
            self.inputs = {}
            del self.optimizer.step
            if rounds:
                del self.part._copy_main_params_to_model_params

    def _step_inputs(self) -> dict[torch.Tensor, StepInputs]:
        weights = {main: StepInputs(main.grad) for group in self.optimizer.param_groups for main in group["params"]}
        if self._shards is not None:
            model_params = self._shards.model_params
            return {main: StepInputs(gradient, model_params.get(main)) for main, (gradient, _) in weights.items()}
        part = self.part
        if self.direct:
            for group in part.fp32_from_fp32_groups:
                weights |= {main: StepInputs(main.main_grad) for main in group}
        pairs = float16_params(part)
        quantised = _quantised(pairs)
        for model, main in pairs:
            gradient = model.main_grad if self.direct else main.grad
            weights[main] = StepInputs(gradient, None if quantised else model.data)
        return weights

    def _step(self, clip_coef: torch.Tensor) -> None:
        from dlm_bridge.parallel.fused.optimizer_step import AdamSettings, FusedParamGroup, StepTensors

        state = self.optimizer.state
        for number, group in enumerate(self.optimizer.param_groups):
            together = self._groups.setdefault(number, FusedParamGroup())
            parameters = []
            for main in group["params"]:
                if self.adam and not state[main]:
                    self.optimizer.initialize_state(main, False)
                gradient, model_param = self.inputs[main]
                if gradient is not None:
                    averages = (state[main]["exp_avg"], state[main]["exp_avg_sq"]) if self.adam else ()
                    parameters.append(StepTensors(main.detach(), gradient, model_param, *averages))
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            if self.adam:
                group["step"] = group.get("step", 0) + 1
                beta1, beta2 = group["betas"]
                adam = AdamSettings(lr, beta1, beta2, group["eps"], decay, int(group["step"]))
                together.adam_step(parameters, clip_coef, adam)
            else:
                together.sgd_step(parameters, clip_coef, lr, decay)


class DistributedShards:
    """Views of this rank's shards of gradients and of bf16 or fp16 params in the distributed optimizer's buffers.
    megatron-core looks them up in every step, for which a GPU waits if there are many experts."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self._addresses = self._current_addresses()
        float16, fp32 = float16_params(part), fp32_params(part)
        # Otherwise megatron-core copies gradients to fp32, or checks them for the loss scale.
        as_they_are = all(model.main_grad.dtype == torch.float32 for model, _ in (*float16, *fp32))
        self.gradients: dict[torch.Tensor, torch.Tensor] | None = None
        if part.grad_scaler is None and as_they_are:
            self.gradients = {main: self._gradient(model) for model, main in (*float16, *fp32)}
        self.model_params = {} if _quantised(float16) else {main: self._model_param(model) for model, main in float16}

    def valid(self) -> bool:
        """True if the buffers have not moved."""
        return self._addresses == self._current_addresses()

    def set_gradients(self) -> bool:
        """Set the main params' gradients. Returns False if megatron-core has to."""
        if self.gradients is None:
            return False
        for main, gradient in self.gradients.items():
            main.grad = gradient
        return True

    def _current_addresses(self) -> list[int]:
        return [
            tensor.data_ptr()
            for buffer in self.part.buffers
            for bucket in buffer.buckets
            for tensor in (bucket.param_data, bucket.grad_data)
            if tensor is not None
        ]

    def _gradient(self, model: Any) -> torch.Tensor:
        return model.main_grad.view(-1)[param_range(self.part, model)]

    def _model_param(self, model: Any) -> torch.Tensor:
        """The shard in its bucket, from which other ranks gather it."""
        index, _, bucket = self.part.model_param_gbuf_map[model]
        own = param_range(self.part, model, "gbuf_world_in_bucket")
        return self.part.buffers[index].buckets[bucket].param_data.view(-1)[own]


def _quantised(pairs: list[tuple[Any, Any]]) -> bool:
    """True if megatron-core quantises the main params into the model's params."""
    return any(is_float8tensor(model) for model, _ in pairs)


def _is_plain_adamw(optimizer: Any) -> bool:
    """True for Transformer Engine's AdamW over fp32, detected by its attributes."""
    return (
        getattr(optimizer, "adam_w_mode", False)
        and hasattr(optimizer, "initialize_state")
        and not (optimizer.capturable or optimizer.master_weights or optimizer.use_decoupled_grad)
        and set(optimizer.name_to_dtype_map.values()) == {torch.float32}
        and all(group["bias_correction"] for group in optimizer.param_groups)
    )


def _is_plain_sgd(optimizer: Any) -> bool:
    """True for gradient descent without momentum. Transformer Engine's optimizer allocates velocities nevertheless."""
    return type(optimizer).__name__ == "FusedSGD" and all(
        not (group["momentum"] or group["dampening"] or group["nesterov"]) for group in optimizer.param_groups
    )
