"""Writing Hub tensors into a live PreTrainedModel in place, also where a parameter holds several of them merged."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")


class HubWriter:
    """A live model's parameters as targets under their Hub names.

    transformers merges some Hub tensors into one parameter (experts), and only its own conversion knows how. Run
    backwards on a parameter it gives the Hub tensors, as views or as copies; run backwards on the numbers of the
    parameter's elements it says where each element of a copy came from. Memory is bounded by a layer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._groups: dict[str, dict[str, torch.Tensor]] = {}  # by layer: what the model names its tensors
        for name, tensor in [*model.named_parameters(), *_stored_buffers(model)]:  # a tied weight comes once
            match = _LAYER.search(name)
            self._groups.setdefault(name[: match.end()] if match else "", {})[name] = tensor.data
        self._group_of: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # of every Hub tensor
        for group, tensors in self._groups.items():
            for name, tensor in tensors.items():
                for hub_name, part in self._to_hub(name, torch.empty_like(tensor, device="meta")).items():
                    self._group_of[hub_name], self.shapes[hub_name] = group, tuple(part.shape)
        self._open: str | None = None
        self._views: dict[str, torch.Tensor] = {}
        self._places: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # a tensor, and which of its elements

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a Hub tensor into the model, in the model's dtype. Fastest where a layer's tensors come together."""
        if self._group_of[name] != self._open:
            self._load(self._group_of[name])
        if name in self._views:
            self._views[name].copy_(tensor)
        else:
            merged, elements = self._places[name]
            merged.view(-1)[elements] = tensor.to(merged).view(-1)

    def _to_hub(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, {name: tensor}))

    def _load(self, group: str) -> None:
        self._open, self._views, self._places = group, {}, {}
        for name, tensor in self._groups[group].items():
            parts = self._to_hub(name, tensor)
            if all(
                part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts.values()
            ):
                self._views |= parts
                continue
            numbers = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
            for hub_name, elements in self._to_hub(name, numbers).items():
                self._places[hub_name] = (tensor, elements.reshape(-1))


def _stored_buffers(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Buffers that checkpoints hold, such as a router's bias."""
    stored = model.state_dict().keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
