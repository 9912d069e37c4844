"""Declarative mapping between a family's Hub tensors and Megatron's: a flat table of a few rule types.

Everything that moves weights (import, export, reshard, verify, live hand-over, the plan table) is derived from the
`ParamMapping`s that a table expands to. A `ParamMapping` maps one or more whole Hub tensors to the slice of one layer
(or expert) in one global, unsharded Megatron tensor. `ParamMapping.tp_slices` and the formats shard that slice.

Name templates contain `{layer}` and `{expert}`, which on the Megatron side mark the axes that `torch_dist` stacks.
`{mtp}` counts multi-token prediction layers, which follow the model's layers in `{layer}` and are never stacked.
Shapes are written with the names of `Dims`, such as "vocab hidden".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from dlm_bridge.errors import CheckpointError, DlmBridgeError, LayoutError, SettingError

if TYPE_CHECKING:
    import torch  # imported on first use, because a family's table does not need it

QUERY_GROUPS = "query groups (key/value heads)"  # in errors


@dataclass(frozen=True)
class Dims:
    """Sizes of a model, read from its Hub config. They determine the shape of every tensor."""

    layers: int
    hidden: int
    heads: int
    groups: int  # query groups, that is key/value heads
    head_dim: int
    ffn: int
    vocab: int  # rows of the Hub's embedding
    tied: bool = False  # the output layer is the embedding
    experts: int = 0  # routed experts of a mixture-of-experts layer
    moe_ffn: int = 0  # width of one expert
    shared_ffn: int = 0  # width of the shared expert
    dense_layers: frozenset[int] = frozenset()  # layers without experts in a mixture-of-experts model
    full_layers: frozenset[int] = frozenset()  # full-attention layers with sizes of their own; the others are sliding
    facts: frozenset[str] = frozenset()  # further conditions for a rule's `when`, such as "qkv_bias"
    mtp: int = 0  # multi-token prediction layers, after the last layer
    sizes: tuple[tuple[str, int], ...] = ()  # further names for shapes, specific to a family

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.groups * self.head_dim

    @property
    def homogeneous(self) -> bool:
        """True if all layers have the same tensors, which megatron-core then stacks."""
        return not self.full_layers and (not self.experts or not self.dense_layers)

    def is_moe(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers

    def shape(self, words: str) -> tuple[int, ...]:
        """Sizes by their names: "ffn hidden" is (ffn, hidden)."""
        if words not in self._shapes:
            own = dict(self.sizes)
            named = (own[word] if word in own else int(getattr(self, word)) for word in words.split())
            self._shapes[words] = tuple(named)
        return self._shapes[words]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Cache of `shape`, which is called with the same names for every expert."""
        return {}


@dataclass(frozen=True)
class Rule(ABC):
    """One row of a mapping table: conversion between one or more Hub tensors and one Megatron tensor.

    Args:
        megatron: name template of the Megatron tensor.
        when: conditions under which the rule applies, separated by spaces: "tied", "moe" or "dense", "full" or
            "sliding" (of the layer), or one of `Dims.facts`; "!" negates a condition.
        own_dtype: keep the stored dtype if the model is cast to a narrower one (an fp32 router).
    """

    megatron: str
    when: str = ""
    own_dtype: bool = False
    each: ClassVar[Rule | None] = None  # the rule of one expert, if the Hub tensors stack all experts
    tp_axis: ClassVar[int | None] = None  # axis of the Megatron tensor that tensor parallelism splits

    @property
    @abstractmethod
    def hub(self) -> tuple[str, ...]:
        """Hub name templates, in the order of `to_megatron`'s argument and `to_hub`'s result."""

    @abstractmethod
    def hub_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        """Shapes of the Hub tensors, in the order of `hub`."""

    @abstractmethod
    def megatron_shape(self, dims: Dims) -> tuple[int, ...]:
        """Unsharded shape of one layer's slice."""

    @abstractmethod
    def to_megatron(self, tensors: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        """Unsharded Megatron slice of one layer, with unchanged values."""

    @abstractmethod
    def to_hub(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...]:
        """Inverse of `to_megatron`. May return views."""

    def hub_views(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...] | None:
        """Views of one layer's contiguous Megatron slice whose row-major order is that of the Hub tensors, for reading
        and writing in place; None if the rule has no such views.

        A view may have more axes than its Hub tensor (rows in groups).
        """
        return None

    def segments(self, dims: Dims) -> tuple[int, ...]:
        """Lengths along `tp_axis` that are split over ranks separately (gate and up are two)."""
        assert self.tp_axis is not None, f"{self.megatron} is not split"
        return (self.megatron_shape(dims)[self.tp_axis],)

    def check_tp(self, tp: int, dims: Dims) -> None:
        """Raise LayoutError if `tp` ranks cannot split this tensor."""
        if self.tp_axis is None:
            return
        for length in self.segments(dims):
            check_divides("tp", tp, length, f"rows or columns that it splits in {self.megatron}")

    def holds(self, dims: Dims, layer: int | None = None) -> bool:
        return holds(self.when, dims, layer)


def check_divides(field: str, ranks: int, size: int, what: str) -> None:
    """Raise LayoutError, with the divisors, if the setting `field` with the value `ranks` does not divide `size`."""
    if size % ranks:
        fitting = ", ".join(str(n) for n in range(1, min(size, 512) + 1) if size % n == 0)
        raise LayoutError(field, f"{ranks} does not divide the {size} {what}: choose one of {fitting}")


def holds(when: str, dims: Dims, layer: int | None = None) -> bool:
    """True if a model, or one of its layers, meets every condition of `when`."""
    facts = set(dims.facts) | ({"tied"} if dims.tied else set())
    if layer is not None:
        facts |= {"moe" if dims.is_moe(layer) else "dense", "full" if layer in dims.full_layers else "sliding"}
    return all((word[1:] not in facts) if word.startswith("!") else (word in facts) for word in when.split())


@dataclass(frozen=True)
class Direct(Rule):
    """One Hub tensor equal to one Megatron tensor. `axis`: the axis that tensor parallelism splits."""

    name: str = ""
    shape: str = ""
    axis: int | None = None

    @property
    def tp_axis(self) -> int | None:  # type: ignore[override]
        return self.axis

    @property
    def hub(self) -> tuple[str, ...]:
        return (self.name,)

    def hub_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        return (dims.shape(self.shape),)

    def megatron_shape(self, dims: Dims) -> tuple[int, ...]:
        return dims.shape(self.shape)

    def to_megatron(self, tensors: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        (tensor,) = tensors
        return tensor

    def to_hub(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...]:
        return (tensor,)

    def hub_views(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...] | None:
        return (tensor,)


@dataclass(frozen=True)
class Vocabulary(Direct):
    """Tensor with one row per token. Megatron may pad the rows to a multiple; export removes the padding."""

    axis: int | None = 0

    def check_tp(self, tp: int, dims: Dims) -> None:
        """Accept any `tp`: an uneven vocabulary is split into uneven chunks, which also load into a padded model."""


@dataclass(frozen=True)
class QKV(Rule):
    """Separate query, key and value projections, interleaved per query group: [q heads of the group, k, v].

    `groups` and `head_dim` name sizes of `Dims`, for layers with sizes of their own.
    """

    q: str = ""
    k: str = ""
    v: str = ""
    bias: bool = False
    groups: str = "groups"
    head_dim: str = "head_dim"
    tp_axis: ClassVar[int | None] = 0

    @property
    def hub(self) -> tuple[str, ...]:
        return (self.q, self.k, self.v)

    def _columns(self, dims: Dims) -> tuple[int, ...]:
        return () if self.bias else (dims.hidden,)

    def rows(self, dims: Dims) -> tuple[int, int, int]:
        """Number of query, key and value rows."""
        groups, head_dim = dims.shape(f"{self.groups} {self.head_dim}")
        return dims.heads * head_dim, groups * head_dim, groups * head_dim

    def hub_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        return tuple((row, *self._columns(dims)) for row in self.rows(dims))

    def megatron_shape(self, dims: Dims) -> tuple[int, ...]:
        return (sum(self.rows(dims)), *self._columns(dims))

    def to_megatron(self, tensors: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        import torch

        (groups,) = dims.shape(self.groups)
        grouped = [tensor.view(groups, -1, *self._columns(dims)) for tensor in tensors]
        return torch.cat(grouped, dim=1).view(self.megatron_shape(dims))

    def to_hub(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...]:
        return tuple(part.reshape(-1, *self._columns(dims)) for part in self._parts(tensor, dims))

    def hub_views(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...] | None:
        return self._parts(tensor, dims)

    def _parts(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...]:
        """Query, key and value rows, each [groups, rows of a group, columns]."""
        (groups,) = dims.shape(self.groups)
        sizes = [rows // groups for rows in self.rows(dims)]
        return tensor.view(groups, -1, *self._columns(dims)).split(sizes, dim=1)

    def check_tp(self, tp: int, dims: Dims) -> None:
        (groups,) = dims.shape(self.groups)
        check_divides("tp", tp, groups, QUERY_GROUPS)


@dataclass(frozen=True)
class GatedMLP(Rule):
    """SwiGLU's gate and up projections: [all gate rows, all up rows], each split over ranks separately.

    `width` names the size of `Dims` for the rows of one: "ffn", "moe_ffn" or "shared_ffn".
    """

    gate: str = ""
    up: str = ""
    width: str = "ffn"
    tp_axis: ClassVar[int | None] = 0

    @property
    def hub(self) -> tuple[str, ...]:
        return (self.gate, self.up)

    def hub_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        return (dims.shape(f"{self.width} hidden"),) * 2

    def megatron_shape(self, dims: Dims) -> tuple[int, ...]:
        return (2 * self._rows(dims), dims.hidden)

    def _rows(self, dims: Dims) -> int:
        return dims.shape(self.width)[0]

    def to_megatron(self, tensors: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        import torch

        return torch.cat(list(tensors), dim=0)

    def to_hub(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...]:
        return tensor.split(self._rows(dims), dim=0)

    def hub_views(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...] | None:
        return self.to_hub(tensor, dims)

    def segments(self, dims: Dims) -> tuple[int, ...]:
        return (self._rows(dims),) * 2


@dataclass(frozen=True)
class ParamMapping:
    """A rule applied to one layer and expert: the unit of work of every conversion."""

    rule: Rule
    dims: Dims
    layer: int | None = None
    expert: int | None = None

    @property
    def is_mtp(self) -> bool:
        """True for a parameter of a multi-token prediction layer, which transformers' models do not have."""
        return self.layer is not None and self.layer >= self.dims.layers

    @property
    def _mtp(self) -> int | None:
        return self.layer - self.dims.layers if self.layer is not None and self.is_mtp else None

    @property
    def on_first_stage(self) -> bool:
        """True for a parameter outside the layers that computes the first layer's input."""
        return self.rule.megatron.startswith(("embedding.", "self_conditioning.", "vision_tower.", "embed_vision."))

    def _fill(self, template: str) -> str:
        return template.format(layer=self.layer, expert=self.expert, mtp=self._mtp)

    @cached_property
    def hub_names(self) -> tuple[str, ...]:
        return tuple(self._fill(name) for name in self.rule.hub)

    @cached_property
    def hub_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.rule.hub_shapes(self.dims)

    @cached_property
    def megatron_key(self) -> str:
        """The `torch_dist` key, without stacked axes: "decoder.layers.mlp.linear_fc2.weight"."""
        key = self.rule.megatron.replace("{expert}.", "").replace("{mtp}", str(self._mtp))
        return key.replace("{layer}.", "" if self.dims.homogeneous else f"{self.layer}.")

    @cached_property
    def stack(self) -> tuple[tuple[int, int], ...]:
        """(index, size) on each leading axis of the `torch_dist` tensor that stacks slices: layer, expert."""
        axes = []
        if self.layer is not None and not self.is_mtp and self.dims.homogeneous:
            axes.append((self.layer, self.dims.layers))
        if self.expert is not None:
            axes.append((self.expert, self.dims.experts))
        return tuple(axes)

    @cached_property
    def megatron_name(self) -> str:
        """Name with the global layer (and expert) number: "decoder.layers.3.mlp.linear_fc2.weight"."""
        template = self.rule.megatron
        return self._fill(template if self.rule.each is None else template.replace("{expert}.", ""))

    @cached_property
    def pieces(self) -> tuple[ParamMapping, ...]:
        """The separate Megatron parameters of this slice, in the order of its rows: one per expert if the Hub tensor
        stacks all experts, else the parameter itself. Only the Megatron side of a piece is valid."""
        if self.rule.each is None:
            return (self,)
        return tuple(ParamMapping(self.rule.each, self.dims, self.layer, n) for n in range(self.dims.experts))

    @cached_property
    def megatron_shape(self) -> tuple[int, ...]:
        """Unsharded shape of this layer's slice."""
        return self.rule.megatron_shape(self.dims)

    def to_megatron(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.rule.to_megatron(tensors, self.dims)

    def to_hub(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        try:
            return self.rule.to_hub(tensor, self.dims)
        except CheckpointError as error:
            raise CheckpointError(self.megatron_name, error.reason) from None

    def hub_views(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        return self.rule.hub_views(tensor, self.dims)

    @cached_property
    def hub_rows(self) -> tuple[tuple[tuple[int, int], ...], ...] | None:
        """Runs (start, length) of this slice's rows that make up each Hub tensor, in order; None if a Hub tensor does
        not consist of whole rows of the slice."""
        return _hub_rows(self.rule, self.dims)

    def tp_slices(self, tp_rank: int, tp: int) -> tuple[tuple[int, int], ...]:
        """Ranges (start, length) along `rule.tp_axis` of a tensor parallel rank, which stores them concatenated; empty
        if the tensor is replicated over tensor parallel ranks."""
        if self.rule.tp_axis is None:
            return ()
        slices, base = [], 0
        for length in self.rule.segments(self.dims):
            per_rank = -(-length // tp)  # uneven only for a vocabulary
            start = min(tp_rank * per_rank, length)
            slices.append((base + start, min(per_rank, length - start)))
            base += length
        return tuple(slices)

    def shard(self, tensor: torch.Tensor, tp_rank: int, tp: int) -> torch.Tensor:
        """Shard of this layer's unsharded slice on a tensor parallel rank; a view if it is one range."""
        import torch

        axis = self.rule.tp_axis
        if axis is None or tp == 1:
            return tensor
        parts = [tensor.narrow(axis, start, length) for start, length in self.tp_slices(tp_rank, tp)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


@dataclass(frozen=True)
class Passthrough:
    """Hub tensor without a Megatron counterpart, stored beside the checkpoint and exported bit for bit.

    Args:
        name: Hub name; `{layer}` is replaced by every layer that meets `when`.
        when: conditions, as in `Rule`.
        copy_of: name of the tensor that it must equal (a redundant tied head); a difference is an error.
        in_model: the transformers model has the tensor.
        mtp: `{layer}` is replaced by every multi-token prediction layer instead.
        shared_with: name of the tensor that a live Megatron model uses and trains instead.
    """

    name: str
    when: str = ""
    copy_of: str = ""
    in_model: bool = True
    mtp: bool = False
    shared_with: str = ""

    def entries(self, dims: Dims) -> Iterator[Passthrough]:
        """Expand the template: one entry per Hub tensor."""
        if "{layer}" not in self.name:
            if holds(self.when, dims):
                yield self
            return
        for layer in range(dims.layers, dims.layers + dims.mtp) if self.mtp else range(dims.layers):
            if holds(self.when, dims, layer):
                name, copy_of = (template.format(layer=layer) for template in (self.name, self.copy_of))
                yield replace(self, name=name, copy_of=copy_of)


@dataclass(frozen=True)
class Mapping:
    """Complete mapping of a family: rules, sizes and megatron-core's configuration."""

    rules: tuple[Rule, ...]
    dims: Callable[[dict[str, Any]], Dims]  # reads config.json's dict; raises CheckpointError for unsupported settings
    # Reads megatron-core's keyword arguments (see parallel/) from config.json's dict; not called with `hub_only`
    # or `engine_lacks`.
    transformer: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: {}
    passthrough: tuple[Passthrough, ...] = ()
    hub_only: str = ""  # the reason why Megatron's formats cannot store the model, if they cannot
    engine_lacks: str = ""  # the reason why megatron-core cannot compute a model that its formats can store
    other_towers: Callable[[Dims], Iterable[Rule]] = lambda dims: ()  # rules for a vision tower's tensors

    def params(self, dims: Dims) -> Iterator[ParamMapping]:
        """Every parameter of a model: first those outside the layers, then layer by layer."""
        in_layers = [rule for rule in self.rules if "{layer}" in rule.megatron]
        in_mtp = [rule for rule in self.rules if "{mtp}" in rule.megatron]
        alone = [rule for rule in self.rules if rule not in in_layers and rule not in in_mtp]
        yield from (ParamMapping(rule, dims) for rule in (*alone, *self.other_towers(dims)) if rule.holds(dims))
        for layer in range(dims.layers + dims.mtp):
            for rule in in_layers if layer < dims.layers else in_mtp:
                if rule.holds(dims, layer):
                    apart = "{expert}" in rule.megatron and rule.each is None
                    experts: Iterable[int | None] = range(dims.experts) if apart else (None,)
                    yield from (ParamMapping(rule, dims, layer, expert) for expert in experts)

    def settings(self, config: dict[str, Any]) -> dict[str, Any]:
        """`transformer` of a config.json that may be damaged.

        Raises SettingError if megatron-core cannot compute the model, CheckpointError for a damaged config.
        """
        if reason := self.hub_only or self.engine_lacks:
            raise SettingError("engine", reason)
        try:
            return self.transformer(config)
        except DlmBridgeError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError("config.json", f"its settings cannot be read: {error!r}") from None

    def passthrough_names(self, dims: Dims) -> dict[str, Passthrough]:
        """Passthrough entries by Hub name, for all tensors that may be present."""
        return {found.name: found for entry in self.passthrough for found in entry.entries(dims)}


@lru_cache(maxsize=1024)
def _hub_rows(rule: Rule, dims: Dims) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """`ParamMapping.hub_rows`, cached: equal for all layers and experts."""
    import torch

    shape = rule.megatron_shape(dims)
    numbers = torch.arange(shape[0]).view(-1, *(1 for _ in shape[1:])).expand(shape)
    windows = rule.hub_views(numbers, dims)
    if windows is None:
        return None
    found = []
    for window in windows:
        for _ in shape[1:]:
            window = window[..., 0]
        rows = window.reshape(-1)
        starts = [0, *((rows[1:] != rows[:-1] + 1).nonzero().view(-1) + 1).tolist()]
        ends = [*starts[1:], len(rows)]
        runs = tuple((int(rows[start]), end - start) for start, end in zip(starts, ends, strict=True))
        if list(runs) != sorted(runs):
            return None
        found.append(runs)
    return tuple(found)
