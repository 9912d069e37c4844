"""PEFT's LoRA of routed experts: one pair of factors per stack of a layer's experts.

transformers' classes stack a layer's experts in two tensors, gate and up projections [E, 2 * inner, hidden] and down
projections [E, hidden, inner]. PEFT wraps one in the other, the gate and up projections innermost: their factors are
`experts.base_layer.lora_*`, those of the down projections `experts.lora_*`. A is [E * rank, columns], expert by
expert; B is [rows, rank * E], with the expert as the fastest-varying index of its columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dlm_bridge.convert.checkpoint import Checkpoint
from dlm_bridge.errors import CheckpointError
from dlm_bridge.mapping.rules import GatedMLP

_MODULE = re.compile(r"(.+\.experts)(\.base_layer)?")
_STACKS = ("gate_up_proj", "down_proj")  # in PEFT's order of wrapping
Renamed = Callable[[Iterable[str]], Mapping[str, str]]  # names in transformers' class by Hub name


@dataclass(frozen=True)
class ExpertSlice:
    """Slice of a stack's factors that belongs to a Hub weight: one expert or all (None), one of `parts` row blocks."""

    module: str
    expert: int | None
    part: int = 0
    parts: int = 1

    def product(self, a: torch.Tensor, b: torch.Tensor, experts: int) -> torch.Tensor:
        """B @ A of this slice in fp32, with the Hub weight's shape."""
        own = b.chunk(self.parts)[self.part]
        if self.expert is None:
            return stacked_product(a, own, experts)
        return (
            own.unflatten(1, (-1, experts))[..., self.expert].float()
            @ a.unflatten(0, (experts, -1))[self.expert].float()
        )

    def factors(self, a: torch.Tensor, b: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [rank, columns] and B [rows, rank] of one expert. Its gate and up projections share A."""
        assert self.expert is not None
        b_ORE = b.unflatten(1, (-1, experts)).chunk(self.parts)[self.part]
        return a.unflatten(0, (experts, -1))[self.expert].contiguous(), b_ORE[..., self.expert].contiguous()


def stacked_product(a: torch.Tensor, b: torch.Tensor, experts: int) -> torch.Tensor:
    """B @ A of every expert of a stack in fp32 [E, rows, columns]."""
    a_ERC, b_ORE = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts))
    return torch.einsum("ore,erc->eoc", b_ORE.float(), a_ERC.float())


def stacked_factors(
    base: Checkpoint, weights: Iterable[str], factor: Callable[[str, str], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a stack, from those of its experts.

    Args:
        weights: Hub weights of the stack's experts.
        factor: returns a weight's "A" or "B".
    """
    params = sorted({base.param_of[weight] for weight in weights}, key=lambda param: param.expert or 0)
    a = [factor(param.hub_names[0], "A") for param in params]
    b = [torch.cat([factor(weight, "B") for weight in param.hub_names]) for param in params]
    return torch.cat(a), torch.stack(b, dim=-1).flatten(1)


def expert_modules(base: Checkpoint, renamed: Renamed) -> dict[str, str]:
    """PEFT's module of the stack, by Hub weight, for all routed experts that are separate tensors on the Hub."""
    weights = [name for name, param in base.param_of.items() if param.expert is not None and not param.is_mtp]
    return {
        weight: body.partition(".experts.")[0]
        + ".experts"
        + ".base_layer" * isinstance(base.param_of[weight].rule, GatedMLP)
        for weight, body in renamed(weights).items()
    }


def target_parameters(modules: Iterable[str]) -> list[str]:
    """PEFT's `target_parameters` for an adapter with these modules."""
    inner = {module.endswith(".base_layer") for module in modules if is_expert_module(module)}
    return sorted(f"experts.{_STACKS[0] if gated else _STACKS[1]}" for gated in inner)


def is_expert_module(module: str) -> bool:
    """True if the name of PEFT's module can be a stack's."""
    return _MODULE.fullmatch(module) is not None


def expert_slices(
    base: Checkpoint,
    renamed: Renamed,
    copies: Mapping[str, str],
    config: dict[str, Any],
    modules: set[str],
    where: str,
) -> tuple[dict[str, ExpertSlice], dict[str, str]]:
    """Locate an adapter's changes of routed experts.

    Args:
        renamed: translates Hub names to those of transformers' class.
        copies: Hub weights that a checkpoint may omit, mapped to the weights that they copy.
        config: adapter_config.json.
        modules: PEFT's modules of stacks.

    Returns:
        The slice by Hub weight; and the module of the original by module of a copy.

    Raises:
        CheckpointError: other targets than experts' stacks, or modules that the base lacks.
    """
    targets = {name.rpartition(".")[2] for name in config.get("target_parameters") or ()}
    if not targets or not targets.issubset(_STACKS):
        raise CheckpointError(
            where, f"target_parameters {sorted(targets)} are not the experts' stacks {', '.join(_STACKS)}"
        )
    outer = [name for name in _STACKS if name in targets][-1]
    module_of = {
        (module.removesuffix(".base_layer"), _STACKS[0] if module.endswith(".base_layer") else outer): module
        for module in modules
    }
    copied: dict[str, list[str]] = {}
    for copy, weight in copies.items():
        copied.setdefault(weight, []).append(copy)
    params = [param for param in base.params if param.expert is not None or param.rule.each is not None]
    weights = [name for param in params for name in param.hub_names]
    named = renamed([*weights, *(copy for weight in weights for copy in copied.get(weight, ()))])

    slices: dict[str, ExpertSlice] = {}
    twins: dict[str, str] = {}
    for param in params:
        stack = _STACKS[not isinstance(param.rule.each or param.rule, GatedMLP)]
        for part, weight in enumerate(param.hub_names):
            own, *others = (
                module_of.get((named[name].partition(".experts.")[0] + ".experts", stack))
                for name in (weight, *copied.get(weight, ()))
            )
            if own is not None:
                slices[weight] = ExpertSlice(own, param.expert, part, len(param.hub_names))
                twins |= {other: own for other in others if other is not None}
    if missing := modules - {one.module for one in slices.values()} - twins.keys():
        raise CheckpointError(where, f"{base.where} has no experts {min(missing)}: is it the adapter's base model?")
    return slices, twins


def check_stack(
    base: Checkpoint, weight: str, one: ExpertSlice, a: tuple[int, ...], b: tuple[int, ...], rank: int, where: str
) -> None:
    """Raise CheckpointError unless a stack's factors of shapes `a` and `b` fit the base's weight."""
    *_, rows, columns = base.spec(weight)[1]
    wanted = (rank * base.dims.experts, columns), (rows * one.parts, rank * base.dims.experts)
    if (a, b) != wanted:
        raise CheckpointError(
            where,
            f"factors of {one.module} have shapes {list(a)} and {list(b)}, {weight} needs {list(wanted[0])} and "
            f"{list(wanted[1])}: it is another model's adapter",
        )
