"""Fused elementwise operations of transformers' decoder layers, in few kernels.

A Llama layer launches 32 kernels of one operation each in addition to its four matrix products and attention. They
become four: a residual addition with the norm after it, twice; the rotary embedding of queries and keys with their
norms; the gated activation. In a mixture-of-experts layer, routing and the weighted sum of the experts' outputs are
fused as well.

A module is replaced if it computes the right function, whatever its class: its forward pass runs on a small random
input, with stand-ins for its submodules, and must equal the formula bit for bit in the model's dtype. Modules that
compute another function, have hooks or are wrapped keep their forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import silu

from dlm_bridge.generation.kv_cache import is_attention
from dlm_bridge.generation.runtime import graphs
from dlm_bridge.generation.runtime.attention import attend
from dlm_bridge.generation.runtime.graphs import at_places
from dlm_bridge.kernels.experts import FusedExperts, FusedRouter, is_group_router, supports_grouped_experts
from dlm_bridge.kernels.linear import (
    FusedGroup,
    FusedLinear,
    fuse_linear_layers,
    fused_layers_installed,
    is_unmodified,
    separate_weights,
)

_PROBE = "dlm_bridge_probe"  # name of the attention function `_record_call` in transformers' registry


class Layers(graphs.DecoderLayers):
    """Fused linear layers, and fused elementwise operations if there are Triton kernels. Of compiled layers only the
    last one has fused elementwise operations."""

    def __init__(self, model: Any, compiled: bool) -> None:
        self._groups = fuse_linear_layers(model)
        self._replacements = fuse_elementwise(model, self._groups)
        self._last = last_layer(model, self._replacements)
        # An adapter at mask tokens knows the masks of whole rows only.
        self.trims = self._last is not None and not any(hasattr(one, "mask_gate") for one in model.modules())
        if compiled:
            self._replacements = of_last_layer(model, self._replacements) if self.trims else []

    @contextmanager
    def installed(self) -> Iterator[None]:
        with fused_layers_installed(self._groups), installed(self._replacements):
            yield

    def returning(self, places_AN: torch.Tensor | None) -> AbstractContextManager[None]:
        return super().returning(places_AN) if self._last is None else self._last.returning(places_AN)

    def end(self) -> None:
        separate_weights(self._groups)


@dataclass(frozen=True)
class Replacement:
    """A function that replaces a module's method."""

    module: nn.Module
    function: Callable[..., Any]
    method: str = "forward"


class FusedRMSNorm:
    """Forward pass of an RMSNorm, optionally fused with the residual addition before it (`add`)."""

    def __init__(self, norm: Any) -> None:
        self.norm = norm
        self.eps: float = norm.variance_epsilon
        self._forward = norm.forward
        self._sum: torch.Tensor | None = None
        self._normed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor
        if x is self._sum and self._normed is not None:
            normed, self._sum, self._normed = self._normed, None, None
        elif x.dtype == self.norm.weight.dtype:
            normed = torch.ops.dlm_bridge.rms_norm(x, self.norm.weight, self.eps)
        else:
            normed = self._forward(x)
        return normed

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Compute `x + residual`, [..., H], and its norm in one kernel. The next call on the sum returns the norm."""
        if not x.dtype == residual.dtype == self.norm.weight.dtype:
            return x + residual
        total: torch.Tensor
        total, self._normed = torch.ops.dlm_bridge.add_rms_norm(x, residual, self.norm.weight, self.eps)
        self._sum = total
        return total


class FusedSwiGLU:
    """Forward pass of a gated MLP, down(silu(gate(x)) * up(x))."""

    def __init__(self, mlp: Any, gate_up: FusedLinear) -> None:
        self._mlp = mlp
        self._gate_up = gate_up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._mlp.down_proj(torch.ops.dlm_bridge.silu_and_mul(self._gate_up.whole(x)))
        return output


class FusedAttention:
    """Forward pass of an attention layer with one QKV projection, optional norms of the heads, and rotary embedding.

    Args:
        qkv: projection to the concatenated query heads, key heads and value heads.
        heads: number of query heads, and of key heads.
        norms: RMSNorms of the query heads and of the key heads; None: neither is normalised.
        constants: keyword arguments that the layer itself passes to the attention function, such as `scaling`.
    """

    def __init__(
        self,
        attention: Any,
        qkv: Callable[[torch.Tensor], torch.Tensor],
        heads: tuple[int, int],
        norms: tuple[FusedRMSNorm, FusedRMSNorm] | None,
        constants: dict[str, Any],
    ) -> None:
        self._attention = attention
        self._qkv = qkv
        self._heads = heads
        self._norms = norms
        self._constants = constants

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        queries, keys = self._heads
        weights, eps = [None, None], 0.0
        if self._norms is not None:
            weights, eps = [norm.norm.weight for norm in self._norms], self._norms[0].eps
        qkv = self._qkv(hidden_states)
        rotated = torch.ops.dlm_bridge.rotate_heads(qkv, *position_embeddings, *weights, eps, queries, keys)
        query, key = (part.transpose(1, 2) for part in rotated.split(self._heads, dim=2))
        value = qkv.unflatten(-1, (queries + 2 * keys, -1))[:, :, queries + keys :].transpose(1, 2)
        output, _ = attend(self._attention, query, key, value, attention_mask, **kwargs | self._constants)
        return self._attention.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None


class FusedLayer:
    """Forward pass of a pre-norm decoder layer, whose residual additions are fused with the norms after them.

    Args:
        norms: the norm before attention, and the norm before the MLP.
        next_norm: the norm of this layer's output, which is the next layer's first one; None for a norm of another
            class.
    """

    def __init__(self, layer: Any, norms: tuple[FusedRMSNorm, FusedRMSNorm], next_norm: FusedRMSNorm | None) -> None:
        self._layer = layer
        self._norms = norms
        self._next_norm = next_norm
        self._places: torch.Tensor | None = None

    @contextmanager
    def returning(self, places_AN: torch.Tensor | None) -> Iterator[None]:
        """Context in which this last layer of a body returns only these positions, see `at_places`; None: all."""
        self._places = places_AN
        try:
            yield
        finally:
            self._places = None

    def __call__(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        before_attention, before_mlp = self._norms
        attended, _ = self._layer.self_attn(hidden_states=before_attention(hidden_states), **kwargs)
        if self._places is not None:
            hidden_states, attended = (at_places(part, self._places) for part in (hidden_states, attended))
        hidden_states = before_mlp.add(hidden_states, attended)
        output: torch.Tensor = self._layer.mlp(before_mlp(hidden_states))
        return hidden_states + output if self._next_norm is None else self._next_norm.add(hidden_states, output)


def fuse_elementwise(model: Any, groups: Iterable[FusedGroup]) -> list[Replacement]:
    """Find the methods of a transformers body that can be replaced. There are none under autocast, and none without a
    Triton kernel for the device and dtype.

    Args:
        groups: fused linear layers, which must not be installed during this call.
    """
    kernels = _kernels(model.device.type)
    if kernels is None or model.dtype not in kernels.DTYPES or torch.is_autocast_enabled(model.device.type):
        return []
    fused_linears = {group.holder: group.outputs[0].product for group in groups if len(group.names) > 1}
    probe = _Probe(model.dtype, kernels)
    found = []
    with torch.no_grad():
        norms = {module: FusedRMSNorm(module) for module in model.modules() if probe.is_norm(module)}
        cos_sin = _position_embeddings(model)
        for module in model.modules():
            function: Callable[..., Any] | None = norms.get(module)
            method = "forward"
            if is_attention(module) and cos_sin is not None:
                function = probe.attention(module, fused_linears.get(module), norms, cos_sin)
            elif module in fused_linears:
                function = FusedSwiGLU(module, fused_linears[module]) if probe.is_gated_mlp(module) else None
            elif probe.is_gated_experts(module):
                function, method = torch.ops.dlm_bridge.silu_and_mul, "_apply_gate"
                if supports_grouped_experts(module, model.dtype):
                    function, method = FusedExperts(module), "forward"
            elif _are_unmodified(module) and is_group_router(module, kernels.route_in_groups_torch):
                function = FusedRouter(module)
            if function is not None:
                found.append(Replacement(module, function, method))
        layers = list(model.model.layers)
        next_norms = [*(getattr(layer, "input_layernorm", None) for layer in layers[1:]), model.model.norm]
        for layer, next_norm in zip(layers, next_norms, strict=True):
            own = probe.norms_of_layer(layer, norms)
            if own is not None:
                found.append(Replacement(layer, FusedLayer(layer, own, norms.get(next_norm))))
    return found


def last_layer(model: Any, replacements: Iterable[Replacement]) -> FusedLayer | None:
    """The replacement of the last decoder layer, or None."""
    last = model.model.layers[-1]
    return next((one.function for one in replacements if one.module is last), None)  # type: ignore[return-value]


def of_last_layer(model: Any, replacements: Iterable[Replacement]) -> list[Replacement]:
    """The replacements in the last decoder layer and of the norm after it."""
    own = {*model.model.layers[-1].modules(), model.model.norm}
    return [one for one in replacements if one.module in own]


@contextmanager
def installed(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace methods of modules, and restore those of the class afterwards."""
    # Bypasses nn.Module.__setattr__, which takes as long as a forward pass of a deep model.
    done = []
    try:
        for one in replacements:
            vars(one.module)[one.method] = one.function
            done.append(one)
        yield
    finally:
        for one in done:
            del vars(one.module)[one.method]


@functools.cache
def _kernels(device: str) -> ModuleType | None:
    """The module of the Triton kernels; None without Triton, and for devices other than CUDA."""
    if device != "cuda":
        return None
    try:
        from dlm_bridge.kernels import elementwise
    except ImportError:
        return None
    return elementwise


def _position_embeddings(model: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Random tensors with the shapes and dtypes of the body's rotary cosines and sines for three positions; None for
    another position embedding."""
    try:
        places = torch.arange(3, device=model.device)[None]
        tables = model.model.rotary_emb(torch.empty(1, dtype=model.dtype, device=model.device), places)
        cos, sin = (_random(seed, *one.shape, dtype=one.dtype) for seed, one in enumerate(tables, start=10))
    except Exception:  # another rotary embedding, or none
        return None
    return cos, sin


class _Probe:
    """Tests of the functions that modules compute, on small random inputs."""

    def __init__(self, dtype: torch.dtype, kernels: ModuleType) -> None:
        self._dtype = dtype
        self._kernels = kernels
        self._norm_classes: dict[tuple[Any, ...], bool] = {}

    def is_norm(self, module: Any) -> bool:
        """True if the module computes `rms_norm_torch`."""
        weight, eps = module._parameters.get("weight"), getattr(module, "variance_epsilon", None)
        if type(weight) is not nn.Parameter or weight.dim() != 1 or weight.dtype != self._dtype:
            return False
        if not isinstance(eps, float) or len(weight) > self._kernels.MAX_NORM_SIZE or not is_unmodified(module):
            return False
        kind = (type(module), type(module).forward, eps)
        if kind not in self._norm_classes:
            scales = torch.tensor([1, 1e-3, 30], dtype=self._dtype)[:, None]
            x, other = self._random(0, 3, 24) * scales, self._random(1, 24)
            expected = self._kernels.rms_norm_torch(x, other, eps)
            self._norm_classes[kind] = _returns(expected, lambda: functional_call(module, {"weight": other}, (x,)))
        return self._norm_classes[kind]

    def is_gated_mlp(self, module: Any) -> bool:
        """True if the module computes the same function as `FusedSwiGLU`."""
        parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")]
        if not _are_unmodified(module, *parts):
            return False
        functions: list[Callable[..., Any]] = [lambda x: x * 3, lambda x: x.roll(1, -1), lambda x: x.flip(-1)]
        x = self._random(0, 2, 24)
        expected = (silu(x * 3) * x.roll(1, -1)).flip(-1)
        with installed(map(Replacement, parts[:3], functions)):
            return _returns(expected, lambda: module.forward(x))

    def is_gated_experts(self, module: Any) -> bool:
        """True if the module is transformers' experts with the activation silu(gate) * up of their concatenation."""
        if not hasattr(module, "_apply_gate") or "_apply_gate" in vars(module):
            return False
        x = self._random(0, 2, 24)
        expected = silu(x[:, :12]) * x[:, 12:]
        return _are_unmodified(module, getattr(module, "act_fn", None)) and _returns(
            expected, lambda: module._apply_gate(x)
        )

    def attention(
        self,
        module: Any,
        fused_qkv: FusedLinear | None,
        norms: dict[nn.Module, FusedRMSNorm],
        cos_sin: tuple[torch.Tensor, torch.Tensor],
    ) -> FusedAttention | None:
        """`FusedAttention` for the module if it computes the same function, else None. Without `fused_qkv` the
        projection is the layer `query_key_value`."""
        names = ("query_key_value",) if fused_qkv is None else ("q_proj", "k_proj", "v_proj")
        layers: list[Any] = [getattr(module, name, None) for name in names]
        if not _are_unmodified(module, *layers, getattr(module, "o_proj", None)):
            return None
        channels = module.query_key_value.out_features if fused_qkv is None else sum(fused_qkv.sizes)
        size, shared = module.head_dim, module.num_key_value_groups
        keys = channels // size // (shared + 2)
        heads, sizes = (shared * keys, keys), [shared * keys * size, keys * size, keys * size]
        if sum(sizes) != channels or (fused_qkv is not None and fused_qkv.sizes != sizes):
            return None

        x = self._random(0, 1, 3, channels)
        parts = [part.unflatten(-1, (-1, size)) for part in x.split(sizes, dim=-1)]
        stand_ins = [Replacement(module.o_proj, lambda x: x)]
        if fused_qkv is None:
            stand_ins += [Replacement(module.query_key_value, lambda x: x)]
        else:
            for index, layer in enumerate(layers):
                stand_ins.append(Replacement(layer, lambda x, index=index: x.split(sizes, dim=-1)[index]))
        own = [norms.get(getattr(module, name, module)) for name in ("q_norm", "k_norm")]
        pair = None if own[0] is None or own[1] is None else (own[0], own[1])
        if pair is not None:
            if pair[0].eps != pair[1].eps or any(norm.norm.weight.shape != (size,) for norm in pair):
                return None
            for index, norm in enumerate(pair):
                function = functools.partial(
                    self._kernels.rms_norm_torch, weight=self._random(2 + index, size), eps=norm.eps
                )
                stand_ins.append(Replacement(norm.norm, function))
                parts[index] = function(parts[index])
        parts[:2] = [self._kernels.rotate_torch(part, *cos_sin) for part in parts[:2]]
        with installed(stand_ins):
            constants = _attention_constants(module, x, cos_sin, [part.transpose(1, 2) for part in parts])
        if constants is None:
            return None
        qkv = module.query_key_value if fused_qkv is None else fused_qkv.whole
        return FusedAttention(module, qkv, heads, pair, constants)

    def norms_of_layer(
        self, layer: Any, norms: dict[nn.Module, FusedRMSNorm]
    ) -> tuple[FusedRMSNorm, FusedRMSNorm] | None:
        """The norms of a layer that computes the same function as `FusedLayer`; None for another layer."""
        parts: list[Any] = [getattr(layer, name, None) for name in ("self_attn", "mlp")]
        names = ("input_layernorm", "post_attention_layernorm")
        first, second = (norms.get(getattr(layer, name, layer)) for name in names)
        if first is None or second is None or not _are_unmodified(layer, *parts):
            return None
        x = self._random(0, 1, 3, 24)
        passed: dict[str, Any] = {
            name: self._random(1, 3) for name in ("attention_mask", "position_ids", "kv_columns")
        }
        passed["position_embeddings"] = (self._random(2, 3), self._random(3, 3))
        received: dict[str, Any] = {}

        def attended(hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
            received.update(kwargs)
            return hidden_states.flip(-1), None

        functions: list[Callable[..., Any]] = [lambda x: x * 3, lambda x: x * 5, attended, lambda x: x.roll(1, -1)]
        between = x + (x * 3).flip(-1)
        expected = between + (between * 5).roll(1, -1)
        with installed(map(Replacement, (first.norm, second.norm, *parts), functions)):
            same = _returns(expected, lambda: layer.forward(x, **passed))
        forwarded = all(received.get(name) is value for name, value in passed.items())
        more = any(value for name, value in received.items() if name not in passed)
        return (first, second) if same and forwarded and not more else None

    def _random(self, seed: int, *shape: int) -> torch.Tensor:
        return _random(seed, *shape, dtype=self._dtype)


class _AttentionCall:
    """A layer's call of the attention function `_record_call`: arguments and output."""

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output
        self.inputs: tuple[Any, ...] = ()  # query, key, value, attention mask
        self.kwargs: dict[str, Any] = {}


def _record_call(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, attention_call: _AttentionCall, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention function that records its arguments."""
    attention_call.inputs, attention_call.kwargs = (query, key, value, attention_mask), kwargs
    return attention_call.output, None


def _attention_constants(
    module: Any, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor], expected: list[torch.Tensor]
) -> dict[str, Any] | None:
    """Keyword arguments that the layer itself passes to the attention function. None if it passes other queries, keys
    and values than `expected`, or does not return the attention function's output."""
    from transformers import AttentionInterface

    call = _AttentionCall(_random(4, 1, 3, *expected[0].shape[1::2], dtype=x.dtype))
    mask, columns = (_random(seed, 1, 1, 1, 3, dtype=x.dtype) for seed in (5, 6))
    # Distant positions reveal attention that itself depends on positions.
    passed = {"attention_mask": mask, "position_ids": torch.tensor([[0, 70_000, 5_000_000]]), "kv_columns": columns}
    arguments = {"hidden_states": x, "position_embeddings": cos_sin, "attention_call": call, **passed}
    AttentionInterface.register(_PROBE, _record_call)
    before = module.config._attn_implementation
    module.config._attn_implementation = _PROBE
    try:
        same = _returns(call.output.flatten(2), lambda: module.forward(**arguments)[0])
    finally:
        module.config._attn_implementation = before
    if not same or not all(map(_equal, call.inputs, [*expected, mask])):
        return None
    constants = {name: value for name, value in call.kwargs.items() if name not in passed}
    if call.kwargs.get("kv_columns") is not columns or any(
        isinstance(one, torch.Tensor) for one in constants.values()
    ):
        return None
    return constants


def _are_unmodified(*parts: Any) -> bool:
    return all(isinstance(part, nn.Module) and is_unmodified(part) for part in parts)


def _returns(expected: torch.Tensor, call: Callable[[], Any]) -> bool:
    """True if the call returns this tensor; False if it returns another value or raises any exception."""
    try:
        return _equal(call(), expected)
    except Exception:  # a module of another class
        return False


def _equal(found: Any, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)


def _random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
