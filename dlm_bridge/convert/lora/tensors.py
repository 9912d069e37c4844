"""Tensors of a Megatron adapter: keys, Hub weights whose factors they contain, and sharding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.lora.peft import LoraFactor, adapted_param, factor_suffix
from dlm_bridge.errors import CheckpointError, SettingError
from dlm_bridge.mapping.fused import FusedQKV
from dlm_bridge.mapping.rules import QKV, Dims, Direct, GatedMLP, ParamMapping, Rule

Style = Literal["canonical", "fused"]
STYLES = ("auto", "canonical", "fused")


@dataclass(frozen=True)
class AdapterTensor:
    """Tensor of a Megatron adapter.

    Attributes:
        param: mapping whose Hub tensors are the factor `part` of `weights`, in their order.
        shared: all of `weights` share one Hub tensor.
    """

    param: ParamMapping
    part: LoraFactor
    weights: tuple[str, ...]
    shared: bool = False


def adapter_tensors(
    base: Checkpoint, weights: Iterable[str], rank: int, style: Style, where: str, dora: bool = False
) -> list[AdapterTensor]:
    """Megatron tensors of an adapter of these Hub weights.

    Args:
        style: "canonical" (one adapter per Hub weight) or "fused" (one per linear layer).
        where: the adapter, for errors.
        dora: add a magnitude per Hub weight.

    Raises:
        CheckpointError: an adapter cannot change one of the weights.
        SettingError: `style` does not fit the weights.
    """
    params: dict[str, tuple[ParamMapping, set[str]]] = {}
    for weight in weights:
        param = adapted_param(base, weight, where, experts=True)
        params.setdefault(param.megatron_name, (param, set()))[1].add(weight)
    result: list[AdapterTensor] = []
    for param, changed in params.values():
        joined = len(param.hub_names) > 1
        if style == "canonical" and isinstance(param.rule, FusedQKV):
            raise SettingError("style", f"canonical, but {param.hub_names[0]} is fused on the Hub: use `style=fused`")
        if joined and (style == "fused" or param.expert is not None):
            if missing := sorted(set(param.hub_names) - changed):
                raise SettingError("style", f"fused changes {missing[0]} too, which {where} does not change")
            result += _fused(param, rank)
        elif joined:
            names = [name for name in param.hub_names if name in changed]
            for name in names:
                result += _single(param, param.hub_names.index(name), rank, _canonical_key(param.rule, name, param))
        else:
            result += _fused(param, rank) if isinstance(param.rule, FusedQKV) else _single(param, 0, rank, "")
        if dora:
            result += [magnitude for magnitude in _magnitudes(param) if magnitude.weights[0] in changed]
    return result


def possible_tensors(base: Checkpoint, rank: int) -> Iterator[tuple[Style, AdapterTensor]]:
    """Yield all tensors that an adapter of this base can have, in both styles."""
    for param in base.params:
        if param.is_mtp or param.layer is None:
            continue
        if len(param.hub_shapes[0]) != 2 or ".router." in param.rule.megatron:
            continue
        joined = len(param.hub_names) > 1
        found: list[AdapterTensor] = []  # of the canonical style
        if joined and param.expert is None:
            yield from (("fused", factor) for factor in _fused(param, rank))
            for number, name in enumerate(param.hub_names):
                found += _single(param, number, rank, _canonical_key(param.rule, name, param))
        elif joined or isinstance(param.rule, FusedQKV):
            found += _fused(param, rank)
        else:
            found += _single(param, 0, rank, "")
        if param.expert is None:
            found += _magnitudes(param)
        yield from (("canonical", factor) for factor in found)


def _single(param: ParamMapping, number: int, rank: int, key: str) -> list[AdapterTensor]:
    """A and B of one Hub weight; `key` distinguishes weights of the same linear layer."""
    name, template = param.hub_names[number], param.rule.hub[number]
    rows, columns = param.hub_shapes[number]
    dims = _with_sizes(param.dims, rank, rows, columns)
    cut = param.rule.tp_axis
    module = _module(param.rule)
    a = Direct(
        f"{module}.adapter.{key}linear_in.weight",
        name=_factor_name(template, "A"),
        shape=f"{rank} {columns}",
        axis=cut,
    )
    b = Direct(
        f"{module}.adapter.{key}linear_out.weight",
        name=_factor_name(template, "B"),
        shape=f"{rows} {rank}",
        axis=None if cut is None else 0,
    )
    return [
        AdapterTensor(ParamMapping(a, dims, param.layer, param.expert), "A", (name,)),
        AdapterTensor(ParamMapping(b, dims, param.layer, param.expert), "B", (name,)),
    ]


def _fused(param: ParamMapping, rank: int) -> list[AdapterTensor]:
    """One A for all Hub weights of a linear layer, and their Bs in the row order of the fused weight."""
    columns = param.dims.hidden
    module = _module(param.rule)
    dims = _with_sizes(param.dims, rank, columns)
    a = Direct(
        f"{module}.adapter.linear_in.weight",
        name=_factor_name(param.rule.hub[0], "A"),
        shape=f"{rank} {columns}",
        axis=0,
    )
    b = _renamed(param.rule, f"{module}.adapter.linear_out.weight")
    return [
        AdapterTensor(ParamMapping(a, dims, param.layer, param.expert), "A", param.hub_names, shared=True),
        # The rule permutes rows and expects `hidden` columns; B has `rank` columns.
        AdapterTensor(
            ParamMapping(b, replace(param.dims, hidden=rank), param.layer, param.expert), "B", param.hub_names
        ),
    ]


def _magnitudes(param: ParamMapping) -> Iterator[AdapterTensor]:
    """Yield DoRA's magnitude of each Hub weight of a linear layer, in the weight's row order."""
    module = _module(param.rule)
    if isinstance(param.rule, FusedQKV):
        fused = _renamed(replace(param.rule, bias=True), f"{module}.adapter.weight_magnitude", "magnitude")
        yield AdapterTensor(ParamMapping(fused, param.dims, param.layer), "magnitude", param.hub_names)
        return
    for name, template, (rows, _) in zip(param.hub_names, param.rule.hub, param.hub_shapes, strict=True):
        key = _canonical_key(param.rule, name, param) if len(param.hub_names) > 1 else ""
        rule = Direct(
            f"{module}.adapter.{key}weight_magnitude",
            name=_factor_name(template, "magnitude"),
            shape=str(rows),
            axis=0 if param.rule.tp_axis == 0 else None,
        )
        yield AdapterTensor(ParamMapping(rule, _with_sizes(param.dims, rows), param.layer), "magnitude", (name,))


def _renamed(rule: Rule, megatron: str, part: LoraFactor = "B") -> Rule:
    names = {
        field: _factor_name(getattr(rule, field), part)
        for field in ("name", "q", "k", "v", "gate", "up")
        if getattr(rule, field, "")
    }
    return replace(rule, megatron=megatron, **names)  # type: ignore[arg-type]


def _canonical_key(rule: Rule, name: str, param: ParamMapping) -> str:
    if isinstance(rule, QKV):
        return ("adapter_q.", "adapter_k.", "adapter_v.")[param.hub_names.index(name)]
    if isinstance(rule, GatedMLP):
        return ("adapter_gate.", "adapter_up.")[param.hub_names.index(name)]
    raise CheckpointError(name, f"Megatron Bridge has no canonical LoRA for a part of {rule.megatron}")


def _module(rule: Rule) -> str:
    return rule.megatron.removesuffix(".weight")


def _factor_name(template: str, part: LoraFactor) -> str:
    return f"{template.removesuffix('.weight')}.{factor_suffix(part)}"


def _with_sizes(dims: Dims, *numbers: int) -> Dims:
    """`dims` with sizes that are named by their own digits."""
    return replace(dims, sizes=(*dims.sizes, *((str(number), number) for number in sorted(set(numbers)))))
