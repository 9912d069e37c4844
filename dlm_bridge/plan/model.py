"""The planned model: its sizes, megatron-core's settings, and the parameters of each layer by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from math import prod
from pathlib import Path
from typing import Any, TypeVar, cast

from dlm_bridge.convert.checkpoint import checked_dims
from dlm_bridge.convert.manifest import read_model_config
from dlm_bridge.errors import CheckpointError
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.mapping.rules import Dims, Rule, Vocabulary
from dlm_bridge.models.families import FamilySpec, find_family

ROLES = ("embedding", "attention", "mlp", "router", "experts", "shared experts", "norms", "head")

Method = TypeVar("Method", bound=Callable[..., Any])


def _cached(method: Method) -> Method:
    """Compute a method of `PlannedModel` once for the same arguments."""

    @wraps(method)
    def cached(self: PlannedModel, *args: Any) -> Any:
        return self.cached((method.__name__, *args), lambda: method(self, *args))

    return cast(Method, cached)


@dataclass(frozen=True)
class PlannedModel:
    """A model for planning. `dims` does not count multi-token prediction layers; `left_out_mtp` is their number."""

    name: str
    family: FamilySpec
    config: dict[str, Any]
    dims: Dims
    left_out_mtp: int = 0
    _cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """megatron-core's settings beyond the sizes."""
        return self.family.mapping.settings(self.config)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """Mapping rules that apply to this model, without those of multi-token prediction layers."""
        layers = {self.dims.is_moe(n): n for n in range(self.dims.layers)}.values()  # one of each kind
        rules = [rule for rule in self.family.mapping.rules if "{mtp}" not in rule.megatron]
        return tuple(
            rule
            for rule in rules
            if any(rule.holds(self.dims, n) for n in (layers if "{layer}" in rule.megatron else (None,)))
        )

    @property
    def top_k(self) -> int:
        """Experts per token."""
        return int(self.settings.get("moe_router_topk", 0)) if self.dims.experts else 0

    @property
    def latent_attention(self) -> bool:
        return bool(self.settings.get("multi_latent_attention"))

    @property
    def causal(self) -> bool:
        return self.family.attention_pattern == "causal"

    def size(self, word: str) -> int:
        """A size by its word in `Dims`, a family's own words included."""
        return self.dims.shape(word)[0]

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of the whole model, each counted once."""
        outer = sum(self.outer(1).values())
        return outer + sum(sum(self.layer(self.dims.is_moe(n), 1, 1, 1).values()) for n in range(self.dims.layers))

    @cached_property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses."""
        if not self.dims.experts:
            return self.parameters
        experts = sum(self.layer(self.dims.is_moe(n), 1, 1, 1).get("experts", 0) for n in range(self.dims.layers))
        return self.parameters - experts + experts * self.top_k // self.dims.experts

    def cached(self, key: Any, compute: Callable[[], Any]) -> Any:
        """The value of `compute`, computed once per `key`: a search over layouts asks for the same values often."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    @_cached
    def layer(self, moe: bool, tp: int, ep: int, etp: int) -> dict[str, int]:
        """Parameters of one layer on one rank, by role."""
        layer = next((n for n in range(self.dims.layers) if self.dims.is_moe(n) is moe), None)
        counts: dict[str, int] = {}
        for rule in self.rules:
            if layer is None or "{layer}" not in rule.megatron or not rule.holds(self.dims, layer):
                continue
            expert = "{expert}" in rule.megatron
            held = _held(rule, self.dims, etp if expert else tp) * (self.dims.experts // ep if expert else 1)
            counts[_role(rule)] = counts.get(_role(rule), 0) + held
        return counts

    @_cached
    def outer(self, tp: int) -> dict[str, int]:
        """Parameters outside the layers on the rank that holds them, by role: embedding, norms, head."""
        counts: dict[str, int] = {}
        for rule in self.rules:
            if "{layer}" not in rule.megatron:
                counts[_role(rule)] = counts.get(_role(rule), 0) + _held(rule, self.dims, tp)
        return counts

    @_cached
    def stages(self, layout: Layout) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """`Layout.stages`: the layers of each virtual chunk of each pipeline rank."""
        return tuple(tuple(map(tuple, chunks)) for chunks in layout.stages(self.dims.layers))

    @_cached
    def kinds(self, layout: Layout) -> tuple[dict[bool, int], ...]:
        """Number of layers with experts (True) and without (False) on each pipeline rank."""
        ranks = ([n for chunk in chunks for n in chunk] for chunks in self.stages(layout))
        return tuple(dict(Counter(map(self.dims.is_moe, layers))) for layers in ranks)


def open_model(path: str | Path, revision: str | None = None, family: str | None = None) -> PlannedModel:
    """Open a Hub folder (a config.json is enough), a Hub id or a Megatron checkpoint; no weight is read."""
    config, named = read_model_config(path, revision)
    return model_of(config, str(path), family or named)


def model_of(config: dict[str, Any], name: str, family: str | None = None) -> PlannedModel:
    """The model of a Hub config. Raises CheckpointError for a model without a Megatron form."""
    spec = find_family(config, family, name)
    if spec.mapping.hub_only:
        raise CheckpointError(name, spec.mapping.hub_only)
    dims = checked_dims(spec.mapping, config, name)
    model = PlannedModel(name, spec, config, replace(dims, mtp=0), dims.mtp)
    _ = model.settings  # raises for what megatron-core cannot compute
    return model


def _held(rule: Rule, dims: Dims, ranks: int) -> int:
    """Elements of the rule's tensor on one of `ranks` ranks that split it; a vocabulary is padded to divide."""
    shape = rule.megatron_shape(dims)
    if rule.tp_axis is None:
        return prod(shape)
    if isinstance(rule, Vocabulary):
        return -(-shape[0] // ranks) * prod(shape[1:])
    return prod(shape) // ranks


def _role(rule: Rule) -> str:
    name = rule.megatron
    if "layernorm" in name or "layer_norm" in name or name.endswith("norm.weight"):
        return "norms"
    for part, role in (
        ("{expert}", "experts"),
        ("shared_experts", "shared experts"),
        (".router.", "router"),
        ("self_attention", "attention"),
        ("embedding", "embedding"),
        ("output_layer", "head"),
    ):
        if part in name:
            return role
    return "mlp"
