"""What DiffusionGemma's encoder has read of rows of different lengths: keys and values, masks and positions.

It stands in for transformers' cache: the encoder adds to it, and the decoder reads it. A sliding layer keeps as many
tokens of a row as transformers' DynamicCache does, one less than its window; the decoder attends to all that is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values


@dataclass
class EncodedRow:
    """What is kept of one row."""

    length: int = 0  # tokens that the encoder has read
    kept: list[Pair] = field(default_factory=list)  # [H, K, D] by layer, of the last K of them


def cache_of(tower: Any, cache: Any) -> dict[str, Any]:
    """A cache as the keyword of a tower of transformers', or of the whole model: `cache` from 5.24 on."""
    name = "cache" if "cache" in inspect.signature(tower.forward).parameters else "past_key_values"
    return {name: cache}


@dataclass
class _Layer:
    """Keys and values of some rows, [A, H, K, D], padded on the right; the names are those of transformers' layers."""

    keys: torch.Tensor
    values: torch.Tensor


class EncodedRows:
    """The rows that the encoder or the decoder runs on, as their cache."""

    is_compileable = False  # transformers' decoder puts the canvas's keys behind those of a layer

    def __init__(self, model: Any) -> None:
        self._encoder = model.model.encoder
        self._config = model.config.text_config
        embedding = model.model.decoder.embed_tokens.weight
        self._device, self.dtype = embedding.device, embedding.dtype
        self._additive = model.model.decoder.config._attn_implementation == "eager"
        self.layers: list[_Layer] = []
        self.masks: dict[str, torch.Tensor | None] = {}  # by the type of a layer
        self.positions = torch.empty(0)  # [A, Q], of the canvases

    @torch.no_grad()
    def read(self, rows: Sequence[EncodedRow], tokens: Sequence[list[int]]) -> None:
        """One encoder pass over new tokens of the rows, of any number each."""
        width = max(map(len, tokens))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=self._device)
        lengths = torch.tensor([row.length for row in rows], device=self._device)
        counts = [self._kept(row.length) for row in rows]
        self._lay_out(rows)
        masks = {kind: self._causal(width, [count[kind] for count in counts], kind) for kind in self._kinds}
        positions = lengths[:, None] + torch.arange(width, device=self._device)
        self._encoder(input_ids=ids, attention_mask=masks, position_ids=positions, **cache_of(self._encoder, self))
        for place, (row, new) in enumerate(zip(rows, tokens, strict=True)):
            row.length += len(new)
            row.kept = [
                self._of_row(layer, place, counts[place][kind], layer.keys.shape[2] - width, row, len(new), kind)
                for layer, kind in zip(self.layers, self._config.layer_types, strict=True)
            ]

    def show(self, rows: Sequence[EncodedRow], length: int) -> None:
        """Let the decoder run on canvases of so many tokens behind these rows."""
        self._lay_out(rows)
        for place, row in enumerate(rows):  # views, so that nothing is held twice
            row.kept = [
                (layer.keys[place, :, : keys.shape[1]], layer.values[place, :, : keys.shape[1]])
                for layer, (keys, _) in zip(self.layers, row.kept, strict=True)
            ]
        self.masks = {
            kind: self._behind([self._kept(row.length)[kind] for row in rows], length) for kind in self._kinds
        }
        lengths = torch.tensor([row.length for row in rows], device=self._device)
        self.positions = lengths[:, None] + torch.arange(length, device=self._device)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any) -> Pair:
        """The encoder's new keys and values behind those of a layer, as transformers' caches do it."""
        if layer == len(self.layers):  # of rows that have none
            self.layers.append(_Layer(keys, values))
        else:
            held = self.layers[layer]
            self.layers[layer] = _Layer(torch.cat([held.keys, keys], dim=2), torch.cat([held.values, values], dim=2))
        return self.layers[layer].keys, self.layers[layer].values

    @property
    def _kinds(self) -> set[str]:
        return set(self._config.layer_types)

    def _window(self, kind: str) -> int | None:
        return self._config.sliding_window if kind == "sliding_attention" else None

    def _kept(self, length: int) -> dict[str, int]:
        """How many of so many tokens the layers of a type keep."""
        windows = {kind: self._window(kind) for kind in self._kinds}
        return {kind: length if window is None else min(length, window - 1) for kind, window in windows.items()}

    def _lay_out(self, rows: Sequence[EncodedRow]) -> None:
        """Set `layers` to what is kept of the rows, padded; to none where there is nothing yet."""
        self.layers = []
        first = next((row for row in rows if row.kept), None)
        for number in range(0 if first is None else len(first.kept)):
            assert first is not None
            laid = []
            for part in (0, 1):
                kept = [row.kept[number][part] if row.kept else None for row in rows]
                like = first.kept[number][part]
                width = max(one.shape[1] for one in kept if one is not None)
                whole = like.new_zeros(len(rows), like.shape[0], width, like.shape[2])
                for place, one in enumerate(kept):
                    if one is not None:
                        whole[place, :, : one.shape[1]] = one
                laid.append(whole)
            self.layers.append(_Layer(*laid))

    def _of_row(self, layer: _Layer, place: int, held: int, width: int, row: EncodedRow, new: int, kind: str) -> Pair:
        """What a layer keeps of a row: `held` columns and, behind the `width` that all rows have, `new` ones."""
        last = self._kept(row.length)[kind]

        def kept(whole: torch.Tensor) -> torch.Tensor:
            own = torch.cat([whole[place, :, :held], whole[place, :, width : width + new]], dim=1)
            return own[:, own.shape[1] - last :]

        return kept(layer.keys), kept(layer.values)

    def _causal(self, width: int, held: list[int], kind: str) -> torch.Tensor:
        """[G, 1, N, K + N]: which of the columns that are held, and of the new ones, each new token attends to."""
        window, past = self._window(kind), max(held)
        held_G11 = torch.tensor(held, device=self._device)[:, None, None]
        query_N1 = torch.arange(width, device=self._device)[:, None]
        column_K = torch.arange(past, device=self._device)
        before_GNK = (column_K < held_G11).expand(-1, width, -1)
        behind_NN = query_N1 - query_N1.t()
        new_NN = behind_NN >= 0
        if window is not None:
            before_GNK = before_GNK & (query_N1 + held_G11 - column_K < window)
            new_NN = new_NN & (behind_NN < window)
        return self._mask(torch.cat([before_GNK, new_NN.expand(len(held), -1, -1)], dim=-1))

    def _behind(self, held: list[int], length: int) -> torch.Tensor | None:
        """[A, 1, Q, K + Q]: a canvas attends to all that is held of its row and to itself; None where that is all."""
        if min(held) == max(held):
            return None
        held_A1 = torch.tensor(held, device=self._device)[:, None]
        columns = torch.arange(max(held) + length, device=self._device)
        shown_AK = (columns < held_A1) | (columns >= max(held))
        return self._mask(shown_AK[:, None].expand(-1, length, -1))

    def _mask(self, shown: torch.Tensor) -> torch.Tensor:
        if not self._additive:
            return shown[:, None]
        hidden = torch.zeros(shown.shape, dtype=self.dtype, device=self._device)
        return hidden.masked_fill(~shown, torch.finfo(self.dtype).min)[:, None]
