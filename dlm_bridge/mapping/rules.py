"""Declarative mapping between a family's Hub tensors and Megatron's: a flat table of a few rule types.

Everything that moves weights (import, export, reshard, verify, live hand-over, the plan table) is derived from the
`ParamMapping`s that a table expands to. One ties a few whole Hub tensors to one layer's (or expert's) slice of one
global, unsharded Megatron tensor; sharding that slice over ranks is the job of `ParamMapping.tp_slices` and of the
formats.

Name templates hold `{layer}` and `{expert}`. On the Megatron side they mark the axes that `torch_dist` stacks. `{mtp}`
counts multi-token prediction layers, which follow the model's own in `{layer}` and are never stacked.
Shapes are written in the words of `Dims`, as in "vocab hidden".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from dlm_bridge.errors import DlmBridgeError

if TYPE_CHECKING:
    import torch  # imported where tensors are moved: a family's table alone must not cost that


@dataclass(frozen=True)
class Dims:
    """A model's sizes, read from its Hub config. Rows and columns of every tensor follow from these."""

    layers: int
    hidden: int
    heads: int
    groups: int  # query groups, that is key/value heads
    head_dim: int
    ffn: int
    vocab: int  # rows of the embedding as the Hub has it
    tied: bool = False  # the output layer is the embedding
    experts: int = 0  # routed experts of a mixture-of-experts layer
    moe_ffn: int = 0  # width of one expert
    shared_ffn: int = 0  # width of the shared expert
    dense_layers: frozenset[int] = frozenset()  # layers without experts, where a model has experts in others
    full_layers: frozenset[int] = frozenset()  # layers of full attention with sizes of their own, where others slide
    facts: frozenset[str] = frozenset()  # what else rules may ask for with `when`, such as "qkv_bias"
    mtp: int = 0  # multi-token prediction layers, after the last layer
    sizes: tuple[tuple[str, int], ...] = ()  # a family's own words for shapes

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.groups * self.head_dim

    @property
    def homogeneous(self) -> bool:
        """Whether all layers hold the same tensors; megatron-core stacks them only then."""
        return not self.full_layers and (not self.experts or not self.dense_layers)

    def is_moe(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers

    def shape(self, words: str) -> tuple[int, ...]:
        """The sizes that `words` name: "ffn hidden" is (ffn, hidden)."""
        if words not in self._shapes:
            own = dict(self.sizes)
            named = (own[word] if word in own else int(getattr(self, word)) for word in words.split())
            self._shapes[words] = tuple(named)
        return self._shapes[words]

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """What was asked for: a model with many experts asks for the same few shapes for each."""
        return {}


@dataclass(frozen=True)
class Rule(ABC):
    """One row of a mapping table: how some Hub tensors and one Megatron tensor become each other.

    `when` lists the conditions under which the row holds: "tied", "moe" and "dense", "full" and "sliding" (of the
    layer), or one of `Dims.facts`; "!" before a word means that it must not be so. `own_dtype`: the tensor keeps the
    dtype that it is stored in where the others are cast to a narrower one (a router in fp32).
    """

    megatron: str
    when: str = ""
    own_dtype: bool = False
    each: ClassVar[Rule | None] = None  # the rule of one expert, where the Hub tensors hold all of them
    tp_axis: ClassVar[int | None] = None  # axis of the Megatron tensor that tensor parallelism splits

    @property
    @abstractmethod
    def hub(self) -> tuple[str, ...]:
        """Hub name templates, in the order that `to_megatron` takes and `to_hub` gives."""

    @abstractmethod
    def hub_shapes(self, dims: Dims) -> tuple[tuple[int, ...], ...]:
        """The shapes of those Hub tensors."""

    @abstractmethod
    def megatron_shape(self, dims: Dims) -> tuple[int, ...]:
        """The unsharded shape of one layer's slice."""

    @abstractmethod
    def to_megatron(self, tensors: Sequence[torch.Tensor], dims: Dims) -> torch.Tensor:
        """One layer's unsharded Megatron slice; values are moved, never changed."""

    @abstractmethod
    def to_hub(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...]:
        """The inverse of `to_megatron`. May return views."""

    def hub_views(self, tensor: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, ...] | None:
        """Views of one layer's contiguous Megatron slice that hold the Hub tensors' values in their row-major order,
        so that these can be read and written in place; None where there are no such views.

        A view may have more axes than its Hub tensor (rows in groups).
        """
        return None

    def segments(self, dims: Dims) -> tuple[int, ...]:
        """Lengths along `tp_axis` that are split over ranks each on its own (gate and up are two)."""
        assert self.tp_axis is not None, f"{self.megatron} is not split"
        return (self.megatron_shape(dims)[self.tp_axis],)

    def check_tp(self, tp: int, dims: Dims) -> None:
        """Raise DlmBridgeError where `tp` cannot split this tensor, saying which number to change."""
        if self.tp_axis is None:
            return
        for length in self.segments(dims):
            if length % tp:
                raise DlmBridgeError(f"--tp {tp} does not divide {length}, the size that it splits in {self.megatron}")

    def holds(self, dims: Dims, layer: int | None = None) -> bool:
        return holds(self.when, dims, layer)


def holds(when: str, dims: Dims, layer: int | None = None) -> bool:
    """Whether every condition of `when` is met by a model, or by one of its layers."""
    facts = set(dims.facts) | ({"tied"} if dims.tied else set())
    if layer is not None:
        facts |= {"moe" if dims.is_moe(layer) else "dense", "full" if layer in dims.full_layers else "sliding"}
    return all((word[1:] not in facts) if word.startswith("!") else (word in facts) for word in when.split())


@dataclass(frozen=True)
class Direct(Rule):
    """One Hub tensor that is one Megatron tensor, unchanged. `axis` is the one that tensor parallelism splits."""

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
    """Rows are tokens: Megatron may pad them to a multiple; the padding is trimmed by this role on the way back."""

    axis: int | None = 0

    def check_tp(self, tp: int, dims: Dims) -> None:
        """Any tp: an uneven vocabulary is cut in uneven chunks, which load into a padded model all the same."""


@dataclass(frozen=True)
class QKV(Rule):
    """Separate query, key and value projections, interleaved per query group: [q heads of the group, k, v].

    `groups` and `head_dim` are words of `Dims`, for layers with sizes of their own.
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
        """Rows of query, key and value."""
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
        if groups % tp:
            raise DlmBridgeError(
                f"--tp {tp} does not divide the {groups} query groups (key/value heads): "
                f"choose a --tp that divides {groups}"
            )


@dataclass(frozen=True)
class GatedMLP(Rule):
    """SwiGLU's gate and up projections: [all gate rows, all up rows], each split over ranks on its own.

    `width` is the word of `Dims` for the rows of one: "ffn", "moe_ffn" or "shared_ffn".
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
    """A rule at one layer and expert: the unit of work of every conversion."""

    rule: Rule
    dims: Dims
    layer: int | None = None
    expert: int | None = None

    @property
    def is_mtp(self) -> bool:
        """Whether it belongs to a multi-token prediction layer, which transformers' models leave out."""
        return self.layer is not None and self.layer >= self.dims.layers

    @property
    def _mtp(self) -> int | None:
        return self.layer - self.dims.layers if self.layer is not None and self.is_mtp else None

    @property
    def on_first_stage(self) -> bool:
        """Whether a parameter of no layer makes the first layer's input."""
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
        """The `torch_dist` key, without the axes that it stacks: "decoder.layers.mlp.linear_fc2.weight"."""
        key = self.rule.megatron.replace("{expert}.", "").replace("{mtp}", str(self._mtp))
        return key.replace("{layer}.", "" if self.dims.homogeneous else f"{self.layer}.")

    @cached_property
    def stack(self) -> tuple[tuple[int, int], ...]:
        """(index, size) on each axis that the `torch_dist` tensor has before this slice's own: layer, expert."""
        axes = []
        if self.layer is not None and not self.is_mtp and self.dims.homogeneous:
            axes.append((self.layer, self.dims.layers))
        if self.expert is not None:
            axes.append((self.expert, self.dims.experts))
        return tuple(axes)

    @cached_property
    def megatron_name(self) -> str:
        """The name with the global layer (and expert) number in it: "decoder.layers.3.mlp.linear_fc2.weight"."""
        template = self.rule.megatron
        return self._fill(template if self.rule.each is None else template.replace("{expert}.", ""))

    @cached_property
    def pieces(self) -> tuple[ParamMapping, ...]:
        """What Megatron holds apart, in the order of the slice's rows: each expert where the Hub has all in one
        tensor, else the parameter itself. A piece knows Megatron's side only."""
        if self.rule.each is None:
            return (self,)
        return tuple(ParamMapping(self.rule.each, self.dims, self.layer, n) for n in range(self.dims.experts))

    @cached_property
    def megatron_shape(self) -> tuple[int, ...]:
        """The unsharded shape of this layer's slice."""
        return self.rule.megatron_shape(self.dims)

    def to_megatron(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.rule.to_megatron(tensors, self.dims)

    def to_hub(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        try:
            return self.rule.to_hub(tensor, self.dims)
        except DlmBridgeError as error:
            raise DlmBridgeError(f"tensor {self.megatron_name}: {error}") from None

    def hub_views(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        return self.rule.hub_views(tensor, self.dims)

    @cached_property
    def hub_rows(self) -> tuple[tuple[tuple[int, int], ...], ...] | None:
        """For each Hub tensor the (start, length) runs of this slice's rows that are its own rows, in order; None
        where it is not made of whole rows of the slice."""
        return _hub_rows(self.rule, self.dims)

    def tp_slices(self, tp_rank: int, tp: int) -> tuple[tuple[int, int], ...]:
        """The (start, length) ranges along `rule.tp_axis` that a tensor parallel rank holds; in memory it holds
        them concatenated. Empty tuple where the tensor is replicated over tensor parallel ranks."""
        if self.rule.tp_axis is None:
            return ()
        slices, base = [], 0
        for length in self.rule.segments(self.dims):
            share = -(-length // tp)  # uneven only for a vocabulary
            start = min(tp_rank * share, length)
            slices.append((base + start, min(share, length - start)))
            base += length
        return tuple(slices)

    def shard(self, tensor: torch.Tensor, tp_rank: int, tp: int) -> torch.Tensor:
        """What a tensor parallel rank holds of this layer's unsharded slice (a view where one range serves)."""
        import torch

        axis = self.rule.tp_axis
        if axis is None or tp == 1:
            return tensor
        parts = [tensor.narrow(axis, start, length) for start, length in self.tp_slices(tp_rank, tp)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


@dataclass(frozen=True)
class Passthrough:
    """A Hub tensor that Megatron has no place for, kept beside the checkpoint and given back bit for bit.

    `name` may hold `{layer}`, which then stands for every layer that meets `when`, or with `mtp` for every multi-token
    prediction layer. `copy_of` names the tensor that it must equal (a redundant tied head); a difference is an error.
    `shared_with` names the tensor that a live Megatron model has in its place, which a run trains for both.
    """

    name: str
    when: str = ""
    copy_of: str = ""
    in_model: bool = True  # whether the transformers model has it
    mtp: bool = False
    shared_with: str = ""

    def entries(self, dims: Dims) -> Iterator[Passthrough]:
        """One for each Hub tensor that the template stands for."""
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
    """A family's whole mapping: the table, the sizes it is read with, and megatron-core's configuration."""

    rules: tuple[Rule, ...]
    dims: Callable[[dict[str, Any]], Dims]  # from config.json's dict; raises DlmBridgeError on what the body cannot do
    # megatron-core keyword arguments, see parallel/; not asked where `engine_lacks` says that it cannot compute it
    transformer: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: {}
    passthrough: tuple[Passthrough, ...] = ()
    hub_only: str = ""  # why Megatron cannot hold such a model, where it cannot
    engine_lacks: str = ""  # why megatron-core cannot compute one that it can hold
    other_towers: Callable[[Dims], Iterable[Rule]] = lambda dims: ()  # a vision tower's tensors, each with its rule

    def params(self, dims: Dims) -> Iterator[ParamMapping]:
        """Every parameter of a model, layer by layer after the tensors that belong to none."""
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
        """`transformer` of a config.json that may be damaged. Raises DlmBridgeError where it cannot be read, and where
        megatron-core cannot compute the model."""
        if self.engine_lacks:
            raise DlmBridgeError(self.engine_lacks)
        try:
            return self.transformer(config)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, DlmBridgeError):
                raise
            raise DlmBridgeError(f"config.json: its settings cannot be read: {error!r}") from None

    def passthrough_names(self, dims: Dims) -> dict[str, Passthrough]:
        """Hub names that may be present and are kept beside the Megatron checkpoint."""
        return {found.name: found for entry in self.passthrough for found in entry.entries(dims)}


@lru_cache(maxsize=1024)
def _hub_rows(rule: Rule, dims: Dims) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """`ParamMapping.hub_rows`: the same for all layers and experts."""
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
