"""The tensors of a Megatron adapter, derived from the base model's mapping: one link each.

Megatron Bridge names them after the linear layer: `...linear_proj.adapter.linear_in.weight` is A [rank, columns],
`linear_out.weight` is B [rows, rank]. Query, key and value, and gate and up, are one linear layer in Megatron: its
canonical LoRA keeps an adapter for each (`adapter.adapter_q.linear_in.weight`), its fused LoRA one for all, which is
only the same where they share A. A fused B has the rows of the fused weight, so the mapping's own rule moves them.
Tensor parallel ranks cut B by rows; A by its rank, but by columns behind a layer whose input is cut.

Rows stand in the order of the unsharded weight. Megatron Bridge splits the B of a canonical gate or up adapter in two
halves a rank, as if it held both, so that above tensor parallel size 1 it means other rows by the same tensor: those
two are exchanged with it at size 1, all others at any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.convert.lora.adapter import Part, adapted_link
from dlm_bridge.convert.mapping import QKV, Dims, Direct, FusedQKV, GatedMLP, Link, Rule
from dlm_bridge.errors import DlmBridgeError

Style = Literal["canonical", "fused"]
STYLES = ("auto", "canonical", "fused")


@dataclass(frozen=True)
class Factor:
    """One tensor of a Megatron adapter. `link`'s Hub tensors are the factor `part` of `weights`, in their order; with
    `shared` there is one tensor, the same for all of `weights`."""

    link: Link
    part: Part
    weights: tuple[str, ...]
    shared: bool = False


def factors(base: Checkpoint, weights: Iterable[str], rank: int, style: Style, where: str) -> list[Factor]:
    """The Megatron tensors that hold an adapter of these Hub weights. Raises DlmBridgeError where `style` cannot."""
    links: dict[str, tuple[Link, set[str]]] = {}
    for weight in weights:
        link = adapted_link(base, weight, where)
        links.setdefault(link.megatron_name, (link, set()))[1].add(weight)
    result: list[Factor] = []
    for link, changed in links.values():
        joined = len(link.hub_names) > 1
        if style == "canonical" and isinstance(link.rule, FusedQKV):
            raise DlmBridgeError(f"{where}: {link.hub_names[0]} is one fused tensor on the Hub: use --style fused")
        if joined and style == "fused":
            if missing := sorted(set(link.hub_names) - changed):
                raise DlmBridgeError(f"{where}: --style fused changes {missing[0]} too, which the adapter leaves out")
            result += _fused(link, rank)
        elif joined:
            names = [name for name in link.hub_names if name in changed]
            for name in names:
                result += _single(link, link.hub_names.index(name), rank, _canonical_key(link.rule, name, link))
        else:
            result += _fused(link, rank) if isinstance(link.rule, FusedQKV) else _single(link, 0, rank, "")
    return result


def possible_factors(base: Checkpoint, rank: int) -> Iterator[tuple[Style, Factor]]:
    """Every tensor that an adapter of this base may have, in either style."""
    for link in base.links:
        if link.expert is not None or link.is_mtp or link.layer is None:
            continue
        if len(link.hub_shapes[0]) != 2 or ".router." in link.rule.megatron:
            continue
        if len(link.hub_names) > 1:
            for factor in _fused(link, rank):
                yield "fused", factor
            for number, name in enumerate(link.hub_names):
                for factor in _single(link, number, rank, _canonical_key(link.rule, name, link)):
                    yield "canonical", factor
        else:
            both = _fused(link, rank) if isinstance(link.rule, FusedQKV) else _single(link, 0, rank, "")
            for factor in both:
                yield "canonical", factor


def _single(link: Link, number: int, rank: int, key: str) -> list[Factor]:
    """A and B of one Hub weight; `key` tells it from others of the same linear layer."""
    name, template = link.hub_names[number], link.rule.hub[number]
    rows, columns = link.hub_shapes[number]
    dims = _with_sizes(link.dims, rank, rows, columns)
    row_parallel = isinstance(link.rule, Direct) and link.rule.axis == 1
    module = _module(link.rule)
    a = Direct(
        f"{module}.adapter.{key}linear_in.weight",
        name=_factor_name(template, "A"),
        shape=f"{rank} {columns}",
        axis=1 if row_parallel else 0,
    )
    b = Direct(
        f"{module}.adapter.{key}linear_out.weight", name=_factor_name(template, "B"), shape=f"{rows} {rank}", axis=0
    )
    return [
        Factor(Link(a, dims, link.layer), "A", (name,)),
        Factor(Link(b, dims, link.layer), "B", (name,)),
    ]


def _fused(link: Link, rank: int) -> list[Factor]:
    """One A for all Hub weights of a linear layer, and their Bs in the rows of the fused weight."""
    columns = link.dims.hidden
    module = _module(link.rule)
    dims = _with_sizes(link.dims, rank, columns)
    a = Direct(
        f"{module}.adapter.linear_in.weight",
        name=_factor_name(link.rule.hub[0], "A"),
        shape=f"{rank} {columns}",
        axis=0,
    )
    b = _renamed(link.rule, f"{module}.adapter.linear_out.weight")
    return [
        Factor(Link(a, dims, link.layer), "A", link.hub_names, shared=True),
        # The rule moves rows and takes the columns from `hidden`, of which B has `rank`.
        Factor(Link(b, replace(link.dims, hidden=rank), link.layer), "B", link.hub_names),
    ]


def _renamed(rule: Rule, megatron: str) -> Rule:
    names = {
        field: _factor_name(getattr(rule, field), "B")
        for field in ("name", "q", "k", "v", "gate", "up")
        if getattr(rule, field, "")
    }
    return replace(rule, megatron=megatron, **names)  # type: ignore[arg-type]


def _canonical_key(rule: Rule, name: str, link: Link) -> str:
    if isinstance(rule, QKV):
        return ("adapter_q.", "adapter_k.", "adapter_v.")[link.hub_names.index(name)]
    if isinstance(rule, GatedMLP):
        return ("adapter_gate.", "adapter_up.")[link.hub_names.index(name)]
    raise DlmBridgeError(f"{name}: Megatron Bridge has no LoRA for one part of {rule.megatron}")


def _module(rule: Rule) -> str:
    return rule.megatron.removesuffix(".weight")


def _factor_name(template: str, part: Part) -> str:
    return f"{template.removesuffix('.weight')}.lora_{part}.weight"


def _with_sizes(dims: Dims, *numbers: int) -> Dims:
    """`dims` in whose words a number means itself."""
    return replace(dims, sizes=(*dims.sizes, *((str(number), number) for number in sorted(set(numbers)))))
