"""CUDA graphs of a model's body in static shapes, with compiled decoder layers or an extension's fused ones."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.experimental import _config as shape_config
from transformers.utils import logging

from dlm_bridge.generation.kv_cache import StaticKVCache
from dlm_bridge.generation.runtime import attention
from dlm_bridge.generation.runtime.varlen import packed_shape, padded_cu_seqlens
from dlm_bridge.registration import find_kernels

logger = logging.get_logger(__name__)

# Recorded shapes. With the attention kernel one graph serves every context length; without it a block-causal sampler
# of 2048 new tokens in blocks of 4 has 1024 of them. One costs a few MB of host memory.
MAX_GRAPHS = 1024
# Compiled variants of a decoder layer's code, which all models of one class share: with and without experts; for
# prompts, one block and two blocks; with and without a mask; for one row and for several. Layers beyond run eagerly.
MAX_COMPILED_VARIANTS = 128


@dataclass(frozen=True)
class BodyInputs:
    """Inputs of a model body: A rows of Q columns, or one row of T packed tokens (`varlen.PackedTokens`)."""

    tokens: torch.Tensor  # [A, Q]
    mask: torch.Tensor | None  # [A, 1, Q or 1, K]
    positions: torch.Tensor  # [A, Q]
    # [Q] or [A, Q], the columns at which keys and values are cached; for packed tokens as in `varlen.write_packed`;
    # None: no cache
    columns: torch.Tensor | None = None
    # Which cached columns are attended to; see `attention.attend_cached`.
    end: int | None = None
    length: torch.Tensor | None = None
    block: int | None = None
    variant: str = ""  # distinguishes forward passes of one shape
    cu_seqlens: torch.Tensor | None = None  # of packed rows
    max_seqlen: int | None = None
    blocks: torch.Tensor | None = None  # [1, T], of packed rows whose attention is block-causal, see `varlen.Packing`
    # Of packed rows: the cached columns that they attend to, see `varlen.attend_packed_cached`.
    causal: bool = False  # attention of packed rows
    attended: torch.Tensor | None = None  # [1, K]
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_k: int | None = None
    places: torch.Tensor | None = None  # [A, N], in each row or among packed tokens: where hidden states are needed


_TENSORS = (
    "tokens", "mask", "positions", "columns", "length", "cu_seqlens", "blocks", "attended", "cu_seqlens_k", "places",
)  # fmt: skip


class DecoderLayers:
    """The decoder layers of a model: here its own, in an extension of kernels a subclass that replaces them.

    Args:
        compiled: `torch.compile` compiles all layers, or where `trims` is true all but the last one.
    """

    trims = False  # whether the last layer can leave out positions after its attention

    def __init__(self, model: Any, compiled: bool) -> None: ...

    def installed(self) -> AbstractContextManager[None]:
        """Context in which the layers are replaced."""
        return nullcontext()

    def returning(self, places_AN: torch.Tensor | None) -> AbstractContextManager[None]:
        """Context in which the last layer returns these places alone, see `at_places`; None: all."""
        return nullcontext()

    def end(self) -> None:
        """Give weights that were moved memory of their own again."""


@dataclass
class _RecordedGraph:
    """A CUDA graph with its static inputs and output."""

    graph: torch.cuda.CUDAGraph
    inputs: BodyInputs
    hidden: torch.Tensor


class GraphedBody:
    """Runs the body on A rows, padded to one of a few batch sizes. The first forward pass of a shape runs eagerly, the
    second is recorded, and later ones are replayed: launching a graph costs the CPU no more than one kernel.

    Args:
        compile_layers: whether `torch.compile` fuses the operations of a decoder layer. Otherwise an extension's
            kernels do, where they can (`DecoderLayers`). The last layer uses those kernels in both cases, since after
            its attention only the positions that are asked for are computed.
        rows, width: size of the KV cache buffers; width 0: no KV cache.
    """

    def __init__(self, model: Any, compile_layers: bool, *, rows: int, width: int) -> None:
        self.buffers = StaticKVCache.allocate(model, rows, width) if width else None
        self._rows, self._width = rows, width
        kernels = find_kernels("layers", model.device.type)
        self._layers: DecoderLayers = (DecoderLayers if kernels is None else kernels.Layers)(model, compile_layers)
        self._state = _state(model)
        self._model: Any = None
        self._batch = 0
        # The runner of a continuous batch in flight: nobody else may use the buffers.
        self.holder: weakref.ref[Any] | None = None
        self._compile_layers = compile_layers
        self._compiled: list[Any] = []
        self._seen: set[Any] = set()
        self._recorded: OrderedDict[Any, _RecordedGraph] = OrderedDict()
        self._records = model.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._records else None

    def serves(self, model: Any, execution: str, rows: int, width: int) -> bool:
        """Whether a call of this size can use the recorded graphs: they are large enough, no weight has moved, and
        adapters, training mode, dtype and autocast are as they were."""
        return (
            (execution == "compiled") == self._compile_layers
            and batch_size_for(rows) <= self._rows
            and (width > 0) == (self._width > 0)
            and (width < self._width or not width)
            and _state(model) == self._state
        )

    @property
    def held(self) -> bool:
        """Whether a continuous batch is in flight, which has not been dropped."""
        return self.holder is not None and self.holder() is not None

    def begin(self) -> None:
        """Start a new call of `generate`, whose first batch is its largest."""
        self._batch = 0

    @contextmanager
    def prepared(self, model: Any) -> Iterator[None]:
        """Install the compiled decoder layers and the fused ones; the model is restored afterwards."""
        self._model = model
        with self._layers.installed(), self._compiled_layers():
            yield

    def forget(self) -> None:
        """Drop the recorded graphs; forward passes are recorded anew."""
        self._seen.clear()
        self._recorded.clear()

    def end(self) -> None:
        """Drop the recorded graphs, and give the fused weights memory of their own again."""
        self.forget()
        self._layers.end()

    @contextmanager
    def _compiled_layers(self) -> Iterator[None]:
        layers = list(self._model.model.layers)
        try:
            if self._compile_layers:
                if not self._compiled:
                    compiled_layers = layers[:-1] if self._layers.trims else layers
                    self._compiled = [_compiled(layer._call_impl) for layer in compiled_layers]
                for layer, compiled in zip(layers, self._compiled, strict=False):
                    layer._compiled_call_impl = compiled
            with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED_VARIANTS):
                yield
        finally:
            for layer in layers:
                layer._compiled_call_impl = None
            if self.buffers is not None:
                self.buffers.detach()
            self._model = None  # no reference from the graphs: they live as long as the model

    def __call__(self, inputs: BodyInputs, *, record: bool) -> torch.Tensor:
        """Last hidden states, [A, Q, H], or [A, N, H] at `places`; see `run_body`. The next forward pass may overwrite
        the result.

        Args:
            record: use a recorded graph, or record one. Its batch may have more rows than `inputs`, and these write to
                the KV cache as well. False: exactly the given rows run, for when other rows of the cache are in use.
        """
        if inputs.places is not None and not self._trims(inputs):
            return at_places(self(replace(inputs, places=None), record=record), inputs.places)
        rows = len(inputs.tokens if inputs.places is None else inputs.places)
        inputs = self._with_length_tensor(inputs)
        if not record:
            return self._run(inputs)
        if inputs.cu_seqlens is None:
            batch = self._batch_for(rows)
        else:
            batch, inputs = 1, self._with_shared_shape(inputs)
        width = inputs.tokens.shape[1]
        sized = (inputs.mask, inputs.columns, inputs.attended, inputs.blocks, inputs.places)
        shapes = (None if one is None else tuple(one.shape[1:]) for one in sized)
        longest = (inputs.max_seqlen, inputs.max_seqlen_k)
        kind = (inputs.end, inputs.length is None, inputs.block, inputs.causal, inputs.variant, *longest)
        key = (batch, width, *kind, *shapes)
        recorded = self._recorded.get(key)
        if recorded is None:
            if not self._records:
                return self._run(inputs)[:rows]
            filled = _padded_copy(inputs, batch)
            if key in self._seen:
                recorded = self._record(key, filled)
            if recorded is None:  # as it will be recorded, so that nothing is compiled during capture
                self._seen.add(key)
                return self._run(filled)[:rows]
        self._recorded.move_to_end(key)
        for name in _TENSORS:
            static, new = getattr(recorded.inputs, name), getattr(inputs, name)
            if new is not None:
                static[: len(new)].copy_(new)
        recorded.graph.replay()
        return recorded.hidden[:rows]

    def _trims(self, inputs: BodyInputs) -> bool:
        """Whether the last layer computes only what is asked for: where that is at most half of the tokens."""
        assert inputs.places is not None
        rows, count = inputs.places.shape
        if inputs.cu_seqlens is not None:
            rows = self._rows  # batches share graphs
        return self._layers.trims and 2 * rows * count <= inputs.tokens.numel()

    def _run(self, inputs: BodyInputs) -> torch.Tensor:
        with self._layers.returning(inputs.places):
            return run_body(self._model, self.buffers, inputs)

    def _with_length_tensor(self, inputs: BodyInputs) -> BodyInputs:
        """The same inputs with the number of attended columns as a tensor, where the attention kernel reads it: one
        graph then serves every context length."""
        columns, mask, end = inputs.columns, inputs.mask, inputs.end
        if self.buffers is None or columns is None or end is None:
            return inputs
        if not attention.uses_kernel(self.buffers.shapes, self._model.dtype, columns, mask):
            return inputs
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, self._width - mask.shape[-1]))
        length = torch.full((1,), end, dtype=torch.int32, device=columns.device)
        return replace(inputs, mask=mask, end=self._width, length=length)

    def _with_shared_shape(self, inputs: BodyInputs) -> BodyInputs:
        """Packed rows, padded by tokens in a row of their own to a shape that batches share, and with it a graph."""
        assert inputs.cu_seqlens is not None
        assert inputs.max_seqlen is not None
        tokens, longest = packed_shape(inputs.tokens.shape[1], inputs.max_seqlen)
        added = tokens - inputs.tokens.shape[1]
        columns, blocks = inputs.columns, inputs.blocks
        attended, cu_seqlens_k, longest_k = inputs.attended, inputs.cu_seqlens_k, inputs.max_seqlen_k
        if columns is not None:  # keys and values of added tokens go to a column that no canvas has
            columns = torch.nn.functional.pad(columns, (0, added), value=self._width - 1)
        if blocks is not None:
            blocks = torch.nn.functional.pad(blocks, (0, added))
        places = inputs.places
        if places is not None:
            places = torch.nn.functional.pad(places, (0, 0, 0, self._rows - len(places)))
        if attended is not None and cu_seqlens_k is not None and longest_k is not None:
            keys, longest_k = packed_shape(attended.shape[1] + 1, longest_k)  # what is added attends to something
            attended = torch.nn.functional.pad(attended, (0, keys - attended.shape[1]), value=self._width - 1)
            cu_seqlens_k = padded_cu_seqlens(cu_seqlens_k, self._rows, keys)
        return replace(
            inputs,
            tokens=torch.nn.functional.pad(inputs.tokens, (0, added)),
            positions=torch.nn.functional.pad(inputs.positions, (0, added)),
            columns=columns,
            cu_seqlens=padded_cu_seqlens(inputs.cu_seqlens, self._rows, tokens),
            max_seqlen=longest,
            blocks=blocks,
            attended=attended,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_k=longest_k,
            places=places,
        )

    def _batch_for(self, rows: int) -> int:
        """The batch size to run so many rows in. It shrinks only once half of it is empty, since each size is recorded
        separately."""
        if self._batch == 0 or rows > self._batch or rows <= self._batch // 2:
            self._batch = batch_size_for(rows)
        return self._batch

    def _record(self, key: Any, inputs: BodyInputs) -> _RecordedGraph | None:
        """Record a forward pass; None, from then on for all shapes, where the model cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                hidden = self._run(inputs)
        except RuntimeError as error:  # such as experts that read the routing on the CPU
            logger.warning_once(
                f"{type(self._model).__name__} cannot be recorded as a CUDA graph ({str(error).splitlines()[0]}): "
                "generating eagerly"
            )
            self._records = False
            return None
        recorded = _RecordedGraph(graph, inputs, hidden)
        self._recorded[key] = recorded
        if len(self._recorded) > MAX_GRAPHS:
            self._recorded.popitem(last=False)
        return recorded


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's compiled call. Padded batches have few shapes; of packed rows one code serves every number of tokens,
    from the first one on."""
    padded, packed = torch.compile(call, dynamic=None), torch.compile(call, dynamic=True)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cu_seqlens") is None:
            return padded(*args, **kwargs)
        # The number of tokens may happen to be that of a weight's rows: it is not the same dimension.
        with shape_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return packed(*args, **kwargs)

    return compiled


def batch_size_for(rows: int) -> int:
    """Smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least the number of rows."""
    size = 1 << (rows - 1).bit_length()
    return size * 3 // 4 if size >= 4 and rows <= size * 3 // 4 else size


def run_body(model: Any, buffers: StaticKVCache | None, inputs: BodyInputs) -> torch.Tensor:
    """[A, Q, H], the last hidden states of a model whose attention function is `attention.attend`."""
    if buffers is not None:
        buffers.attach(len(inputs.tokens) if inputs.cu_seqlens is None else None)
    output = model.model(
        input_ids=inputs.tokens,
        attention_mask=inputs.mask,
        position_ids=inputs.positions,
        use_cache=False,
        kv_columns=inputs.columns,
        kv_end=inputs.end,
        kv_length=inputs.length,
        kv_block=inputs.block,
        cu_seqlens=inputs.cu_seqlens,
        max_seqlen=inputs.max_seqlen,
        packed_blocks=inputs.blocks,
        packed_causal=inputs.causal,
        kv_attended=inputs.attended,
        cu_seqlens_k=inputs.cu_seqlens_k,
        max_seqlen_k=inputs.max_seqlen_k,
    )
    return output.last_hidden_state


def at_places(hidden: torch.Tensor, places_AN: torch.Tensor) -> torch.Tensor:
    """Hidden states at some places, [A, N, H], out of [A, Q, H] or, for packed tokens, out of [1, T, H]."""
    if len(hidden) == 1:
        return hidden[0, places_AN]
    return hidden.gather(1, places_AN[..., None].expand(-1, -1, hidden.shape[-1]))


def _padded_copy(inputs: BodyInputs, batch: int) -> BodyInputs:
    """Copy of the inputs with the given number of rows."""
    tensors = {name: getattr(inputs, name) for name in _TENSORS}
    copies: dict[str, Any] = {
        name: tensor.clone() if tensor.dim() == 1 or len(tensor) >= batch else _pad_rows(tensor, batch)
        for name, tensor in tensors.items()
        if tensor is not None
    }
    return replace(inputs, **copies)


def _pad_rows(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """A copy with the last row repeated up to `batch` rows."""
    return torch.cat([tensor, tensor[-1:].expand(batch - len(tensor), *tensor.shape[1:])])


def _state(model: Any) -> tuple[Any, ...]:
    """Everything but its inputs that a recorded graph depends on."""
    pointers, adapters, modules = [], [], [model]
    while modules:  # model.parameters() takes as long as a forward pass of a deep model
        module = modules.pop()
        pointers += [one.data_ptr() for one in module._parameters.values() if one is not None]
        modules += [one for one in module._modules.values() if one is not None]
        # A PEFT layer: merging changes no pointer. hasattr of the class: that of a module without the name is slow.
        if hasattr(type(module), "merged_adapters"):
            adapters.append((tuple(module.active_adapters), module.disable_adapters, tuple(module.merged_adapters)))
    return tuple(pointers), tuple(adapters), model.training, model.dtype, torch.is_autocast_enabled(model.device.type)
