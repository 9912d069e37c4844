"""A PEFT adapter that takes part in drafts alone, such as the `linear_spec_lora` of Nemotron-Labs-Diffusion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dlm_bridge.errors import DlmBridgeError


class DraftAdapter:
    """Switches the adapter of this name on and off for a forward; afterwards the model is as it was.

    Other adapters are part of the model: what of them is active takes part in drafts and checks alike. Without a name
    nothing is switched. The layers' own attributes are set, since PEFT's methods also say what is trained.
    """

    def __init__(self, model: Any, name: str | None) -> None:
        """Raises DlmBridgeError for an adapter that the model does not have, or that cannot be switched."""
        self._name = name
        self._layers: list[Any] = []
        if name is None:
            return
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        known = sorted({one for layer in layers for kind in layer.adapter_layer_names for one in getattr(layer, kind)})
        if name not in known:
            have = f"it has {', '.join(known)}" if known else "put one on it with peft.PeftModel.from_pretrained"
            raise DlmBridgeError(f"draft_adapter {name!r} is no adapter of the model: {have}")
        if any(layer.merged for layer in layers):
            raise DlmBridgeError(
                f"draft_adapter {name!r} cannot be switched while adapters are merged into the weights: "
                "call unmerge_adapter() first"
            )
        self._layers = layers

    def variant(self, on: bool) -> str:
        """Says which of the two forwards it is, where they are recorded."""
        return "" if self._name is None else f"{'with' if on else 'without'} {self._name}"

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._active([self._name] if self._name is not None else []):
            yield

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._active([]):
            yield

    @contextmanager
    def _active(self, more: list[str]) -> Iterator[None]:
        before = [(layer._active_adapter, layer._disable_adapters) for layer in self._layers]
        try:
            for layer in self._layers:
                others = [] if layer.disable_adapters else [one for one in layer.active_adapters if one != self._name]
                layer._active_adapter, layer._disable_adapters = others + more, False
            yield
        finally:
            for layer, (active, disabled) in zip(self._layers, before, strict=True):
                layer._active_adapter, layer._disable_adapters = active, disabled
