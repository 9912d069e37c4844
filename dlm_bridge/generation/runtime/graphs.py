"""CUDA graphs of static shapes of a model's body, with decoder layers compiled where asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils import logging

from dlm_bridge.generation.kv_cache import StaticKVCache
from dlm_bridge.generation.runtime import attention, fused_linear

logger = logging.get_logger(__name__)

# Recorded shapes. Where attention is in place one serves every length of the context, else a block-causal sampler of
# 2048 new tokens in blocks of 4 has 1024. One costs a few MB of host memory.
MOST_GRAPHS = 1024
# Compiled codes of a layer, which models of one class share: its kinds, with experts and without, times prompts,
# blocks and two of them, with masks and without, of one row and of more. Behind these layers run as they are.
MOST_CODES = 128


@dataclass(frozen=True)
class BodyInputs:
    """What a body is run on: A rows of Q columns."""

    tokens: torch.Tensor  # [A, Q]
    mask: torch.Tensor | None  # [A, 1, Q or 1, K]
    positions: torch.Tensor  # [A, Q]
    columns: torch.Tensor | None = None  # [Q] or [A, Q], where keys and values are kept; None: they are not
    # Which columns of those that are kept are looked at; see `attention.attend_kept`.
    end: int | None = None
    ends: torch.Tensor | None = None
    block: int | None = None
    variant: str = ""  # says which of several forwards of one shape it is


@dataclass
class _RecordedGraph:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: BodyInputs
    hidden: torch.Tensor


class GraphedBody:
    """Runs the body on A rows as a batch of one of a few sizes. A shape's first forward runs as it is, its second is
    recorded, and the others are replayed: launching a graph costs the CPU no more than one kernel.

    Args:
        compile_layers: whether `torch.compile` fuses what is inside a decoder layer.
        rows, width: the size of the buffers of keys and values; width 0 for none.
    """

    def __init__(self, model: Any, compile_layers: bool, *, rows: int, width: int) -> None:
        self.kept = StaticKVCache(model, rows, width) if width else None
        self._rows, self._width = rows, width
        self._places = fused_linear.fuse_linear_layers(model)
        self._state = _state(model)
        self._model: Any = None
        self._batch = 0
        self._compile_layers = compile_layers
        self._compiled: list[Any] = []
        self._seen: set[Any] = set()
        self._recorded: OrderedDict[Any, _RecordedGraph] = OrderedDict()
        self._records = model.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._records else None

    def serves(self, model: Any, execution: str, rows: int, width: int) -> bool:
        """Whether a call of this size can go on with what is recorded: no weight has moved, no mode has changed."""
        return (
            (execution == "compiled") == self._compile_layers
            and batch_size_for(rows) <= self._rows
            and (width > 0) == (self._width > 0)
            and width <= self._width
            and _state(model) == self._state
        )

    def begin(self, model: Any) -> None:
        """A new call of `generate`, whose first batch is its largest."""
        self._model = model
        self._batch = 0

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Let the decoder layers run compiled, and products of one input as one; afterwards the model, which others
        use as well, is as it was."""
        with fused_linear.fused_layers_installed(self._places), self._compiled_layers():
            yield

    def end(self) -> None:
        """Leave the model's weights as they were before."""
        fused_linear.separate_weights(self._places)

    @contextmanager
    def _compiled_layers(self) -> Iterator[None]:
        layers = list(self._model.model.layers)
        try:
            if self._compile_layers:
                if not self._compiled:
                    self._compiled = [torch.compile(layer._call_impl, dynamic=None) for layer in layers]
                for layer, compiled in zip(layers, self._compiled, strict=True):
                    layer._compiled_call_impl = compiled
            with torch._dynamo.config.patch(recompile_limit=MOST_CODES):
                yield
        finally:
            for layer in layers:
                layer._compiled_call_impl = None
            if self.kept is not None:
                self.kept.detach()
            self._model = None  # the graphs live as long as the model, not longer

    def __call__(self, inputs: BodyInputs, *, record: bool) -> torch.Tensor:
        """[A, Q, H]; see `run_body`. The next forward may overwrite the result."""
        rows, width = inputs.tokens.shape
        batch = self._batch_for(rows)
        inputs = self._for_every_length(inputs)
        shapes = (None if one is None else tuple(one.shape[1:]) for one in (inputs.mask, inputs.columns))
        key = (batch, width, inputs.end, inputs.ends is None, inputs.block, inputs.variant, *shapes)
        recorded = self._recorded.get(key)
        if recorded is None:
            if not (record and self._records):
                return run_body(self._model, self.kept, inputs)
            filled = _padded_copy(inputs, batch)
            if key in self._seen:
                recorded = self._record(key, filled)
            if recorded is None:  # run just as it is recorded, so that nothing is compiled while it is
                self._seen.add(key)
                return run_body(self._model, self.kept, filled)[:rows]
        self._recorded.move_to_end(key)
        for name in ("tokens", "mask", "positions", "columns", "ends"):
            static, new = getattr(recorded.inputs, name), getattr(inputs, name)
            if new is not None:
                static[: len(new)].copy_(new)
        recorded.graph.replay()
        return recorded.hidden[:rows]

    def _for_every_length(self, inputs: BodyInputs) -> BodyInputs:
        """The same forward, with how many columns it looks at as a number on the device, where attention reads it."""
        columns, mask, end = inputs.columns, inputs.mask, inputs.end
        if self.kept is None or columns is None or end is None:
            return inputs
        if not attention.uses_kernel(self.kept.shapes, self._model.dtype, columns, mask):
            return inputs
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, self._width - mask.shape[-1]))
        ends = torch.full((1,), end, dtype=torch.int32, device=columns.device)
        return replace(inputs, mask=mask, end=self._width, ends=ends)

    def _batch_for(self, rows: int) -> int:
        """Rows that have ended make the batch smaller once it is half empty: each size is recorded anew."""
        if self._batch == 0 or rows > self._batch or rows <= self._batch // 2:
            self._batch = batch_size_for(rows)
        return self._batch

    def _record(self, key: Any, inputs: BodyInputs) -> _RecordedGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                hidden = run_body(self._model, self.kept, inputs)
        except RuntimeError as error:  # such as experts whose code looks at the routing on the CPU
            logger.warning_once(
                f"{type(self._model).__name__} cannot be recorded as a CUDA graph ({str(error).splitlines()[0]}): "
                "generating eagerly"
            )
            self._records = False
            return None
        recorded = _RecordedGraph(graph, inputs, hidden)
        self._recorded[key] = recorded
        if len(self._recorded) > MOST_GRAPHS:
            self._recorded.popitem(last=False)
        return recorded


def batch_size_for(rows: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that holds so many rows."""
    size = 1 << (rows - 1).bit_length()
    return size * 3 // 4 if size >= 4 and rows <= size * 3 // 4 else size


def run_body(model: Any, kept: StaticKVCache | None, inputs: BodyInputs) -> torch.Tensor:
    """[A, Q, H], the last hidden states of a model whose attention is `attention.attend`."""
    if kept is not None:
        kept.show(len(inputs.tokens))
    output = model.model(
        input_ids=inputs.tokens,
        attention_mask=inputs.mask,
        position_ids=inputs.positions,
        use_cache=False,
        kv_columns=inputs.columns,
        kv_end=inputs.end,
        kv_ends=inputs.ends,
        kv_block=inputs.block,
    )
    return output.last_hidden_state


def _padded_copy(inputs: BodyInputs, batch: int) -> BodyInputs:
    """The inputs with so many rows, in tensors that nothing else changes."""
    columns, ends = inputs.columns, inputs.ends
    if columns is not None:
        columns = columns.clone() if columns.dim() == 1 else _pad_rows(columns, batch)
    return replace(
        inputs,
        tokens=_pad_rows(inputs.tokens, batch),
        mask=None if inputs.mask is None else _pad_rows(inputs.mask, batch),
        positions=_pad_rows(inputs.positions, batch),
        columns=columns,
        ends=None if ends is None else ends.clone(),
    )


def _pad_rows(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """A tensor of its own, with the last row repeated up to `batch` rows."""
    return torch.cat([tensor, tensor[-1:].expand(batch - len(tensor), *tensor.shape[1:])])


def _state(model: Any) -> tuple[Any, ...]:
    """What a recorded graph depends on beside its inputs."""
    pointers, adapters, modules = [], [], [model]
    while modules:  # as model.parameters(), which for a deep model takes as long as a forward of it
        module = modules.pop()
        pointers += [one.data_ptr() for one in module._parameters.values() if one is not None]
        modules += [one for one in module._modules.values() if one is not None]
        # One of PEFT's: merging changes no pointer. Its class is asked: modules are slow to say that they lack a name.
        if hasattr(type(module), "merged_adapters"):
            adapters.append((tuple(module.active_adapters), module.disable_adapters, tuple(module.merged_adapters)))
    return tuple(pointers), tuple(adapters), model.training, model.dtype, torch.is_autocast_enabled(model.device.type)
