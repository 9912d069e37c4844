"""Linear layers and experts with quantised weights.

On a GPU, FP8 and INT8 weights are multiplied with activations that are quantised per token, and INT4 weights in
PyTorch's kernel for them. Everywhere else a weight is dequantised for each product, one layer or expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import grouped_mm, linear

from dlm_bridge.exports.schemes import QuantizedWeight

FP8, FP8_MAX, INT8_MAX = torch.float8_e4m3fn, 448.0, 127.0
_INNER_TILES = 8  # of PyTorch's INT4 layout
_FEWEST_ROWS = 32  # of the INT8 product, which needs more than 16


class QuantizedLinear(nn.Module):
    """Linear layer with a quantised weight.

    Args:
        weight: [out, in].
        bias: [out], in the dtype of the model; None: no bias.
        dtype: dtype of the activations.
    """

    values: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.values.shape[0], weight.columns
        self._bits, self._group = weight.bits, weight.group
        self.product = _product_of(weight, dtype)
        values, scale = _prepared(weight, self.product)
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Output [..., out] of an input [..., in]."""
        if self.product is None:
            return linear(x, self.weight(x.dtype), self.bias)
        rows = x.reshape(-1, self.in_features)
        output = self.product(rows, self.values, self.scale).view(*x.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised weight [out, in]."""
        return QuantizedWeight(self.values, self.scale, self._bits, self._group).dequantize(dtype)

    def extra_repr(self) -> str:
        kind = str(self.values.dtype).removeprefix("torch.") if self._bits == 8 else "int4"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}"


class QuantizedExperts(nn.Module):
    """Gated experts with quantised weights, in place of a module of transformers with the same arguments.

    Args:
        gate_up: [experts, 2 * inner, hidden]; of each expert the gate's rows come first.
        down: [experts, hidden, inner].
        gate: gating function of the output [..., 2 * inner] of `gate_up`, to [..., inner].
        dtype: dtype of the activations.
        biases: those of `gate_up` [experts, 2 * inner], in the same order, and of `down` [experts, hidden].
    """

    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def __init__(
        self,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        gate: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
        biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    ) -> None:
        super().__init__()
        self.num_experts, self._gate = len(gate_up.values), gate
        self._kinds = {"gate_up": (gate_up.bits, gate_up.group), "down": (down.bits, down.group)}
        self._scaled = all(_takes_fp8(each, dtype) for each in (gate_up, down))
        for name, weight in (("gate_up", gate_up), ("down", down)):
            self.register_buffer(f"{name}_values", weight.values)
            self.register_buffer(f"{name}_scale", weight.scale.float() if self._scaled else weight.scale)
        for name, bias in zip(("gate_up", "down"), biases, strict=True):
            self.register_buffer(f"{name}_bias", bias)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of the outputs of each token's K experts, [N, H].

        Args:
            hidden_states: [N, H].
            top_k_index: indices [N, K] of the experts.
            top_k_weights: routing weights [N, K].
        """
        chosen = top_k_index.shape[1]
        numbers, order = top_k_index.flatten().sort(stable=True)
        rows = hidden_states[order // chosen]
        if hidden_states.is_cuda:
            outputs = self._grouped(rows, numbers)
        else:
            outputs = torch.empty_like(rows)
            counts = torch.bincount(numbers, minlength=self.num_experts).tolist()
            first = 0
            for expert, count in enumerate(counts):
                if count:
                    part = slice(first, first + count)
                    inner = linear(rows[part], self.weight("gate_up", rows.dtype, expert))
                    inner = self._gate(self._biased(inner, "gate_up", numbers[part]))
                    inner = linear(inner, self.weight("down", rows.dtype, expert))
                    outputs[part] = self._biased(inner, "down", numbers[part])
                    first += count
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        weighted = outputs[places].view(*top_k_index.shape, -1) * top_k_weights[..., None]
        return weighted.sum(dim=1).to(hidden_states.dtype)

    def weight(self, name: str, dtype: torch.dtype, expert: int | None = None) -> torch.Tensor:
        """A dequantised weight: "gate_up" or "down", of one expert or of all."""
        values, scale = getattr(self, f"{name}_values"), getattr(self, f"{name}_scale")
        if expert is not None:
            values, scale = values[expert], scale[expert]
        return QuantizedWeight(values, scale, *self._kinds[name]).dequantize(dtype)

    def _biased(self, rows: torch.Tensor, name: str, numbers: torch.Tensor) -> torch.Tensor:
        bias: torch.Tensor | None = getattr(self, f"{name}_bias")
        return rows if bias is None else rows + bias[numbers]

    def _grouped(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Outputs of rows that are sorted by expert, without reading their number per expert on the host."""
        experts = torch.arange(self.num_experts, device=rows.device, dtype=numbers.dtype)
        ends = torch.searchsorted(numbers, experts, right=True, out_int32=True)

        def product(x: torch.Tensor, name: str) -> torch.Tensor:
            if not self._scaled:
                return grouped_mm(x, self.weight(name, x.dtype).transpose(1, 2), offs=ends)
            values, scale = _per_token(x, FP8, FP8_MAX)
            weight: torch.Tensor = getattr(self, f"{name}_values")
            factors: torch.Tensor = getattr(self, f"{name}_scale").squeeze(-1)
            output: torch.Tensor = torch._scaled_grouped_mm(
                values, weight.transpose(1, 2), scale.squeeze(-1), factors, offs=ends, out_dtype=x.dtype
            )
            return output

        inner = self._gate(self._biased(product(rows, "gate_up"), "gate_up", numbers))
        return self._biased(product(inner, "down"), "down", numbers)


def gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gating function of `QuantizedExperts`: activation(gate) * up."""

    def gate(both: torch.Tensor) -> torch.Tensor:
        first, second = both.chunk(2, dim=-1)
        return activation(first) * second

    return gate


def quantized_experts(
    module: Any, gate_up: QuantizedWeight, down: QuantizedWeight, dtype: torch.dtype
) -> QuantizedExperts | None:
    """Quantised experts in place of a module of transformers; None for a module that is not gated experts."""
    if is_gated_experts(module):
        return QuantizedExperts(gate_up, down, gated(module.act_fn), dtype)
    if not is_interleaved_experts(module):
        return None
    bias = module.gate_up_proj_bias.detach()
    bias = torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1)

    def gate(both: torch.Tensor) -> torch.Tensor:
        halves = both.chunk(2, dim=-1)
        inner: torch.Tensor = module._apply_gate(torch.stack(halves, dim=-1).flatten(-2))
        return inner

    return QuantizedExperts(gate_up, down, gate, dtype, (bias, module.down_proj_bias.detach()))


def is_interleaved_experts(module: Any) -> bool:
    """True if a module is gpt-oss's experts: transposed matrices with biases, gate and up in alternate columns."""
    names = {name for name, _ in module.named_parameters()}
    return (
        names == {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}
        and getattr(module, "is_transposed", False)
        and not getattr(module, "is_concatenated", True)
        and callable(getattr(module, "_apply_gate", None))
    )


def is_gated_experts(module: Any) -> bool:
    """True if a module is transformers' gated experts: two stacks of matrices, without biases."""
    names = {name for name, _ in module.named_parameters()}
    weights: list[Any] = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
    return (
        names == {"gate_up_proj", "down_proj"}
        and callable(getattr(module, "act_fn", None))
        and not getattr(module, "is_transposed", False)
        and all(isinstance(weight, torch.Tensor) and weight.dim() == 3 for weight in weights)
        and weights[0].shape[1] == 2 * weights[1].shape[2]
    )


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (rows, values, scale) -> rows


def _product_of(weight: QuantizedWeight, dtype: torch.dtype) -> Product | None:
    """Matrix product of a device for a weight, on activations of `dtype`; None: dequantise the weight."""
    if weight.values.device.type != "cuda" or dtype != torch.bfloat16:
        return None
    rows, columns = weight.values.shape[0], weight.columns
    if _takes_fp8(weight, dtype):
        return _fp8_product
    if weight.values.dtype == torch.int8 and weight.scale.shape[1] == 1 and rows % 8 == columns % 8 == 0:
        return _int8_product
    groups = weight.scale.shape[1]
    if weight.bits == 4 and columns % (16 * _INNER_TILES) == rows % 8 == 0 and columns // groups in (32, 64, 128, 256):
        return _int4_product
    return None


def _takes_fp8(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """True if the device has products of FP8 matrices with a scale per row, and they support the weight."""
    values = weight.values
    if values.device.type != "cuda" or dtype != torch.bfloat16 or values.dtype != FP8 or weight.scale.shape[-1] != 1:
        return False
    sizes = all(size % 16 == 0 for size in values.shape[-2:])
    return sizes and torch.cuda.get_device_capability(values.device) == (9, 0)


def _prepared(weight: QuantizedWeight, product: Product | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales in the layout of a product."""
    if product in (_fp8_product, _int8_product):
        return weight.values, weight.scale.float().T.contiguous()
    if product is _int4_product:
        codes = (weight.codes() + 8).to(torch.uint8)
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        scale = weight.scale.T.to(torch.bfloat16)
        values: torch.Tensor = torch._convert_weight_to_int4pack(pairs.contiguous(), _INNER_TILES)
        return values, torch.stack([scale, torch.zeros_like(scale)], dim=-1).contiguous()
    return weight.values, weight.scale


def _per_token(rows: torch.Tensor, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of `dtype` and fp32 scales [N, 1] of rows [N, in]."""
    x = rows.float()
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / largest
    x = (x / scale).clamp(-largest, largest)
    return (x if dtype == FP8 else x.round()).to(dtype), scale


def _fp8_product(rows: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    x, factors = _per_token(rows, FP8, FP8_MAX)
    output: torch.Tensor = torch._scaled_mm(x, values.T, scale_a=factors, scale_b=scale, out_dtype=rows.dtype)
    return output


def _int8_product(rows: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    x, factors = _per_token(rows, torch.int8, INT8_MAX)
    if len(x) < _FEWEST_ROWS:
        x = nn.functional.pad(x, (0, 0, 0, _FEWEST_ROWS - len(x)))
    whole: torch.Tensor = torch._int_mm(x, values.T)
    return (whole[: len(rows)].float() * factors * scale).to(rows.dtype)


def _int4_product(rows: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    group = rows.shape[1] // len(scale)
    output: torch.Tensor = torch._weight_int4pack_mm(rows.contiguous(), values, group, scale)
    return output
