"""What rules and predictors keep of each row of a canvas from one step of its block to the next."""

from __future__ import annotations

from typing import Any

import torch


class RowMemory:
    """Values of each of B rows by name. A row that begins a block has zeros, in lists None.

    They follow their rows where others enter or leave the canvas.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        self._values: dict[str, list[Any]] = {}

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        """[B, *shape], to read and to write to. Of another shape than before it is padded with zeros, or is a part."""
        stored = self._tensors.get(name)
        if stored is None:
            stored = torch.zeros(self._rows, *shape, dtype=dtype, device=self._device)
        added = [max(0, size - old) for size, old in zip(shape, stored.shape[1:], strict=True)]
        if any(added):
            stored = torch.nn.functional.pad(stored, [side for size in reversed(added) for side in (0, size)])
        self._tensors[name] = stored
        for axis, size in enumerate(shape, 1):
            stored = stored.narrow(axis, 0, size)
        return stored

    def values(self, name: str) -> list[Any]:
        """B values on the host, to read and to write to."""
        return self._values.setdefault(name, [None] * self._rows)

    def forget(self, rows: list[int]) -> None:
        """These rows have completed their block."""
        if len(rows) == self._rows:
            self._tensors.clear()
            self._values.clear()
        for stored in self._tensors.values():
            stored[rows] = 0
        for values in self._values.values():
            for row in rows:
                values[row] = None

    def select_rows(self, rows: list[int]) -> None:
        """Keep these rows only."""
        self._rows = len(rows)
        self._tensors = {name: stored[rows] for name, stored in self._tensors.items()}
        self._values = {name: [values[row] for row in rows] for name, values in self._values.items()}

    def admit(self, count: int) -> None:
        """So many rows enter, in front of the others."""
        self.select_rows(order_behind(count, self._rows))
        self._rows += count
        for name, stored in self._tensors.items():
            self._tensors[name] = torch.cat([stored.new_zeros(count, *stored.shape[1:]), stored])
        self._values = {name: [None] * count + values for name, values in self._values.items()}


def order_behind(count: int, others: int) -> list[int]:
    """The order of the other rows when so many enter in front of them: the first make room behind the rest, so that
    few have to move in a KV cache."""
    return [*range(count, others), *range(min(count, others))]


def order_without(rows: set[int], total: int) -> list[int]:
    """The order of the rows of `total` that stay when these leave: the last take their places."""
    left = total - len(rows)
    last = (row for row in range(left, total) if row not in rows)
    return [next(last) if row in rows else row for row in range(left)]
