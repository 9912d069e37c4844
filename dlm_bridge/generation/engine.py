"""Sampling engine with continuous batching: requests enter a running batch, and leave it when they are finished.

    engine = SamplingEngine(model, {"threshold": 0.9}, max_rows=64, max_length=2048)
    engine.submit(Request("a", prompt_ids, gen_length=256, seed=0))
    while not engine.idle:
        for event in engine.step():
            ...  # Committed, Extended, Ended, Failed

`generate`, files of prompts, evaluations, rollouts and the server all sample from diffusion models with this engine. A
sampler is a combination of independent parts: the block layout (`canvas`), the attention pattern (`predictors`), the
proposal of tokens (`token_sampling`) and the rule that commits them (`commit_rules`).

A request's tokens do not depend on the other requests or on the time at which it enters. Each row has its own step and
its own block, so a waiting request enters before the next step. With a KV cache that is filled block by block for all
rows (block-causal models and Nemotron; "prefix" and "dual" of samplers with blocks), rows share the columns of the
blocks; there, requests enter at the next block. Requests with different `gen_length` share a batch, unless the length
affects more than the number of steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import islice, takewhile
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from dlm_bridge.errors import DlmBridgeError, RowError, SettingError
from dlm_bridge.generation.callbacks import StepObserver
from dlm_bridge.generation.canvas import Canvas, Entry, cache_columns, order_behind
from dlm_bridge.generation.commit_rules import CheckedRule, CommitRule, DenoisingRule, SamplerContext
from dlm_bridge.generation.constraints import Constraints, read_constraints
from dlm_bridge.generation.kv_cache import BlockKVCache, KVCache
from dlm_bridge.generation.options import CacheMode
from dlm_bridge.generation.predictors import Predictor
from dlm_bridge.generation.prompts import check_row
from dlm_bridge.generation.reporting import EventReporter, RunningRequest
from dlm_bridge.generation.request import Event, Failed, Request, TextConstraint
from dlm_bridge.generation.runtime.runner import ModelRunner, supports_kv_cache, unwrapped
from dlm_bridge.generation.samplers import SamplerSpec, SpecialTokens
from dlm_bridge.generation.settings import GenerationSettings, resolve_settings
from dlm_bridge.generation.stopping import StopCondition
from dlm_bridge.generation.token_sampling import Noise, drawn_seeds, shared_seed


class Prefill(Protocol):
    """Interface of an extension that caches prompts."""

    def attach(self, predictor: Any) -> PrefillRun | None:
        """Take part in a run whose first rows are on the canvas. None: the predictor's rows have no common cache."""


class PrefillRun(StepObserver, Protocol):
    """A run of the engine."""

    def ready(self, prompt: Sequence[int]) -> bool:
        """True if a request with this prompt may enter beside running rows."""

    def advance(self, prompts: Iterable[Sequence[int]]) -> None:
        """Cache a part of the first prompts that wait. Called after each step, if any request waits."""


# Settings that apply to a whole call of `generate`.
REFUSED = ("span_lengths", "num_return_sequences", "output_history", "generator", "streamer", "commit_rule")


class SamplingEngine:
    """Sampling engine for diffusion language models. Not thread-safe.

    Several engines of one model take turns, because memory is planned for a single engine. While another engine waits
    for its turn, the running engine admits no requests, and `step` of the waiting engine returns an empty list. Call
    `step` of each engine in rotation until it is `idle`, or `close` it.

    Args:
        model: a diffusion model, as for `generate`.
        settings: keyword arguments of `generate`, except those for whole calls (`span_lengths`,
            `num_return_sequences`, `output_history`). `seed` has no effect, because each request has its own. Or the
            `SamplingPlan` of all requests, for a call that runs beside other engines of the model and does not reserve
            its CUDA graphs.
        max_rows: maximum number of running requests. Further requests wait, in the order of their arrival.
        max_length: maximum number of tokens of a request (prompt and new tokens), for which the KV cache is allocated;
            None: the model's context length.
        stream: report `Extended` and `Committed` events of requests with `stream=True`, and return from `step` after
            each denoising step. False: return from `step` when a request has left.
        record: report in `Ended.steps` which step committed each token. Does not need `stream`, and does not
            synchronise with the device more often.
        observers: called after every forward pass.
        tokenizer: decodes text for `stop_strings`; may also be one of the settings.
        prefill: caches prompts, such as a `prefix_cache.PromptCache`; None: a prompt is run when its request enters.

    Raises:
        SettingError: a setting is invalid for the sampler, or `max_length` is None and the model's config has no
            context length.
    """

    def __init__(
        self,
        model: Any,
        settings: Mapping[str, Any] | SamplingPlan | None = None,
        *,
        max_rows: int,
        max_length: int | None = None,
        stream: bool = True,
        record: bool = False,
        observers: Sequence[StepObserver] = (),
        tokenizer: Any = None,
        prefill: Prefill | None = None,
    ) -> None:
        self._model = model
        self._plans: dict[tuple[int | None, int], SamplingPlan] = {}
        self._only_plan = settings if isinstance(settings, SamplingPlan) else None
        self._settings = {} if isinstance(settings, SamplingPlan) else dict(settings or {})
        self._tokenizer = self._settings.pop("tokenizer", tokenizer)
        for name in REFUSED:
            value = self._settings.get(name)
            if value not in (None, False, (), []) and (name, value) != ("num_return_sequences", 1):
                raise SettingError(name, "applies to whole calls of generate, not to an engine's requests")
        self._settings = {name: value for name, value in self._settings.items() if name not in REFUSED}
        length = max_length
        if self._only_plan is None:
            limits = resolve_settings(model, None, self._settings, prompt_width=1).limits
            length = limits.context if max_length is None else max_length
        if length is None:
            raise SettingError("max_length", "is needed, because the model's config has no context length")
        self.max_length = length
        self.max_rows = max_rows
        self._stream = stream
        self._record = record
        self._observers = tuple(observers)
        self._prefill = prefill
        self._takes_turns = self._only_plan is None
        self._device = input_device(model)
        self._waiting: dict[Hashable, _Waiting] = {}  # by the requests' names, in their order
        self._running: dict[Hashable, RunningRequest] = {}
        self._rules: dict[Hashable, DenoisingRule] = {}  # of running rows
        self._constraints: dict[Hashable, TextConstraint | None] = {}  # of running rows
        self._events: list[Event] = []
        self._canvas: Canvas | None = None
        self._runner: ModelRunner | None = None
        self._predictor: Predictor | None = None
        self._steps: Iterator[None] | None = None
        self._forwards = 0  # of runs that are over

    @property
    def idle(self) -> bool:
        """True if there is no waiting or running request and no unreported event."""
        return not (self._waiting or self._running or self._events or self._steps)

    @property
    def running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    @property
    def forwards(self) -> int:
        """Number of forward passes of the model so far."""
        return self._forwards + (0 if self._predictor is None else self._predictor.forwards)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RowError: the name is in use, or the prompt does not fit the sampler, the model's context or `max_length`.
            SettingError: `gen_length` is invalid.
        """
        leaving = set() if self._canvas is None else self._canvas.cancelled
        if any(request.name in names for names in (self._waiting, self._running, leaving)):
            raise RowError("another waiting or running request has this name", [request.name])
        plan = self._plan(request.gen_length, len(request.prompt))
        limits = plan.settings.limits
        request = replace(request, prompt=limits.with_masks(request.prompt))
        check_row(request.prompt, request.name, limits)
        gen_length = limits.gen_length
        if len(request.prompt) + gen_length > self.max_length:
            raise RowError(
                f"the prompt's {len(request.prompt)} and `gen_length={gen_length}` make "
                f"{len(request.prompt) + gen_length} tokens, beyond `max_length={self.max_length}`",
                [request.name],
            )
        if plan.spec.rule.needs_prompt and not len(request.prompt):
            raise RowError("this sampler needs a prompt of at least one token: use bos_token_id", [request.name])
        if request.constraint is not None:
            request.constraint.check(request, gen_length, plan)
        self._waiting[request.name] = _Waiting(request, plan, gen_length)

    def cancel(self, name: Hashable) -> bool:
        """Drop a request and its unreported events. Returns False if there is no request of this name.

        A running request takes part in no further step; another request can enter in its place at the next boundary
        that admits requests.
        """
        self._events[:] = [event for event in self._events if event.name != name]
        if self._waiting.pop(name, None) is not None:
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
        """Drop all requests and release the model for other engines and calls."""
        self._waiting.clear()
        self._running.clear()
        self._events.clear()
        self._end_run()

    def step(self) -> list[Event]:
        """Run to the next boundary and return the events since the last call.

        The boundary is the end of a denoising step (with `stream`) or the end of a request. Returns immediately if
        there is nothing to run, or if another engine of the model is running.

        An error that is not specific to one request ends all running requests, each with a `Failed` event. If it is
        not a DlmBridgeError, it is also raised.
        """
        if self._waiting or self._steps is not None:
            if self._takes_turns and not _take_turn(self._model, self):
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
            failure = (
                error if isinstance(error, DlmBridgeError) else DlmBridgeError(None, f"sampling failed: {error!r}")
            )
            self._events += [Failed(name, failure) for name in self._running]
            self._running.clear()
            self._end_run()
            if not known:
                raise

    def _plan(self, gen_length: int | None, prompt_length: int) -> SamplingPlan:
        if self._only_plan is not None:
            return self._only_plan
        asked = self._settings | ({} if gen_length is None else {"gen_length": gen_length, "max_new_tokens": None})
        by_prompt = gen_length is None or any(asked.get(name) for name in ("min_length", "max_length", "infill"))
        cache_key = gen_length, prompt_length if by_prompt else 0
        if cache_key not in self._plans:
            settings = resolve_settings(self._model, None, asked, prompt_width=prompt_length)
            self._plans[cache_key] = SamplingPlan.of(settings, None, prompt_length)
        return self._plans[cache_key]

    def _begin_run(self) -> None:
        """Prepare the model for the first waiting request and those that can share its batch. If this fails, these
        requests fail."""
        plan = next(iter(self._waiting.values())).plan
        entering = self._entering(plan.key)
        layout, settings, limits = plan.spec.layout, plan.settings, plan.settings.limits
        cache = choose_cache(plan.spec.predictor, self._model, settings.cache)
        width = cache_columns(layout, self.max_length)
        self._runner = ModelRunner.prepare(
            self._model,
            settings.execution,
            cache,
            rows=plan.copies * self.max_rows,
            width=width,
            mask_token_id=limits.mask_token_id,
            hold=self._takes_turns,
        )
        stop = StopCondition(settings.eos_token_ids, self._device, settings.stop_strings, self._tokenizer)
        self._canvas = Canvas(
            layout,
            stop,
            self._device,
            mask_token_id=limits.mask_token_id,
            proposes_mask=limits.ordinary_mask,
            cache_width=width,
            # If the block is the whole text, each row caches its own columns.
            shares_blocks=cache.stores and layout.block_length is not None,
            infill=limits.infill,
        )
        reporter = EventReporter(self._running, self._events, stop, stream=self._stream, record=self._record)
        self._steps = self._denoise(plan, entering, cache, self._canvas, self._runner, reporter)

    def _end_run(self) -> None:
        if self._steps is not None:
            self._steps = None
            self._canvas = None
        if self._runner is not None:
            self._forwards = self.forwards
            self._runner.close()
            self._runner = self._predictor = None
        _leave_turn(self._model, self)

    def _denoise(
        self,
        plan: SamplingPlan,
        entering: list[_Waiting],
        cache: KVCache,
        canvas: Canvas,
        runner: ModelRunner,
        reporter: EventReporter,
    ) -> Iterator[None]:
        """Denoise these requests and those that enter later, until none is left. Yields at boundaries."""
        noise = Noise([], self._device)
        self._admit(entering, canvas, noise, None)
        observers = (*self._observers, reporter)
        rule = plan.rule
        context = plan.context(runner, canvas, cache, noise, observers, planner=lambda name: self._rules[name])
        predictor = self._predictor = context.predictor
        prefill = None if self._prefill is None else self._prefill.attach(predictor)
        if prefill is not None:
            context.observers = (*observers, prefill)

        def constrain(entered: list[_Waiting]) -> None:
            for row in entered:
                constraint = row.request.constraint
                if constraint is not None and context.text is None:
                    context.text = constraint.decoder(canvas, noise, self._constraints, edits=rule.edits)

        constrain(entering)

        def enter() -> None:
            if prefill is not None and self._waiting:
                sharing = takewhile(
                    lambda row: row.plan.key == plan.key, islice(self._waiting.values(), self.max_rows)
                )
                prefill.advance(row.request.prompt for row in sharing)
            # Shared columns may have to move to the left even if no request enters: the KV cache has an end.
            if not (self._waiting or canvas.shares_blocks) or not canvas.admits:
                return
            entering = [] if _others_wait(self._model, self) else self._entering(plan.key, prefill)
            cached = cache.length if isinstance(cache, BlockKVCache) and cache.stores else None
            shift = self._admit(entering, canvas, noise, cached)
            if shift:
                predictor.shift_columns(shift)
            if entering:
                predictor.admit(len(entering))
                constrain(entering)

        # A speculative forward pass of the remaining rows is wasted if other rows may enter.
        for _ in denoise_rows(context, rule, enter, lambda: not self._waiting):
            reporter.ended(canvas)
            reporter.poll()
            if self._stream or self._events:
                yield
        reporter.ended(canvas)  # rows that left together with the last cancelled row

    def _entering(self, key: Any, prefill: PrefillRun | None = None) -> list[_Waiting]:
        """Dequeue the next waiting requests that fit and can share the batch. Others overtake those whose prompts are
        not cached yet."""
        rows: list[_Waiting] = []
        for row in self._waiting.values():
            if row.plan.key != key or len(rows) == self.max_rows - len(self._running):
                break
            if prefill is None or prefill.ready(row.request.prompt):
                rows.append(row)
        for row in rows:
            del self._waiting[row.request.name]
            self._running[row.request.name] = row.running()
            self._rules[row.request.name] = row.plan.rule
            self._constraints[row.request.name] = row.request.constraint
        for name in self._rules.keys() - self._running.keys() if len(self._rules) > 2 * len(self._running) else ():
            del self._rules[name], self._constraints[name]
        return rows

    def _admit(self, rows: list[_Waiting], canvas: Canvas, noise: Noise, cached: int | None) -> int:
        """Add requests to the canvas. Returns the number of columns by which the other rows moved."""
        seeds = []
        for row in rows:
            seed = row.request.seed
            if seed is None:
                seed = shared_seed(self._model)
            seeds.append(drawn_seeds(1)[0] if seed is None else seed)
        noise.select_rows(order_behind(len(rows), len(canvas.rows)))
        noise.admit(seeds)
        return canvas.admit([Entry(row.request.name, row.request.prompt, row.gen_length) for row in rows], cached)


@dataclass(frozen=True)
class _Waiting:
    """A validated request that has not started."""

    request: Request
    plan: SamplingPlan
    gen_length: int

    def running(self) -> RunningRequest:
        layout, infill = self.plan.spec.layout, self.plan.settings.limits.infill
        grows = layout.first_masks is not None
        return RunningRequest.begin(self.request, self.gen_length, infill=infill, grows=grows)


@dataclass(frozen=True)
class SamplingPlan:
    """Sampler parts for requests of one length. Requests with equal `key` share a batch."""

    settings: GenerationSettings
    spec: SamplerSpec
    constraints: Constraints | None
    rule: DenoisingRule  # under the constraints
    key: Any

    @classmethod
    def of(cls, settings: GenerationSettings, commit_rule: CommitRule | None, prompt_width: int) -> SamplingPlan:
        """Build the plan for these settings. `commit_rule` replaces the sampler's own rule. Raises SettingError."""
        spec = sampler_spec(settings, commit_rule)
        constraints = call_constraints(settings, spec, prompt_width)
        rule = spec.rule if constraints is None else spec.rule.constrained(constraints)
        key = _signature(spec) if commit_rule is None else id(commit_rule)
        key = key, settings.limits.infill, 0 if constraints is None else constraints.min_new_tokens
        return cls(settings, spec, constraints, rule, key)

    @property
    def copies(self) -> int:
        """Rows of the model's input per request: 2 with classifier-free guidance, else 1."""
        return 2 if self.spec.predictor_options.get("cfg_scale") else 1

    def context(
        self,
        runner: ModelRunner,
        canvas: Canvas,
        cache: KVCache,
        noise: Noise,
        observers: Sequence[StepObserver],
        planner: Callable[[Any], DenoisingRule] | None = None,
    ) -> SamplerContext:
        """Build the context of a run over the rows of a canvas."""
        spec, settings = self.spec, self.settings
        predictor = spec.predictor(runner, canvas, cache, shift=settings.shift, **spec.predictor_options)
        predictor.commits_first_token = spec.first_token is not None
        return SamplerContext(
            canvas,
            predictor,
            spec.sampling,
            self.constraints,
            noise,
            observers,
            settings.limits.vocabulary_size,
            first_token=spec.first_token,
            window=spec.window,
            logits_bias=spec.logits_bias,
            planner=planner,
        )


def denoise_rows(
    context: SamplerContext, rule: DenoisingRule, enter: Callable[[], None], may_launch: Callable[[], bool]
) -> Iterator[None]:
    """Denoise the rows of the canvas until none is left. Yields after each step.

    Args:
        enter: called between two steps to add rows to the canvas.
        may_launch: returns True if the next forward pass may be launched before it is known which rows remain.
    """
    canvas, predictor = context.canvas, context.predictor

    def launch() -> None:
        if may_launch():
            predictor.launch_speculatively(done=True)

    def leave_block(rows: list[int]) -> None:
        over = canvas.close_block(rows)
        if not over:
            return
        for observer in context.observers:
            observer.block(canvas, over)
        before = canvas.names
        stay = canvas.retire(over, partial(canvas.read, overlap_with=launch))
        if canvas.failed & ({*before} - {*canvas.names}):
            predictor.cache.drop_non_finite()
        if stay is not None:
            context.noise.select_rows(stay)
            predictor.select_rows(stay)

    while canvas.rows:
        opening = canvas.open_block()
        nothing_to_do: set[int] = set()
        if opening:
            predictor.open_block(canvas.block, opening)
            nothing_to_do = {*opening} - {*rule.begin_block(context, canvas.block, opening)}
        inside = canvas.inside
        active = [row for row in inside if row not in nothing_to_do]
        going = set(rule.denoise_step(context, canvas.block, active) if active else ())
        canvas.count_step(active)
        leave_block([row for row in inside if row not in going])
        yield
        unwanted = canvas.unwanted()
        if unwanted:
            leave_block(unwanted)
        enter()


def choose_cache(predictor: type[Predictor], model: Any, wanted: CacheMode | None) -> KVCache:
    """Create the requested KV cache. Default: the predictor's exact one, if it has one, else none."""
    kinds = {kind.mode: kind for kind in predictor.caches}
    if wanted is None:
        storing = [kind for kind in predictor.caches if kind.stores and kind.exact]
        return storing[0]() if storing and supports_kv_cache(model) else KVCache()
    if wanted not in kinds:
        raise SettingError("cache", f"{wanted} does not fit the sampler's attention: use {' or '.join(kinds)}")
    return kinds[wanted]()


def sampler_spec(settings: GenerationSettings, commit_rule: CommitRule | None) -> SamplerSpec:
    """Parts of the sampler; `commit_rule` replaces its own rule. Raises SettingError."""
    sampler, limits = settings.sampler, settings.limits
    if limits.context is not None and not limits.infill and limits.gen_length > limits.context:
        # Before the sampler's checks of block length and steps.
        raise SettingError("gen_length", f"{limits.gen_length} is beyond the model's context of {limits.context}")
    spec = sampler.spec(SpecialTokens.of(settings))
    closing = spec.layout.closing
    if closing is not None and closing >= limits.vocabulary_size:
        raise SettingError(
            "eos_token_id" if closing in settings.eos_token_ids else "pad_token_id",
            f"{closing}, with which the {sampler.name} sampler ends the text, is outside the vocabulary of "
            f"{limits.vocabulary_size}",
        )
    if commit_rule is None:
        return spec
    if not sampler.takes_commit_rule:
        raise SettingError("commit_rule", f"the {sampler.name} sampler does not support it")
    return replace(spec, rule=CheckedRule(commit_rule))


def call_constraints(settings: GenerationSettings, spec: SamplerSpec, prompt_width: int) -> Constraints | None:
    """Constraints requested by the caller or the sampler, or None. Raises SettingError."""
    if not settings.constraints and not spec.suppress:
        return None
    return read_constraints(
        settings.constraints.get,
        prompt_width=prompt_width,
        vocabulary_size=settings.limits.vocabulary_size,
        excluded_token_id=settings.limits.excluded_token_id,
        eos_token_ids=settings.eos_token_ids,
        pad_token_id=settings.pad_token_id,
        suppress=spec.suppress,
    )


def input_device(model: Any) -> torch.device:
    """Device of the model's input. Raises SettingError for a model without weights."""
    embedding = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type == "meta":  # offloaded: accelerate's hook names the device
        hook = getattr(embedding, "_hf_hook", None)
        if hook is None:
            raise SettingError("model", "is on the meta device, without weights: load it with from_pretrained")
        device = torch.device(hook.execution_device)
    return device


def _signature(part: Any) -> Any:
    """Value that is equal for sampler parts of equal behaviour. Objects of unknown types compare by identity."""
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


# ---- Queue of the engines of one model; the first one runs.

_turns: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[SamplingEngine]]] = weakref.WeakKeyDictionary()


def _queue(model: Any) -> list[weakref.ref[SamplingEngine]]:
    queue = _turns.setdefault(unwrapped(model), [])
    queue[:] = [one for one in queue if one() is not None]
    return queue


def _take_turn(model: Any, engine: SamplingEngine) -> bool:
    """Join the queue. True if it is the engine's turn."""
    queue = _queue(model)
    if all(one() is not engine for one in queue):
        queue.append(weakref.ref(engine))
    return queue[0]() is engine


def _others_wait(model: Any, engine: SamplingEngine) -> bool:
    return any(one() is not engine for one in _queue(model))


def _leave_turn(model: Any, engine: SamplingEngine) -> None:
    queue = _queue(model)
    queue[:] = [one for one in queue if one() is not engine]
