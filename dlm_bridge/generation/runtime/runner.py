"""Model runner: the model's own forward pass, or its body with a KV cache, eager, in CUDA graphs or compiled."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dlm_bridge.errors import NonFiniteError, SettingError
from dlm_bridge.generation.kv_cache import KVCache, StaticKVCache, attention_layers, head_sizes, is_attention
from dlm_bridge.generation.options import Execution
from dlm_bridge.generation.request import MASK
from dlm_bridge.generation.runtime import attention
from dlm_bridge.generation.runtime.graphs import BodyInputs, GraphedBody, at_places, batch_size_for, run_body
from dlm_bridge.generation.runtime.varlen import MAX_HEAD_SIZE, PackedTokens, Packing, varlen_attention
from dlm_bridge.job import before_end

# With a KV cache, a view is packed only if at most this fraction of its columns is real, because attention then copies
# the cached keys and values and takes two or three times as long (H100, 64 rows with 100 to 300 cached columns).
MOST_TOKENS_OVER_CACHE = 0.75

# Graphs of each model's last call, with its KV cache buffers; see `release`.
_graphed_bodies: weakref.WeakKeyDictionary[nn.Module, GraphedBody] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class CanvasView:
    """Model input of A rows: Q columns of the canvas from `first` on, or each row's own `columns`.

    K is the number of attended columns.
    """

    tokens: torch.Tensor  # [A, Q], `MASK` at masks and padding
    attention_mask: torch.Tensor | None  # [A, K] padding mask, or [A, 1, Q, K]; True or 1: attended to
    position_ids: torch.Tensor | None  # [A, Q]; None: the columns themselves
    first: int = 0
    end: int | None = None  # K, with a KV cache
    columns: torch.Tensor | None = None  # [A, Q], cache columns of each row's keys and values; None: from `first` on
    # Block length of block-causal attention among the view's columns; None: they all attend to each other. The mask
    # alone determines which cached columns before the view are attended to.
    block: int | None = None
    variant: str = ""  # distinguishes forward passes of one shape, such as with and without an adapter
    packing: Packing | None = None  # of rows that can run without their padding
    buffers: StaticKVCache | None = None  # other rows of a KV cache than the first ones; only for passes run `once`
    mask_weights: torch.Tensor | None = None  # [A, Q], of the mask token in each embedding, see `soft_embeddings`


class ModelRunner:
    """Runs the model for a predictor, and counts the forward passes."""

    def __init__(
        self, model: Any, body: GraphedBody | None, cache: KVCache, *, mask_token_id: int = 0, packs: bool = False
    ) -> None:
        self.forwards = 0
        self._mask_token_id = mask_token_id
        self._model = model
        self._body = body
        self._cache = cache
        self._packs = packs  # rows of different lengths run without their padding
        # Variable-length attention does not support sliding windows over a KV cache.
        self._windows = packs and any(getattr(layer, "sliding_window", None) for layer in attention_layers(model))

    @classmethod
    @contextmanager
    def open(cls, model: Any, execution: Execution | None, cache: KVCache, **options: Any) -> Iterator[ModelRunner]:
        """Context manager: a runner for one call; see `prepare`."""
        runner = cls.prepare(model, execution, cache, **options)
        with runner.active():
            try:
                yield runner
            except NonFiniteError:
                cache.drop_non_finite()  # the next call may get the same buffers
                raise

    @classmethod
    def prepare(
        cls,
        model: Any,
        execution: Execution | None,
        cache: KVCache,
        *,
        rows: int,
        width: int,
        mask_token_id: int | None,
        hold: bool = False,
    ) -> ModelRunner:
        """Return a runner for canvases of at most `rows` rows and `width` columns. It runs the model while `active`.

        Args:
            execution: "eager"; "graph": forward passes are recorded as CUDA graphs when their shape occurs a second
                time; "compiled": `torch.compile` fuses each decoder layer, on a CUDA device in addition to graphs.
                None: "graph" on a CUDA device where the model supports it, else "eager".
            cache: the KV cache, whose buffers are allocated here.
            mask_token_id: token that the model reads at masks and padding.
            hold: reserve the graphs and their buffers for this runner until `close`.

        Raises:
            SettingError: the model or the device does not support the execution or the cache.
        """
        plain = unwrapped(model)
        execution = _resolve_execution(model, plain, execution)
        packs = _graph_obstacle(model, plain) is None and supports_packing(plain)
        options: dict[str, Any] = {"packs": packs, "mask_token_id": mask_token_id or 0}
        if execution == "eager" and not cache.stores:
            return cls(model, None, cache, **options)
        if not supports_kv_cache(model):
            raise SettingError(
                "cache", f"{type(model).__name__} has no attention layers of a transformers body: use `cache=none`"
            )
        if execution == "eager":
            cache.allocate(plain, rows, width)
            return cls(plain, None, cache, **options)
        with _current_device(plain):
            body = _graphed_body(plain, execution, rows=rows, width=width if cache.stores else 0)
        cache.buffers = body.buffers
        runner = cls(plain, body, cache, **options)
        body.holder = weakref.ref(runner) if hold else None
        return runner

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager for forward passes. The model's device becomes the current one, as CUDA graphs and Triton
        require, and this package's attention and fused layers are installed; on exit they are removed."""
        with _current_device(self._model), self._prepared():
            yield

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        if self.plain:
            yield
            return
        with _cached_attention(self._model):
            if self._body is not None:
                with self._body.prepared(self._model):
                    yield
                return
            try:
                yield
            finally:
                assert self._cache.buffers is not None
                self._cache.buffers.detach()

    def close(self) -> None:
        """Release the graphs that `prepare` has reserved with `hold`."""
        if self._body is not None:
            self._body.holder = None

    @property
    def model(self) -> Any:
        """The model."""
        return self._model

    @property
    def plain(self) -> bool:
        """True if forward passes are the model's own: eager, without a KV cache, with masks made by transformers."""
        return self._body is None and self._cache.buffers is None

    def logits(self, view: CanvasView, columns: slice) -> torch.Tensor:
        """Logits [A, N, V], in the model's dtype, at N columns of the canvas in the view."""
        if self.plain and not self._runs_packed(view):
            return self._own_forward(view, columns)
        places = slice(columns.start - view.first, columns.stop - view.first)
        return self.head(self.hidden(view, places=places), slice(None))

    def logits_at(self, view: CanvasView, places: torch.Tensor) -> torch.Tensor:
        """Logits [A, N, V], in the model's dtype, at [A, N] places counted from the view's first column."""
        if self.plain and not self._runs_packed(view):
            return self._own_forward(view, places)
        return self.head(self.hidden(view, places=places), slice(None))

    def hidden(
        self, view: CanvasView, *, once: bool = False, places: slice | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Last hidden states of the body. Writes the KV cache, if there is one.

        Args:
            once: do not record a CUDA graph, because the shape will not occur again.
            places: a slice of the view's columns, or [A, N] of each row; None: all columns.

        Returns:
            [A, N, H] at `places`, or [A, Q, H]. The next forward pass may overwrite the result.
        """
        if isinstance(places, slice) and places == slice(0, view.tokens.shape[1]):
            places = None
        if self._runs_packed(view):
            return self._packed_hidden(view, places, once=once)
        self.forwards += 1
        positions_AQ = view.position_ids
        if positions_AQ is None:
            width = view.tokens.shape[1]
            positions_AQ = torch.arange(view.first, view.first + width, device=view.tokens.device)[None]
            positions_AQ = positions_AQ.expand(len(view.tokens), -1)
        mask = view.attention_mask
        if mask is not None and mask.dim() == 2:
            mask = mask.bool()[:, None, None, :]
        columns = view.columns
        if columns is None and self._cache.buffers is not None:
            columns = torch.arange(view.first, view.first + view.tokens.shape[1], device=view.tokens.device)
        tokens_AQ = self._token_ids(view)
        inputs = BodyInputs(
            tokens_AQ,
            mask,
            positions_AQ,
            columns,
            view.end,
            block=view.block,
            variant=view.variant,
            buffers=view.buffers,
            embeddings=self._embeddings(view, tokens_AQ),
        )
        if self._body is not None:
            if isinstance(places, slice):  # one graph serves every block
                indices = torch.arange(places.start, places.stop, device=view.tokens.device)
                places = indices.expand(len(view.tokens), -1)
            return self._body(replace(inputs, places=places), record=not once)
        # With a device map, the last layer may be on another device than the canvas.
        hidden = run_body(self._model, view.buffers or self._cache.buffers, inputs).to(view.tokens.device)
        if places is None:
            return hidden
        return hidden[:, places] if isinstance(places, slice) else at_places(hidden, places)

    def head(self, hidden_AQH: torch.Tensor, places: slice) -> torch.Tensor:
        """Logits [A, N, V] at a slice of these hidden states."""
        logits: torch.Tensor = unwrapped(self._model).lm_head(hidden_AQH[:, places])
        return logits.to(hidden_AQH.device)

    def head_at(self, hidden_AQH: torch.Tensor, places_AN: torch.Tensor) -> torch.Tensor:
        """Logits [A, N, V] at each row's own places among these hidden states."""
        return self.head(at_places(hidden_AQH, places_AN), slice(None))

    def _runs_packed(self, view: CanvasView) -> bool:
        """True if a forward pass runs without the view's padding. With a KV cache, packing copies the cached columns,
        so it requires a view with much padding, and no kernel that reads the cached columns in place."""
        packing, buffers = view.packing, self._cache.buffers
        if not self._packs or packing is None or view.mask_weights is not None or not any(packing.lengths):
            return False
        if packing.attended is None:
            return True
        if sum(packing.lengths) > MOST_TOKENS_OVER_CACHE * view.tokens.numel():
            return False
        assert buffers is not None
        assert view.attention_mask is not None
        columns, mask = view.columns, view.attention_mask[:, None, None, :]
        columns = torch.empty(view.tokens.shape[1], device=view.tokens.device) if columns is None else columns
        return not self._windows and not attention.uses_kernel(buffers.shapes, self._model.dtype, columns, mask.bool())

    def _packed_hidden(self, view: CanvasView, places: slice | torch.Tensor | None, *, once: bool) -> torch.Tensor:
        """`hidden` by a forward pass without the view's padding. Hidden states at padding are arbitrary."""
        self.forwards += 1
        model, packing, buffers = unwrapped(self._model), view.packing, view.buffers or self._cache.buffers
        assert packing is not None
        assert view.position_ids is not None
        rows = PackedTokens.of(packing.real, packing.lengths)
        columns = attended = keys = None
        if buffers is not None:
            count, width = view.tokens.shape
            columns_AQ = view.columns
            if columns_AQ is None:
                columns_AQ = torch.arange(view.first, view.first + width, device=view.tokens.device)
            first_A1 = torch.arange(count, device=view.tokens.device)[:, None] * buffers.width
            columns = rows.pack(first_A1 + columns_AQ)
            if packing.attended is not None:
                assert view.attention_mask is not None
                keys = PackedTokens.of(view.attention_mask, packing.attended)
                columns_K = torch.arange(view.attention_mask.shape[1], device=view.tokens.device)
                attended = keys.pack(first_A1 + columns_K)
        inputs = BodyInputs(
            rows.pack(self._token_ids(view)),
            None,
            rows.pack(view.position_ids),
            columns,
            variant=view.variant,
            cu_seqlens=rows.cu_seqlens,
            max_seqlen=rows.max_seqlen,
            blocks=None if packing.blocks is None else rows.pack(packing.blocks),
            causal=packing.causal,
            attended=attended,
            cu_seqlens_k=None if keys is None else keys.cu_seqlens,
            max_seqlen_k=None if keys is None else keys.max_seqlen,
            buffers=view.buffers,
        )
        place_AN = rows.place
        if places is not None:
            place_AN = place_AN[:, places] if isinstance(places, slice) else place_AN.gather(1, places)
        if self._body is not None:
            return self._body(replace(inputs, places=place_AN), record=not once)
        with _cached_attention(model):
            return at_places(run_body(model, buffers, inputs), place_AN)

    def _token_ids(self, view: CanvasView) -> torch.Tensor:
        """[A, Q], the view's tokens with the mask token's id at masks."""
        return view.tokens.masked_fill(view.tokens == MASK, self._mask_token_id)

    def _embeddings(self, view: CanvasView, tokens_AQ: torch.Tensor) -> torch.Tensor | None:
        """[A, Q, H], embeddings of the view's tokens where they are merged; None: their own."""
        if view.mask_weights is None:
            return None
        embed = unwrapped(self._model).get_input_embeddings()
        return soft_embeddings(embed, tokens_AQ, view.mask_weights, self._mask_token_id)

    def _own_forward(self, view: CanvasView, logits_to_keep: slice | torch.Tensor) -> torch.Tensor:
        """Logits of the model's own forward pass."""
        self.forwards += 1
        mask, tokens_AQ = view.attention_mask, self._token_ids(view)
        embeddings = self._embeddings(view, tokens_AQ)
        output = self._model(
            **{"input_ids": tokens_AQ} if embeddings is None else {"inputs_embeds": embeddings},
            attention_mask=mask.long() if mask is not None and mask.dim() == 2 else mask,
            position_ids=view.position_ids,
            logits_to_keep=logits_to_keep,
        )
        return output.logits.to(view.tokens.device)


def soft_embeddings(
    embed: nn.Module, token_ids: torch.Tensor, weights: torch.Tensor, mask_token_id: int
) -> torch.Tensor:
    """DMax's soft embeddings [A, Q, H] (arXiv 2604.08302): (1 - w) E(token) + w E(mask), scaled to the norm
    (1 - w) |E(token)| + w |E(mask)|. A token of weight 0 has its own embedding exactly."""
    token, mask = embed(token_ids), embed(torch.full_like(token_ids[:1, :1], mask_token_id))
    dtype = torch.promote_types(token.dtype, torch.float32)
    of_mask, wide_token, wide_mask = weights[..., None].to(dtype), token.to(dtype), mask.to(dtype)
    mixed = (1 - of_mask) * wide_token + of_mask * wide_mask
    norm = (1 - of_mask) * wide_token.norm(dim=-1, keepdim=True) + of_mask * wide_mask.norm(dim=-1, keepdim=True)
    mixed = mixed * (norm / mixed.norm(dim=-1, keepdim=True).clamp(min=1e-12))
    return torch.where(of_mask == 0, token, mixed.to(token.dtype))


def unwrapped(model: Any) -> Any:
    """Return the diffusion model without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def tensor_parallel_group(model: Any) -> Any:
    """Tensor-parallel process group of a model; None for a model in one process."""
    if (getattr(model, "_tp_size", None) or 1) == 1:
        return None
    own = getattr(model, "shard_group", None)
    return model._device_mesh["tp"].get_group() if own is None else own


def supports_kv_cache(model: Any) -> bool:
    """True if the model has attention layers of a transformers body."""
    return any(map(is_attention, unwrapped(model).modules()))


def supports_packing(model: Any) -> bool:
    """True if `torch.nn.attention.varlen` supports the model's attention. The model is on one device."""
    device = next(model.parameters()).device
    if device.type != "cuda" or torch.version.cuda is None or varlen_attention() is None:
        return False
    if not torch.backends.cuda.is_flash_attention_available() or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if model.dtype not in (torch.bfloat16, torch.float16):
        return False
    layers = attention_layers(model)
    if getattr(model.config, "attn_logit_softcapping", None) is not None or hasattr(layers[0], "sinks"):
        return False
    sizes = {head_sizes(layer) for layer in layers}
    return all(keys == values and keys % 8 == 0 and keys <= MAX_HEAD_SIZE for keys, values in sizes)


def release(model: Any) -> None:
    """Free the GPU memory of the graphs and buffers that a model's last `generate` has left for the next one.

    Fused weights are separated again.
    """
    body = _graphed_bodies.pop(unwrapped(model), None)
    if body is not None:
        body.end()


@atexit.register
@before_end
def forget_graphs() -> None:
    """Drop the recorded graphs of every model before process groups are destroyed. NCCL waits until no graph contains
    one of the group's collectives."""
    for body in _graphed_bodies.values():
        body.forget()


def _resolve_execution(model: Any, plain: Any, execution: Execution | None) -> Execution:
    """Resolve the execution. Raises SettingError if the model or its device does not support it."""
    obstacle = _graph_obstacle(model, plain)
    device = next((parameter.device for parameter in plain.parameters()), torch.device("cpu"))
    if execution is None:
        return "graph" if obstacle is None and device.type == "cuda" else "eager"
    if execution != "eager" and obstacle is not None:
        raise SettingError("execution", f"{execution} {obstacle}: use `execution=eager`")
    if execution == "graph" and device.type != "cuda":
        raise SettingError("execution", f"graph needs a CUDA device, the model is on {device}: use eager or compiled")
    return execution


def _graph_obstacle(model: Any, plain: Any) -> str | None:
    """Reason why the model can be neither recorded nor compiled, as the end of a sentence; None if it can."""
    if len(set((getattr(plain, "hf_device_map", None) or {}).values())) > 1:
        return "needs the whole model on one device"
    if tensor_parallel_group(plain) is not None and not getattr(plain, "plain_shards", False):
        return "does not support the layers of transformers' tensor parallelism"
    if not supports_kv_cache(model):
        return "needs a transformers body"
    return None


def _current_device(model: Any) -> AbstractContextManager[Any]:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def _cached_attention(model: Any) -> Iterator[None]:
    """Context manager: install this package's attention function, `attention.attend`."""
    attention.register()
    before = model.config._attn_implementation
    model.config._attn_implementation = attention.NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _graphed_body(model: Any, execution: Execution, *, rows: int, width: int) -> GraphedBody:
    """Graphs of the model's last call, or new ones if these do not fit. Raises SettingError if a continuous batch uses
    them."""
    body = _graphed_bodies.get(model)
    if body is not None and body.held:
        raise SettingError(
            "execution", "a continuous batch uses this model's CUDA graphs: finish it first, or use `execution=eager`"
        )
    if body is None or not body.serves(model, execution, rows, width):
        _graphed_bodies.pop(model, None)
        body = None  # its buffers are freed before the new ones are allocated
        width = (width // 64 + 1) * 64 if width else 0  # with at least one column beyond every canvas
        body = GraphedBody(model, execution == "compiled", rows=batch_size_for(rows), width=width)
        _graphed_bodies[model] = body
    body.begin()
    return body
