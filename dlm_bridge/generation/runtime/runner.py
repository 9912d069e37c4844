"""Model runner: the model's own forward pass, or its body with a KV cache, in CUDA graphs where asked for."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.kv_cache import StaticKVCache, is_attention
from dlm_bridge.generation.runtime import attention
from dlm_bridge.generation.runtime.graphs import BodyInputs, GraphedBody, batch_size_for, run_body

Execution = Literal["eager", "graph", "compiled"]
EXECUTIONS: tuple[Execution, ...] = ("eager", "graph", "compiled")

# One model's graphs, kept for the next call; they hold its buffers. See `release`.
_graphed_bodies: weakref.WeakKeyDictionary[nn.Module, GraphedBody] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class CanvasView:
    """The model's input for A rows: the canvas' columns `first` to `first + Q`."""

    tokens: torch.Tensor  # [A, Q]
    attention_mask: torch.Tensor | None  # [A, K] what is real, or [A, 1, Q, K]; True or 1: may be looked at
    position_ids: torch.Tensor | None  # [A, Q]; None: the columns themselves
    first: int = 0
    end: int | None = None  # K, the columns that are looked at where keys and values are kept
    columns: torch.Tensor | None = None  # [A, Q], where each row's keys and values are kept; None: from `first` on
    # Of the view's columns each sees its own block of so many and those before it; None: all of them. What is kept
    # before the view is seen as the mask says.
    block: int | None = None
    variant: str = ""  # what else a forward depends on, such as an adapter that is on: it is recorded for each


class ModelRunner:
    """What the predictors know of a model. Without `keeps` and with eager execution it is the model's own forward."""

    def __init__(self, model: Any, body: GraphedBody | None, kept: StaticKVCache | None) -> None:
        self.forwards = 0
        self._model = model
        self._body = body
        self._kept = kept

    @classmethod
    @contextmanager
    def open(
        cls, model: Any, execution: Execution | None, *, keeps: bool, rows: int, width: int
    ) -> Iterator[ModelRunner]:
        """A runner for one call of `generate`, on canvases of up to so many rows and columns.

        Args:
            execution: "eager"; "graph": forwards are recorded as CUDA graphs when their shape comes a second time;
                "compiled": moreover, or on a CPU instead, `torch.compile` fuses each decoder layer. None: "graph" on
                a CUDA device, else "eager".
            keeps: whether keys and values are kept between forwards.

        Raises:
            DlmBridgeError: an execution that this model or device cannot do.
        """
        plain = unwrapped(model)
        obstacle = _obstacle(model, plain)
        device = next((parameter.device for parameter in plain.parameters()), torch.device("cpu"))
        if execution is None:
            execution = "graph" if obstacle is None and device.type == "cuda" else "eager"
        elif execution != "eager" and obstacle is not None:
            raise DlmBridgeError(f"execution '{execution}' {obstacle}: use execution 'eager'")
        elif execution == "graph" and device.type != "cuda":
            raise DlmBridgeError(
                f"execution 'graph' records CUDA graphs, the model is on {device}: use 'eager' or 'compiled'"
            )
        if execution == "eager" and not keeps:
            yield cls(model, None, None)
            return
        if not supports_kv_cache(model):
            raise DlmBridgeError(
                f"{type(model).__name__} runs more than the attention layers of a transformers body (a prompt-"
                "learning adapter, or a model of its own): use cache 'none'"
            )
        with _cached_attention(plain):
            if execution == "eager":
                kept = StaticKVCache(plain, rows, width)
                try:
                    yield cls(plain, None, kept)
                finally:
                    kept.detach()
                return
            body = _graphed(plain, execution, rows=rows, width=width if keeps else 0)
            with body.prepared():
                yield cls(plain, body, body.kept)

    @property
    def model(self) -> Any:
        """What is run."""
        return self._model

    @property
    def plain(self) -> bool:
        """Whether forwards are the model's own, with masks that transformers makes."""
        return self._body is None and self._kept is None

    def logits(self, view: CanvasView, keep: slice) -> torch.Tensor:
        """[A, N, V] of the canvas' columns `keep`, all of them in the view, in the model's dtype."""
        if not self.plain:
            return self.head(self.hidden(view), slice(keep.start - view.first, keep.stop - view.first))
        return self._own_forward(view, keep)

    def reordered_logits(self, view: CanvasView, indices: torch.Tensor) -> torch.Tensor:
        """[A, N, V] at [A, N] places of the view's own order."""
        if self.plain:
            return self._own_forward(view, indices)
        return self.head_at(self.hidden(view), indices)

    def hidden(self, view: CanvasView, *, once: bool = False) -> torch.Tensor:
        """[A, Q, H], the body's last hidden states; keys and values are kept, where they are. `once`: the shape will
        not come again, so that nothing is recorded. The next forward may overwrite the result."""
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
        if columns is None and self._kept is not None:
            columns = torch.arange(view.first, view.first + view.tokens.shape[1], device=view.tokens.device)
        inputs = BodyInputs(view.tokens, mask, positions_AQ, columns, view.end, block=view.block, variant=view.variant)
        if self._body is not None:
            return self._body(inputs, record=not once)
        # A device map may put the last layer elsewhere than the canvas.
        return run_body(self._model, self._kept, inputs).to(view.tokens.device)

    def head(self, hidden_AQH: torch.Tensor, keep: slice) -> torch.Tensor:
        """[A, N, V] logits of these hidden states."""
        logits: torch.Tensor = self._model.lm_head(hidden_AQH[:, keep])
        return logits.to(hidden_AQH.device)

    def head_at(self, hidden_AQH: torch.Tensor, places_AN: torch.Tensor) -> torch.Tensor:
        """[A, N, V] logits of each row's own places among these hidden states."""
        indices = places_AN[..., None].expand(-1, -1, hidden_AQH.shape[-1])
        return self.head(hidden_AQH.gather(1, indices), slice(None))

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows of the current batch only."""
        if self._kept is not None:
            self._kept.keep(rows)

    def _own_forward(self, view: CanvasView, keep: slice | torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        mask = view.attention_mask
        output = self._model(
            input_ids=view.tokens,
            attention_mask=mask.long() if mask is not None and mask.dim() == 2 else mask,
            position_ids=view.position_ids,
            logits_to_keep=keep,
        )
        return output.logits.to(view.tokens.device)


def unwrapped(model: Any) -> Any:
    """The diffusion model itself, out of PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def supports_kv_cache(model: Any) -> bool:
    """Whether keys and values can be kept: in a transformers body that no prompt-learning adapter adds its own to."""
    plain = unwrapped(model)
    if plain is not model and getattr(model.active_peft_config, "is_prompt_learning", False):
        return False
    return any(map(is_attention, plain.modules()))


def release(model: Any) -> None:
    """Give back the GPU memory of the graphs and buffers that a model's last `generate` keeps for the next one.

    Weights that it laid in a row, to multiply with several at once, get memory of their own again.
    """
    body = _graphed_bodies.pop(unwrapped(model), None)
    if body is not None:
        body.end()


def _obstacle(model: Any, plain: Any) -> str | None:
    if len(set((getattr(plain, "hf_device_map", None) or {}).values())) > 1:
        return "needs the whole model on one device"
    if getattr(plain, "_tp_size", None):
        return "does not run tensor-parallel models"
    if not supports_kv_cache(model):
        return "runs a transformers body without prompt-learning adapters"
    return None


@contextmanager
def _cached_attention(model: Any) -> Iterator[None]:
    attention.register()
    before = model.config._attn_implementation
    model.config._attn_implementation = attention.NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _graphed(model: Any, execution: Execution, *, rows: int, width: int) -> GraphedBody:
    body = _graphed_bodies.get(model)
    if body is None or not body.serves(model, execution, rows, width):
        _graphed_bodies.pop(model, None)
        body = None  # its buffers are freed before the new ones are made
        body = GraphedBody(model, execution == "compiled", rows=batch_size_for(rows), width=-(-width // 64) * 64)
        _graphed_bodies[model] = body
    body.begin(model)
    return body
