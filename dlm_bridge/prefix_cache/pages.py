"""Pages of keys and values, by the tokens of a text up to each page's end."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from dlm_bridge.errors import SettingError
from dlm_bridge.generation.batch_size import free_memory
from dlm_bridge.generation.canvas import to_device
from dlm_bridge.generation.kv_cache import StaticKVCache

Key = tuple[int, ...]  # tokens of a page
ROOT = 0


class PageTree:
    """Which pages are stored, as a tree: a page's keys and values depend on all tokens before it.

    The least recently used page is evicted first. A page counts as used whenever a page behind it is, so pages are
    evicted from the ends of texts.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(reversed(range(slots)))
        self._pages: OrderedDict[tuple[Hashable, Key], tuple[int, int]] = (
            OrderedDict()
        )  # id and slot, the oldest first
        self._ids = itertools.count(ROOT + 1)
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, kind: Hashable, keys: Sequence[Key]) -> list[int]:
        """Slots of the longest stored beginning of a text. `kind`: pages of different kinds are never equal."""
        path = self._path(kind, keys)
        self._use(path)
        return [self._pages[place][1] for place in path]

    def add(self, kind: Hashable, keys: Sequence[Key]) -> tuple[int, list[int]]:
        """Make room for the pages of a text that are not stored. Returns the number of stored pages at its beginning,
        and the slots of the pages after them: fewer than the text has if all slots are occupied by the text itself."""
        path = self._path(kind, keys)
        self._use(path)
        stored, slots, kept = len(path), list[int](), {*path}
        for key in keys[stored:]:
            place = (self._pages[path[-1]][0] if path else (kind, ROOT), key)
            slot = self._slot(kept)
            if slot is None:
                break
            self._pages[place] = next(self._ids), slot
            path.append(place)
            kept.add(place)
            slots.append(slot)
        self._use(path)
        return stored, slots

    def clear(self) -> None:
        """Drop all pages."""
        self._free += [slot for _, slot in self._pages.values()]
        self._pages.clear()

    def _path(self, kind: Hashable, keys: Sequence[Key]) -> list[tuple[Hashable, Key]]:
        path: list[tuple[Hashable, Key]] = []
        for key in keys:
            place = (self._pages[path[-1]][0] if path else (kind, ROOT), key)
            if place not in self._pages:
                break
            path.append(place)
        return path

    def _use(self, path: Sequence[tuple[Hashable, Key]]) -> None:
        for place in reversed(path):  # the first page of a text becomes the newest
            self._pages.move_to_end(place)

    def _slot(self, kept: set[tuple[Hashable, Key]]) -> int | None:
        """A free slot, if necessary by evicting the oldest page; None if that page is one of `kept`."""
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._pages))
        if oldest in kept:
            return None
        self.evictions += 1
        return self._pages.pop(oldest)[1]


class PagePool:
    """Memory of a fixed number of pages, on the devices of the layers.

    Args:
        page: tokens per page.
        size: bytes in this process.

    Raises:
        SettingError: the size is below a page's, or above the free memory.
    """

    def __init__(self, model: Any, page: int, size: int) -> None:
        # Of one row and column, for the sizes.
        buffers = StaticKVCache.allocate(model, 1, 1).tensors()
        self.page = page
        self.page_bytes = page * sum(one.nbytes for one in buffers)
        self.slots = size // self.page_bytes
        if not self.slots:
            raise SettingError(
                "prefix_cache",
                f"{size / 2**30:.3g} GiB is too small: {page} tokens take {self.page_bytes / 2**30:.3g} GiB",
            )
        for device in {one.device for one in buffers}:
            needed = self.slots * page * sum(one.nbytes for one in buffers if one.device == device)
            free = free_memory(device)
            if needed > free:
                raise SettingError(
                    "prefix_cache",
                    f"{size / 2**30:.3g} GiB is more than the free memory: {needed / 2**30:.3g} GiB would be on "
                    f"{device}, where {free / 2**30:.3g} GiB is free beside the model",
                )
        self._pages = [
            torch.zeros(self.slots, one.shape[1], page, one.shape[3], dtype=one.dtype, device=one.device)
            for one in buffers
        ]

    def write(self, slots: Sequence[int], buffers: StaticKVCache, row: int, first: int) -> None:
        """Copy consecutive pages of a row, which begin in column `first`, to these slots."""
        indices = self._indices(slots)
        for pages, buffer in zip(self._pages, buffers.tensors(), strict=True):
            columns = buffer[row].narrow(1, first, len(slots) * self.page)
            pages[indices[pages.device]] = columns.unflatten(1, (len(slots), self.page)).transpose(0, 1)

    def read(self, slots: Sequence[int], buffers: StaticKVCache, row: int, first: int) -> None:
        """Copy the pages of these slots to consecutive columns of a row, from column `first` on."""
        indices = self._indices(slots)
        for pages, buffer in zip(self._pages, buffers.tensors(), strict=True):
            columns = pages[indices[pages.device]].transpose(0, 1).flatten(1, 2)
            buffer[row].narrow(1, first, len(slots) * self.page).copy_(columns)

    def _indices(self, slots: Sequence[int]) -> dict[torch.device, torch.Tensor]:
        return {device: to_device(slots, device) for device in {pages.device for pages in self._pages}}
