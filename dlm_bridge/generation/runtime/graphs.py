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

# Maximum number of recorded shapes, of a few MB of host memory each. With the attention kernel, one graph serves every
# context length; without it, a block-causal sampler has 1024 shapes for 2048 new tokens in blocks of 4.
MAX_GRAPHS = 1024
# Maximum number of compiled variants of a decoder layer's code, which all models of a class share: with and without
# experts; for prompts, one block and two blocks; with and without a mask; for one row and several.
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
    buffers: StaticKVCache | None = None  # instead of the body's own; not in recorded graphs
    embeddings: torch.Tensor | None = None  # [A, Q, H], in place of those of `tokens`


_TENSORS = (
    "tokens", "mask", "positions", "columns", "length", "cu_seqlens", "blocks", "attended", "cu_seqlens_k", "places",
    "embeddings",
)  # fmt: skip


class DecoderLayers:
    """Decoder layers of a model. A subclass in an extension of kernels replaces them by fused ones.

    Args:
        compiled: True if `torch.compile` compiles the layers; with `trims`, all but the last one.
    """

    trims = False  # True: the last layer can drop positions after its attention

    def __init__(self, model: Any, compiled: bool) -> None: ...

    def installed(self) -> AbstractContextManager[None]:
        """Context manager that replaces the layers."""
        return nullcontext()

    def returning(self, places_AN: torch.Tensor | None) -> AbstractContextManager[None]:
        """Context manager: the last layer returns only these positions, see `at_places`; None: all."""
        return nullcontext()

    def end(self) -> None:
        """Separate fused weights again."""


@dataclass
class _RecordedGraph:
    """A CUDA graph with its static inputs and output."""

    graph: torch.cuda.CUDAGraph
    inputs: BodyInputs
    hidden: torch.Tensor


class GraphedBody:
    """Runs the body on A rows, padded to one of a few batch sizes. The first forward pass of a shape runs eagerly, the
    second is recorded, and later ones are replayed: for the CPU, a graph costs no more than launching one kernel.

    Args:
        compile_layers: True: `torch.compile` fuses the operations of decoder layers. False: an extension's kernels do,
            if they support the model (`DecoderLayers`). The last layer always uses those kernels, which compute only
            the requested positions after its attention.
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
        # Runner of a continuous batch, which has exclusive use of the buffers.
        self.holder: weakref.ref[Any] | None = None
        self._compile_layers = compile_layers
        self._compiled: list[Any] = []
        self._seen: set[Any] = set()
        self._recorded: OrderedDict[Any, _RecordedGraph] = OrderedDict()
        self._records = model.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._records else None

    def serves(self, model: Any, execution: str, rows: int, width: int) -> bool:
        """True if a call of this size can use the recorded graphs: they are large enough, no weight has moved, and
        adapters, training mode, dtype and autocast have not changed."""
        return (
            (execution == "compiled") == self._compile_layers
            and batch_size_for(rows) <= self._rows
            and (width > 0) == (self._width > 0)
            and (width < self._width or not width)
            and _state(model) == self._state
        )

    @property
    def held(self) -> bool:
        """True if a continuous batch uses the buffers."""
        return self.holder is not None and self.holder() is not None

    def begin(self) -> None:
        """Begin a call of `generate`. Its first batch is its largest."""
        self._batch = 0

    @contextmanager
    def prepared(self, model: Any) -> Iterator[None]:
        """Context manager: install the compiled and fused decoder layers."""
        self._model = model
        with self._layers.installed(), self._compiled_layers():
            yield

    def forget(self) -> None:
        """Drop the recorded graphs."""
        self._seen.clear()
        self._recorded.clear()

    def end(self) -> None:
        """Drop the recorded graphs, and separate fused weights again."""
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
            self._model = None  # the graphs must not keep the model alive

    def __call__(self, inputs: BodyInputs, *, record: bool) -> torch.Tensor:
        """Last hidden states, [A, Q, H], or [A, N, H] at `places`; see `run_body`. The next forward pass may overwrite
        the result.

        Args:
            record: use a recorded graph, or record one. Its batch may have more rows than `inputs`, which also write
                to the KV cache. False: run exactly the given rows, because other rows of the cache are in use.
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
        sized = (inputs.mask, inputs.columns, inputs.attended, inputs.blocks, inputs.places, inputs.embeddings)
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
            if recorded is None:  # run in the shape to be recorded, so that capturing compiles nothing
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
        """True if the last layer computes only the requested positions, because these are at most half of the
        tokens."""
        assert inputs.places is not None
        rows, count = inputs.places.shape
        if inputs.cu_seqlens is not None:
            rows = self._rows  # batches share graphs
        return self._layers.trims and 2 * rows * count <= inputs.tokens.numel()

    def _run(self, inputs: BodyInputs) -> torch.Tensor:
        with self._layers.returning(inputs.places):
            return run_body(self._model, inputs.buffers or self.buffers, inputs)

    def _with_length_tensor(self, inputs: BodyInputs) -> BodyInputs:
        """Return the inputs with the number of attended columns as a tensor, if the attention kernel reads it: one
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
        """Pad packed rows with an extra row to a shape, and thus a graph, that batches share."""
        assert inputs.cu_seqlens is not None
        assert inputs.max_seqlen is not None
        tokens, longest = packed_shape(inputs.tokens.shape[1], inputs.max_seqlen)
        added = tokens - inputs.tokens.shape[1]
        columns, blocks = inputs.columns, inputs.blocks
        attended, cu_seqlens_k, longest_k = inputs.attended, inputs.cu_seqlens_k, inputs.max_seqlen_k
        if columns is not None:  # keys and values of added tokens are written to a column beyond every canvas
            columns = torch.nn.functional.pad(columns, (0, added), value=self._width - 1)
        if blocks is not None:
            blocks = torch.nn.functional.pad(blocks, (0, added))
        places = inputs.places
        if places is not None:
            places = torch.nn.functional.pad(places, (0, 0, 0, self._rows - len(places)))
        if attended is not None and cu_seqlens_k is not None and longest_k is not None:
            keys, longest_k = packed_shape(attended.shape[1] + 1, longest_k)  # added tokens attend to a column
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
        """Batch size for this number of rows. It shrinks only when half of it is empty, because each size is recorded
        separately."""
        if self._batch == 0 or rows > self._batch or rows <= self._batch // 2:
            self._batch = batch_size_for(rows)
        return self._batch

    def _record(self, key: Any, inputs: BodyInputs) -> _RecordedGraph | None:
        """Record a forward pass. Returns None, and disables recording, if the model cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                hidden = self._run(inputs)
        except RuntimeError as error:  # for example, experts that read the routing on the CPU
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
    """Compile a layer's call. Padded batches have few shapes; for packed rows, one compilation serves all numbers of
    tokens."""
    padded, packed = torch.compile(call, dynamic=None), torch.compile(call, dynamic=True)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cu_seqlens") is None:
            return padded(*args, **kwargs)
        # The number of tokens may equal a weight's size without being the same dimension.
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
        **{"input_ids": inputs.tokens} if inputs.embeddings is None else {"inputs_embeds": inputs.embeddings},
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
    """[A, N, H], hidden states at these positions of [A, Q, H] or, for packed tokens, of [1, T, H]."""
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
    """Copy with the last row repeated up to `batch` rows."""
    return torch.cat([tensor, tensor[-1:].expand(batch - len(tensor), *tensor.shape[1:])])


def _state(model: Any) -> tuple[Any, ...]:
    """State of the model that a recorded graph depends on."""
    pointers, adapters, modules = [], [], [model]
    while modules:  # model.parameters() takes as long as a forward pass of a deep model
        module = modules.pop()
        pointers += [one.data_ptr() for one in module._parameters.values() if one is not None]
        modules += [one for one in module._modules.values() if one is not None]
        # A PEFT layer: merging changes no pointer. hasattr of the class: that of a module without the name is slow.
        if hasattr(type(module), "merged_adapters"):
            adapters.append((tuple(module.active_adapters), module.disable_adapters, tuple(module.merged_adapters)))
    return tuple(pointers), tuple(adapters), model.training, model.dtype, torch.is_autocast_enabled(model.device.type)
