"""Keys and values of prompts, from earlier requests or computed in chunks beside running rows.

Attention to committed tokens is block-causal or causal, so keys and values of a text's first blocks do not depend on
what follows. They are the same in every row, because positions are counted from a row's first token. `PromptCache`
copies them into the row's own columns when a request enters; the rest of the prompt is run as without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from dlm_bridge.attention.masks import causal_mask
from dlm_bridge.errors import SettingError
from dlm_bridge.generation.canvas import Canvas, to_device
from dlm_bridge.generation.engine import choose_cache, sampler_spec
from dlm_bridge.generation.kv_cache import BlockKVCache, StaticKVCache
from dlm_bridge.generation.predictors import BlockCachePredictor
from dlm_bridge.generation.runtime.runner import CanvasView, supports_kv_cache, unwrapped
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.prefix_cache.pages import PagePool, PageTree

PAGE = 32  # least number of tokens of a page: the copies of smaller ones cost more than they save
MOST_CHUNKED = 2  # prompts that are cached in chunks at a time, each in buffers of one row
# Rows share a forward pass over the rest of their prompts as long as this fraction of its columns is needed.
LEAST_NEEDED = 0.5


@dataclass
class PrefixStatistics:
    """Counts since the start.

    Attributes:
        requests: requests that have entered.
        hits: those of which at least one page was stored.
        prompt_tokens: tokens of their prompts.
        hit_tokens: those that were copied and not computed.
        bytes, capacity: of stored pages, and of the memory.
        evictions: pages that have made room for others.
    """

    requests: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    bytes: int = 0
    capacity: int = 0
    evictions: int = 0


class PromptCache:
    """Prefix cache and chunked prompts of the engines of one model, whose weights must not change.

    Args:
        settings: keyword arguments of `generate` that most requests have, which determine the size of a page.
        prefix_cache: GiB for keys and values in each process; None: nothing is kept.
        prefill_chunk: number of prompt tokens that are run between two steps of running rows; a longer prompt is run
            in several parts. None: a prompt is run at once.

    Raises:
        SettingError: the model or its sampler has no exact cache of blocks, or the memory does not suffice.
    """

    def __init__(
        self,
        model: Any,
        settings: dict[str, Any] | None = None,
        *,
        prefix_cache: float | None = None,
        prefill_chunk: int | None = None,
    ) -> None:
        self.model = unwrapped(model)
        self.prefill_chunk = prefill_chunk
        self.statistics = PrefixStatistics()
        self.tree: PageTree | None = None
        self.pool: PagePool | None = None
        self.chunked: list[ChunkedPrompt] = []
        if prefix_cache is None:
            return
        block = common_block(model, settings or {})
        self.pool = PagePool(self.model, -(-PAGE // block) * block, int(prefix_cache * 2**30))
        self.tree = PageTree(self.pool.slots)
        self.statistics.capacity = self.pool.slots * self.pool.page_bytes

    def attach(self, predictor: Any) -> PromptRun | None:
        """See `engine.Prefill`."""
        shared = isinstance(predictor, BlockCachePredictor) and isinstance(predictor.cache, BlockKVCache)
        if not shared or predictor.cfg_scale or predictor.canvas.infill:
            return None
        run = PromptRun(self, predictor)
        run.begin()
        return run

    def clear(self) -> None:
        """Forget all keys and values, after the weights have changed."""
        self.chunked.clear()
        if self.tree is not None:
            self.tree.clear()
            self.statistics.bytes = 0


def common_block(model: Any, settings: dict[str, Any]) -> int:
    """Block length of the attention to committed tokens (1: causal). Raises SettingError if there is no exact cache of
    blocks in columns that rows share."""
    if not getattr(getattr(model, "family", None), "sampled_here", False):
        raise SettingError("prefix_cache", "needs a diffusion model of a block-causal family")
    found = resolve_settings(model, None, settings | {"seed": None}, prompt_width=1)
    spec = sampler_spec(found, None)
    cache = choose_cache(spec.predictor, model, found.cache)
    name = found.sampler.name
    if not issubclass(spec.predictor, BlockCachePredictor):
        raise SettingError(
            "prefix_cache", f"needs block-causal attention with shared columns, which the sampler {name} does not have"
        )
    if not supports_kv_cache(model) or not isinstance(cache, BlockKVCache):
        raise SettingError("prefix_cache", f"needs a KV cache of committed blocks, not `cache={cache.mode}`")
    if spec.predictor_options.get("cfg_scale"):
        raise SettingError("prefix_cache", "does not support guidance: set `cfg_scale=0`")
    return int(spec.predictor_options.get("block_length", 1))


@dataclass
class ChunkedPrompt:
    """A prompt that is cached in chunks, in buffers of its own.

    Args:
        kind: attention and cache of the run.
        copied: tokens that were copied from the prefix cache.
        done: tokens that are cached so far.
    """

    kind: Any
    tokens: tuple[int, ...]
    buffers: StaticKVCache
    copied: int
    done: int


class PromptRun:
    """Part of a `PromptCache` in one run of an engine; an observer that stores the blocks of its rows."""

    def __init__(self, prompts: PromptCache, predictor: BlockCachePredictor) -> None:
        self._prompts, self._predictor, self._canvas = prompts, predictor, predictor.canvas
        assert isinstance(predictor.cache, BlockKVCache)
        assert predictor.cache.buffers is not None
        self._cache, self._buffers = predictor.cache, predictor.cache.buffers
        self._block = predictor.causal_block
        self._kind = type(self._cache), self._block
        self._stores = prompts.pool is not None and prompts.pool.page % self._block == 0
        # The hidden state of the last cached column may predict the next token.
        self._needs_last = predictor.shift or predictor.commits_first_token
        self._stored: dict[Any, int] = {}  # by row: number of pages that have been stored
        chunk = prompts.prefill_chunk
        self._chunk = None if chunk is None else max(chunk // self._block, 1) * self._block
        predictor.enter = self.enter

    def begin(self) -> None:
        """Copy what is known of the first rows, which enter before the first forward pass."""
        rows, origins, start = self._canvas.rows, self._canvas.origins, self._canvas.blocks[0].start
        begins = self._load(rows, start)
        if begins == origins:
            return
        # The rest of the prompts is run in one pass with the first block or, if that runs many columns for few rows,
        # in passes of its own.
        first = min(*begins, start - self._block)
        if sum(start - begin for begin in begins) < LEAST_NEEDED * len(rows) * (start - first):
            self._cache.write(start)
            last = self._prefill(begins)
            if last is not None:
                self._predictor.write_cache(start, last)
                return
        self._cache.write(first if first > min(origins) else 0)

    def enter(self, count: int) -> torch.Tensor:
        """See `BlockCachePredictor.enter`."""
        begins = self._load(range(count), self._cache.length)
        if begins == self._canvas.origins[:count]:
            return self._predictor.prefill(range(count))
        last = self._prefill(begins)
        return self._predictor.prefill(range(count), self._cache.length) if last is None else last

    def _prefill(self, begins: Sequence[int]) -> torch.Tensor | None:
        """[A, 1, H], hidden state of the last cached column of the first rows, by forward passes over their columns
        from `begins` on; None if all these columns are cached."""
        end, groups = self._cache.length, [[0]]
        for row in range(1, len(begins)):
            group = [end - begins[one] for one in (*groups[-1], row)]
            if (max(group) > 0) == (min(group) > 0) and sum(group) >= LEAST_NEEDED * len(group) * max(group):
                groups[-1].append(row)
            else:
                groups.append([row])
        parts = []
        for rows in groups:
            begin = min(begins[row] for row in rows)
            parts.append(None if begin >= end else self._predictor.prefill(range(rows[0], rows[-1] + 1), begin))
        run = [part for part in parts if part is not None]
        if not run:
            return None
        empty = run[0].new_zeros(1, *run[0].shape[1:])  # of rows whose hidden state nothing needs
        sized = zip(groups, parts, strict=True)
        return torch.cat([empty.expand(len(rows), -1, -1) if part is None else part for rows, part in sized])

    # ---- Pages.

    def _load(self, rows: Sequence[int], end: int) -> list[int]:
        """Copy known keys and values of these rows' prompts to their columns before `end`. Returns the column of each
        row from which on it must be run."""
        origins, starts, statistics = self._canvas.origins, self._canvas.starts, self._prompts.statistics
        texts = self._canvas.take(list(rows), slice(0, max(starts[row] for row in rows))).tolist()
        begins, chunked = [], []
        most = end - self._block if self._needs_last else end
        for row, text in zip(rows, texts, strict=True):
            origin, prompt = origins[row], tuple(text[origins[row] : starts[row]])
            self._stored.pop(self._canvas.names[row], None)
            found = self._chunked(prompt)
            room = max(most - origin, 0)
            if found is not None:
                known, copied = found.done, min(found.copied, room)
                chunked.append(found)
                for own, theirs in zip(self._buffers.tensors(), found.buffers.tensors(), strict=True):
                    own[row].narrow(1, origin, known).copy_(theirs[0].narrow(1, 0, known))
            else:
                known = self._copy_pages(prompt[:room], self._buffers, row, origin)
                copied = known
            begins.append(origin + min(known, room))
            statistics.requests += 1
            statistics.prompt_tokens += len(prompt)
            statistics.hits += copied > 0
            statistics.hit_tokens += copied
        self._prompts.chunked[:] = [one for one in self._prompts.chunked if one not in chunked]
        return begins

    def _copy_pages(self, tokens: Sequence[int], buffers: StaticKVCache, row: int, first: int) -> int:
        """Copy the stored pages at the beginning of a text to a row's columns from `first` on. Returns their number of
        tokens."""
        slots = self._find(tokens)
        if not slots:
            return 0
        assert self._prompts.pool is not None
        self._prompts.pool.read(slots, buffers, row, first)
        return len(slots) * self._prompts.pool.page

    def _find(self, tokens: Sequence[int]) -> list[int]:
        """Slots of the stored pages at the beginning of a text."""
        if not self._stores:
            return []
        assert self._prompts.tree is not None
        return self._prompts.tree.find(self._kind, self._keys(tokens))

    def _keys(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """Tokens of the pages of a text. The last ones may not fill a page."""
        assert self._prompts.pool is not None
        page = self._prompts.pool.page
        return [tuple(tokens[first : first + page]) for first in range(0, len(tokens) - page + 1, page)]

    def step(self, canvas: Canvas, *_: Any, **__: Any) -> None:
        """See `StepObserver`."""

    def block(self, canvas: Canvas, rows: list[int]) -> None:
        """Store the pages of which all blocks are committed and cached."""
        pool, tree, end = self._prompts.pool, self._prompts.tree, self._cache.length
        if not self._stores or pool is None or tree is None:
            return
        origins, names, stored = canvas.origins, canvas.names, self._stored
        self._stored = {name: stored.get(name, 0) for name in names}
        counts = {row: (end - origins[row]) // pool.page for row in rows if names[row] not in canvas.failed}
        counts = {row: count for row, count in counts.items() if count > self._stored[names[row]]}
        if not counts:
            return
        for (row, count), text in zip(counts.items(), canvas.take([*counts], slice(0, end)).tolist(), strict=True):
            self._stored[names[row]] = count
            first, slots = tree.add(self._kind, self._keys(text[origins[row] :]))
            if slots:
                pool.write(slots, self._buffers, row, origins[row] + first * pool.page)
        statistics = self._prompts.statistics
        statistics.bytes, statistics.evictions = len(tree) * pool.page_bytes, tree.evictions

    # ---- Prompts that are cached in chunks, while their requests wait.

    def ready(self, prompt: Sequence[int]) -> bool:
        """See `engine.PrefillRun`."""
        if self._chunk is None or len(prompt) <= self._chunk:
            return True
        tokens = tuple(prompt)
        return len(tokens) - self._known(tokens) <= self._chunk

    def advance(self, prompts: Iterable[Sequence[int]]) -> None:
        """See `engine.PrefillRun`."""
        chunk, chunked = self._chunk, self._prompts.chunked
        if chunk is None:
            return
        waiting = [tuple(one) for one in islice((one for one in prompts if len(one) > chunk), MOST_CHUNKED)]
        chunked[:] = [one for one in chunked if one.tokens in waiting]  # without those of cancelled requests
        left = chunk
        for prompt in waiting:
            rest = (len(prompt) - self._known(prompt)) // self._block * self._block
            count = min(rest, left)
            if len(prompt) - self._known(prompt) > chunk and count:
                self._run_chunk(self._chunked(prompt) or self._begin_chunked(prompt), count)
                left -= count

    def _known(self, prompt: tuple[int, ...]) -> int:
        """Number of tokens at the beginning of a prompt that need not be run."""
        found = self._chunked(prompt)
        if found is not None:
            return found.done
        return len(self._find(prompt)) * (0 if self._prompts.pool is None else self._prompts.pool.page)

    def _chunked(self, prompt: tuple[int, ...]) -> ChunkedPrompt | None:
        kind, width = self._kind, self._buffers.width
        same = (one for one in self._prompts.chunked if one.tokens == prompt and one.kind == kind)
        return next((one for one in same if one.buffers.width == width), None)

    def _begin_chunked(self, prompt: tuple[int, ...]) -> ChunkedPrompt:
        buffers = StaticKVCache.allocate(self._prompts.model, 1, self._buffers.width)
        copied = self._copy_pages(prompt, buffers, 0, 0)
        found = ChunkedPrompt(self._kind, prompt, buffers, copied, copied)
        self._prompts.chunked.append(found)
        return found

    def _run_chunk(self, prompt: ChunkedPrompt, count: int) -> None:
        begin, end = prompt.done, prompt.done + count
        device, mask, block = self._canvas.tokens.device, None, None
        if self._block == 1:
            mask = causal_mask(torch.ones(1, end, dtype=torch.bool, device=device))[:, :, begin:]
        elif count > self._block:
            block = self._block
        tokens = to_device(prompt.tokens[begin:end], device)[None]
        self._predictor.run_once(CanvasView(tokens, mask, None, begin, end, block=block, buffers=prompt.buffers))
        prompt.done = end
