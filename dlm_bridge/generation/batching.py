"""Continuous batching: rows enter a running batch and leave it when they end.

    batch = ContinuousBatch(model, {"threshold": 0.9}, max_rows=64, max_length=2048)
    batch.submit(RowRequest("a", prompt_ids, gen_length=256, seed=0))
    while not batch.idle:
        for event in batch.advance():
            ...  # RowTokens, RowCommits, RowEnded, RowFailed
        # submit() and cancel() at any time between two calls of advance(), from the same thread

Each row's tokens are those of `generate` with its prompt alone and `seed=[seed]`, the row's own.

Each row is at a step and a block of its own, so that a waiting one enters before the next step. Only where the KV
cache is filled block by block for all rows (of block-causal models and Nemotron, and "prefix" and "dual" of samplers
with blocks) do they share the blocks' columns: there rows enter at the next block. Rows of another `gen_length` share
the batch, unless it changes more than the steps that are planned.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.api import (
    call_constraints,
    choose_cache,
    denoise_rows,
    input_device,
    sampler_context,
    sampler_spec,
)
from dlm_bridge.generation.batch_rows import (
    Event,
    RowCommits,
    RowEnded,
    RowFailed,
    RowPlan,
    RowReporter,
    RowRequest,
    RowTokens,
    RunningRow,
)
from dlm_bridge.generation.commit_rules import CommitRule
from dlm_bridge.generation.kv_cache import BlockKVCache, KVCache
from dlm_bridge.generation.rolling_canvas import (
    EnteringRow,
    OwnBlocksCanvas,
    RollingCanvas,
    SharedBlocksCanvas,
    cache_columns,
)
from dlm_bridge.generation.rows import StopCondition, check_row, order_behind
from dlm_bridge.generation.runtime.runner import ModelRunner, unwrapped
from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.generation.token_sampling import Noise, drawn_seeds, shared_seed

__all__ = ["ContinuousBatch", "Event", "RowCommits", "RowEnded", "RowFailed", "RowRequest", "RowTokens"]

# Settings of `generate` for whole calls.
REFUSED = ("infill", "span_lengths", "num_return_sequences", "output_history", "generator", "streamer", "commit_rule")


class ContinuousBatch:
    """A batch of a diffusion language model that rows enter and leave while it runs. Not thread-safe.

    Batches of one model take turns, since memory is planned for one of them: while another one waits for its turn, a
    batch lets no rows enter, and `advance` of the one that waits returns nothing. Call `advance` of each in rotation
    until it is `idle`, or `close` it.

    Args:
        model: a diffusion model, as for `generate`.
        settings: keyword arguments of `generate`, without those for whole calls (`infill`, `span_lengths`,
            `num_return_sequences`, `output_history`); with the tokenizer under "tokenizer" where there are
            `stop_strings`. `seed` has no effect: rows have their own.
        max_rows: rows that run at once. Others wait, in the order of their arrival.
        max_length: tokens of a row, prompt and new ones together, for which KV cache is planned; None: the model's
            context.
        stream: report `RowTokens` and `RowCommits` of rows that are live, and return from `advance` after each step;
            False: only rows that have left, and return when some row has completed a block.
        record: report with a row that has left which step committed each of its tokens (`RowEnded.steps`). That needs
            no `stream`, and no more waiting for the device.

    Raises:
        DlmBridgeError: a setting that the sampler cannot run with, or no `max_length` where the model names no
            context.
    """

    def __init__(
        self,
        model: Any,
        settings: Mapping[str, Any] | None = None,
        *,
        max_rows: int,
        max_length: int | None = None,
        stream: bool = True,
        record: bool = False,
    ) -> None:
        self._model = model
        self._settings = dict(settings or {})
        for name in REFUSED:
            value = self._settings.get(name)
            if value not in (None, False, (), []) and (name, value) != ("num_return_sequences", 1):
                raise DlmBridgeError(f"{name} is for whole calls of generate: a continuous batch samples single rows")
        self._settings = {name: value for name, value in self._settings.items() if name not in REFUSED}
        limits = resolve_settings(model, None, self._settings, prompt_width=1).limits
        if limits.infill:
            raise DlmBridgeError("infill is for whole calls of generate: a continuous batch samples single rows")
        length = limits.context if max_length is None else max_length
        if length is None:
            raise DlmBridgeError("the model's config names no context length: pass max_length")
        self.max_length = length
        self.max_rows = max_rows
        self.forwards = 0  # forward passes of the model in all runs that are over
        self._stream = stream
        self._record = record
        self._device = input_device(model)
        self._plans: dict[tuple[int | None, int], RowPlan] = {}
        self._waiting: deque[RunningRow] = deque()
        self._running: dict[Hashable, RunningRow] = {}
        self._events: list[Event] = []
        self._canvas: RollingCanvas | None = None
        self._runner: ModelRunner | None = None
        self._steps: Iterator[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether no row is waiting or running, and no event is left to report."""
        return not (self._waiting or self._running or self._events or self._steps)

    @property
    def rows_running(self) -> int:
        return len(self._running)

    @property
    def rows_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: RowRequest) -> None:
        """Add a row to those that wait.

        Raises DlmBridgeError for a name in use, a wrong `gen_length`, or a prompt that the sampler, the model's
        context or `max_length` does not allow.
        """
        shown = f"request {request.name!r}"
        leaving = set() if self._canvas is None else self._canvas.cancelled
        names = {*self._running, *leaving, *(row.request.name for row in self._waiting)}
        if request.name in names:
            raise DlmBridgeError(f"{shown}: the name is that of a row in the batch")
        plan = self._plan(request.gen_length, len(request.prompt))
        gen_length = plan.settings.limits.gen_length
        check_row(request.prompt, shown, plan.settings.limits)
        if len(request.prompt) + gen_length > self.max_length:
            raise DlmBridgeError(
                f"{shown}: a prompt of {len(request.prompt)} tokens and gen_length {gen_length} make "
                f"{len(request.prompt) + gen_length}, beyond the batch's max_length of {self.max_length}"
            )
        if plan.spec.rule.needs_prompt and not len(request.prompt):
            raise DlmBridgeError(f"{shown} has no tokens, a causal model continues one: begin with bos_token_id")
        mask = plan.settings.limits.masked_token_id
        self._waiting.append(RunningRow(request, plan, gen_length, [mask] * gen_length))

    def cancel(self, name: Hashable) -> bool:
        """Drop a row, of which there are no more events; False: there is none of this name. A running row takes part
        in no further step, and makes room for others where they may enter next."""
        self._events[:] = [event for event in self._events if event.name != name]
        for row in self._waiting:
            if row.request.name == name:
                self._waiting.remove(row)
                return True
        if name not in self._running:
            return False
        del self._running[name]
        assert self._canvas is not None
        self._canvas.cancelled.add(name)
        if not self._running:
            self._end_run()
        return True

    def close(self) -> None:
        """Drop all rows, and let other batches and calls use the model."""
        self._waiting.clear()
        self._running.clear()
        self._events.clear()
        self._end_run()

    def advance(self) -> list[Event]:
        """Run until the next boundary, and return what has happened since the last call: with `stream` after a step,
        else when a row has completed a block. Returns at once where there is nothing to run, or another batch of the
        model runs.

        An error that is not a single row's ends the rows that are running, each with a `RowFailed`; what is no
        DlmBridgeError is raised as well.
        """
        if self._waiting or self._steps is not None:
            if not _take_turn(self._model, self):
                return []
            self._run_until_boundary()
        elif self._runner is None:
            _leave_turn(self._model, self)
        events = list(self._events)
        self._events.clear()
        return events

    @torch.no_grad()
    def _run_until_boundary(self) -> None:
        try:
            if self._steps is None:
                self._begin_run()
            assert self._runner is not None
            assert self._steps is not None
            with self._runner.active():
                ended = next(self._steps, self) is self
            if ended:
                self._end_run()
        except BaseException as error:
            known = isinstance(error, DlmBridgeError)
            failure = error if isinstance(error, DlmBridgeError) else DlmBridgeError(f"the batch failed: {error!r}")
            self._events += [RowFailed(name, failure) for name in self._running]
            self._running.clear()
            self._end_run()
            if not known:
                raise

    def _plan(self, gen_length: int | None, prompt_length: int) -> RowPlan:
        asked = self._settings | ({} if gen_length is None else {"gen_length": gen_length, "max_new_tokens": None})
        by_prompt = gen_length is None or any(asked.get(name) for name in ("min_length", "max_length"))
        cache_key = gen_length, prompt_length if by_prompt else 0
        if cache_key not in self._plans:
            settings = resolve_settings(self._model, None, asked, prompt_width=prompt_length)
            spec = sampler_spec(settings, None)
            constraints = call_constraints(settings, spec, prompt_length)
            key = _signature(spec), 0 if constraints is None else constraints.min_new_tokens
            rule = spec.rule if constraints is None else spec.rule.constrained(constraints)
            self._plans[cache_key] = RowPlan(settings, spec, constraints, rule, key)
        return self._plans[cache_key]

    def _begin_run(self) -> None:
        """Prepare the model for rows like the first one that waits, which are the first to run: where the model cannot
        be prepared, these fail."""
        plan = self._waiting[0].plan
        entering = self._entering(plan.key)
        layout, settings = plan.spec.layout, plan.settings
        cache = choose_cache(plan.spec.predictor, self._model, settings.cache)
        width = cache_columns(layout, self.max_length)
        copies = 2 if plan.spec.predictor_options.get("cfg_scale") else 1
        self._runner = ModelRunner.prepare(
            self._model, settings.execution, cache, rows=copies * self.max_rows, width=width, hold=True
        )
        stop = StopCondition(
            settings.eos_token_ids, self._device, settings.stop_strings, self._settings.get("tokenizer")
        )
        # A cache in the canvas' columns keeps rows in theirs; that of a whole text's block is in each row's own.
        kind = SharedBlocksCanvas if cache.stores and layout.block_length is not None else OwnBlocksCanvas
        self._canvas = kind(layout, settings.limits.masked_token_id, stop, self._device, width)
        reporter = RowReporter(self._running, self._events, stop, stream=self._stream, record=self._record)
        self._steps = self._denoise(plan, entering, cache, self._canvas, self._runner, reporter)

    def _end_run(self) -> None:
        if self._steps is not None:
            self._steps = None
            self._canvas = None
        if self._runner is not None:
            self.forwards += self._runner.forwards
            self._runner.close()
            self._runner = None
        _leave_turn(self._model, self)

    def _denoise(
        self,
        plan: RowPlan,
        entering: list[RunningRow],
        cache: KVCache,
        canvas: RollingCanvas,
        runner: ModelRunner,
        reporter: RowReporter,
    ) -> Iterator[None]:
        """Denoise these rows, and those that enter later, until none is left. Yields at boundaries."""
        noise = Noise([], self._device)
        self._admit(entering, canvas, noise, None)
        context = sampler_context(
            plan.spec,
            plan.settings,
            runner,
            canvas,
            cache,
            noise,
            plan.constraints,
            reporter,
            planner=lambda name: self._running[name].plan.rule,
        )
        predictor = context.predictor

        def enter() -> None:
            if not canvas.admits:
                return
            entering = [] if _others_wait(self._model, self) else self._entering(plan.key)
            shift = self._admit(entering, canvas, noise, _cached_columns(cache))
            if shift:
                predictor.shift_columns(shift)
            if entering:
                predictor.admit(len(entering))

        # A forward pass for the rows that go on is of no use where others may enter.
        for block_ended in denoise_rows(context, plan.rule, enter, lambda: not self._waiting):
            reporter.ended(canvas)
            reporter.poll()
            if self._stream or block_ended:
                yield
        reporter.ended(canvas)  # those that have left with the last cancelled row

    def _entering(self, key: Any) -> list[RunningRow]:
        """The next waiting rows that fit, as far as they may share the batch."""
        rows: list[RunningRow] = []
        while self._waiting and self._waiting[0].plan.key == key and len(self._running) < self.max_rows:
            row = self._waiting.popleft()
            self._running[row.request.name] = row
            rows.append(row)
        return rows

    def _admit(self, rows: list[RunningRow], canvas: RollingCanvas, noise: Noise, cached: int | None) -> int:
        """Let these rows enter. Returns by how many columns the others have moved."""
        seeds = []
        for row in rows:
            seed = row.request.seed
            if seed is None:
                seed = shared_seed(self._model)
            seeds.append(drawn_seeds(1)[0] if seed is None else seed)
        noise.select_rows(order_behind(len(rows), len(canvas.names)))
        noise.admit(seeds)
        return canvas.admit(
            [EnteringRow(row.request.name, row.request.prompt, row.gen_length) for row in rows], cached
        )


def _cached_columns(cache: KVCache) -> int | None:
    return cache.length if isinstance(cache, BlockKVCache) and cache.stores else None


def _signature(part: Any) -> Any:
    """A value that is equal for parts of samplers that do the same. What is not known compares by identity."""
    if isinstance(part, partial):
        return part.func, _signature(part.args), _signature(part.keywords)
    if isinstance(part, torch.Tensor):
        return tuple(part.flatten().tolist())
    if isinstance(part, (list, tuple)):
        return tuple(map(_signature, part))
    if isinstance(part, Mapping):
        return tuple((name, _signature(value)) for name, value in sorted(part.items()))
    if isinstance(part, (type, FunctionType)) or part is None or isinstance(part, (str, int, float)):
        return part
    if is_dataclass(part):
        return type(part), tuple(_signature(getattr(part, one.name)) for one in fields(part))
    planning = part.planning if isinstance(part, CommitRule) else ()
    return type(part), _signature({name: value for name, value in vars(part).items() if name not in planning})


# ---- Turns of the batches of one model, the first one runs.

_turns: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[ContinuousBatch]]] = weakref.WeakKeyDictionary()


def _queue(model: Any) -> list[weakref.ref[ContinuousBatch]]:
    queue = _turns.setdefault(unwrapped(model), [])
    queue[:] = [one for one in queue if one() is not None]
    return queue


def _take_turn(model: Any, batch: ContinuousBatch) -> bool:
    """Whether it is the batch's turn; it joins the queue."""
    queue = _queue(model)
    if all(one() is not batch for one in queue):
        queue.append(weakref.ref(batch))
    return queue[0]() is batch


def _others_wait(model: Any, batch: ContinuousBatch) -> bool:
    return any(one() is not batch for one in _queue(model))


def _leave_turn(model: Any, batch: ContinuousBatch) -> None:
    queue = _queue(model)
    queue[:] = [one for one in queue if one() is not batch]
