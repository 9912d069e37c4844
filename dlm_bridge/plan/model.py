"""A model for planning: its mapping, its sizes and what megatron-core is told, and the parameters of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from dlm_bridge.convert.checkpoint import checked_dims
from dlm_bridge.convert.manifest import MANIFEST, read_manifest
from dlm_bridge.errors import DlmBridgeError, one_line
from dlm_bridge.hub import HUB_ID, read_config
from dlm_bridge.mapping.layout import Layout
from dlm_bridge.mapping.rules import Dims, Mapping, Rule, Vocabulary
from dlm_bridge.models.families import find_family
from dlm_bridge.models.family_spec import FamilySpec

ROLES = ("embedding", "attention", "mlp", "router", "experts", "shared experts", "norms", "head")


@dataclass(frozen=True)
class PlannedModel:
    """What planning knows of a model. `dims` are without multi-token prediction layers, which no training here has."""

    name: str
    family: FamilySpec
    config: dict[str, Any]
    mapping: Mapping
    dims: Dims
    left_out_mtp: int = 0
    _cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """megatron-core's settings beyond the sizes."""
        return self.mapping.transformer(self.config)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rows of the table that this model has, those of left out layers excepted."""
        layers = {self.dims.is_moe(n): n for n in range(self.dims.layers)}.values()  # one of each kind
        return tuple(
            rule
            for rule in self.mapping.rules
            if "{mtp}" not in rule.megatron
            and (
                any(rule.holds(self.dims, layer) for layer in layers)
                if "{layer}" in rule.megatron
                else rule.holds(self.dims)
            )
        )

    @property
    def top_k(self) -> int:
        """Experts that a token is given to."""
        return int(self.settings.get("moe_router_topk", 0)) if self.dims.experts else 0

    @property
    def latent_attention(self) -> bool:
        return bool(self.settings.get("multi_latent_attention"))

    @property
    def causal(self) -> bool:
        return self.family.attention_pattern == "causal"

    def size(self, word: str) -> int:
        """One of `Dims`' words, the family's own ones too."""
        return int(self.remembered(("size", word), lambda: self.dims.shape(word)[0]))

    @cached_property
    def parameters(self) -> int:
        """Of the whole model, each counted once."""
        outer = sum(self.outer(1).values())
        return outer + sum(sum(self.layer(self.dims.is_moe(n), 1, 1, 1).values()) for n in range(self.dims.layers))

    @cached_property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        if not self.dims.experts:
            return self.parameters
        experts = sum(self.layer(self.dims.is_moe(n), 1, 1, 1).get("experts", 0) for n in range(self.dims.layers))
        return self.parameters - experts + experts * self.top_k // self.dims.experts

    def layer(self, moe: bool, tp: int, ep: int, etp: int) -> dict[str, int]:
        """Parameters of one layer on one rank, by role."""
        return self.remembered(("layer", moe, tp, ep, etp), lambda: self._layer(moe, tp, ep, etp))

    def stages(self, layout: Layout) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """`Layout.stages`: the layers of each virtual chunk of each pipeline rank."""
        return self.remembered(
            ("stages", layout),
            lambda: tuple(tuple(map(tuple, chunks)) for chunks in layout.stages(self.dims.layers)),
        )

    def kinds(self, layout: Layout) -> tuple[dict[bool, int], ...]:
        """For each pipeline rank how many of its layers have experts (True) and how many have none (False)."""
        return self.remembered(
            ("kinds", layout),
            lambda: tuple(
                dict(Counter(self.dims.is_moe(n) for chunk in chunks for n in chunk)) for chunks in self.stages(layout)
            ),
        )

    def outer(self, tp: int) -> dict[str, int]:
        """Parameters outside the layers on the rank that holds them, by role: embedding, norms, head."""
        return self.remembered(("outer", tp), lambda: self._outer(tp))

    def remembered(self, key: Any, compute: Callable[[], Any]) -> Any:
        """What `compute` gives, computed once for `key`: a search over layouts asks the same again and again."""
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    def _layer(self, moe: bool, tp: int, ep: int, etp: int) -> dict[str, int]:
        layer = next((n for n in range(self.dims.layers) if self.dims.is_moe(n) is moe), None)
        counts: dict[str, int] = {}
        for rule in self.rules:
            if layer is None or "{layer}" not in rule.megatron or not rule.holds(self.dims, layer):
                continue
            expert = "{expert}" in rule.megatron
            held = _held(rule, self.dims, etp if expert else tp) * (self.dims.experts // ep if expert else 1)
            counts[_role(rule)] = counts.get(_role(rule), 0) + held
        return counts

    def _outer(self, tp: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        for rule in self.rules:
            if "{layer}" not in rule.megatron:
                counts[_role(rule)] = counts.get(_role(rule), 0) + _held(rule, self.dims, tp)
        return counts


def open_model(path: str | Path, revision: str | None = None, family: str | None = None) -> PlannedModel:
    """The model of a Hub folder (a config.json is enough), a Hub id or a Megatron checkpoint; no weight is read.

    Raises DlmBridgeError.
    """
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return model_of(read_config(folder / "config.json"), str(path), family)
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        assert manifest is not None
        return model_of(manifest.config, str(path), family or manifest.family)
    if folder.exists():
        raise DlmBridgeError(f"{folder}: has neither a config.json nor a {MANIFEST}: name a Hub folder or a config's")
    if not HUB_ID.fullmatch(str(path)):
        raise DlmBridgeError(f"{path}: no such folder, and not a Hub id (owner/name)")
    from huggingface_hub import hf_hub_download

    try:
        config = hf_hub_download(str(path), "config.json", revision=revision)
    except Exception as error:  # whatever the network or the Hub says: it is the user's input that cannot be had
        raise DlmBridgeError(
            f"{path}: no such folder, and the Hub did not give its config.json: {one_line(error)[:300]}"
        ) from None
    return model_of(read_config(Path(config)), str(path), family)


def model_of(config: dict[str, Any], name: str, family: str | None = None) -> PlannedModel:
    """The model of a Hub config. Raises DlmBridgeError for one that Megatron cannot hold."""
    spec = find_family(config, family, name)
    mapping: Mapping = spec.mapping
    if mapping.hub_only:
        raise DlmBridgeError(f"{name}: {mapping.hub_only}")
    dims = checked_dims(mapping, config, name)
    model = PlannedModel(name, spec, config, mapping, replace(dims, mtp=0), dims.mtp)
    _ = model.settings  # what megatron-core cannot compute is refused here
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
