"""The served model: validates requests, turns them into jobs, and decodes their tokens."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from dlm_bridge.errors import DlmBridgeError, RowError, SettingError, counted
from dlm_bridge.evaluation.likelihood import bound_estimator
from dlm_bridge.generation.autoregressive import NEW_TOKENS
from dlm_bridge.generation.batch_size import Capacity, plan_batch
from dlm_bridge.generation.gemma import gemma_keywords, is_gemma, supports_drafts
from dlm_bridge.generation.offline import check_prompts, compile_constraint, open_engine
from dlm_bridge.generation.prompts import SPAN, PromptTooLongError, encode_chat, encode_text
from dlm_bridge.generation.request import MASK, Engine, Event
from dlm_bridge.generation.samplers import SpecialTokens
from dlm_bridge.generation.settings import combine_settings, resolve_settings
from dlm_bridge.generation.token_sampling import row_seeds
from dlm_bridge.loading import LoadedModel
from dlm_bridge.registration import load
from dlm_bridge.serving.protocol import InfillPrompt, RequestError, TextRequest
from dlm_bridge.serving.scheduler import Job
from dlm_bridge.serving.scores import ScoreRecorder, ScoringEngine

TOO_LONG = "context_length_exceeded"  # the error's code in OpenAI's API
DEFAULT_LENGTH = 4096  # default limit of prompt and new tokens; memory is planned for texts of the limit's length
SCORES = "scores"  # key beside a job's settings: the arguments `top` and `samples` of `ScoringEngine`
LENGTHS = ("gen_length", "max_new_tokens", "max_length")  # settings that determine the number of new tokens


@dataclass(frozen=True)
class ServedModel:
    """A model, its tokenizer and the defaults of requests.

    Args:
        name: name of the model in answers.
        defaults: sampler settings for requests that do not set them.
        max_length: maximum number of prompt and new tokens together; None: the model's context, up to
            DEFAULT_LENGTH.
        prompts: keys and values of prompts, a `prefix_cache.PromptCache`, or None.
    """

    loaded: LoadedModel
    name: str
    defaults: Mapping[str, Any]
    max_length: int | None = None
    prompts: Any = None

    def check(self) -> None:
        """Raise DlmBridgeError if the model cannot be sampled, or not with the defaults."""
        settings = dict(self.defaults)
        if not self.loaded.diffusion and _asked_length(settings, 0) is None:
            settings["gen_length"] = 1
        check_prompts(self.loaded.model, [(self.name, [0])], settings)

    @property
    def limit(self) -> int:
        """Maximum number of prompt and new tokens together."""
        config = self.loaded.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        if self.max_length is not None:
            return self.max_length if context is None else min(self.max_length, context)
        return DEFAULT_LENGTH if context is None else min(context, DEFAULT_LENGTH)

    @cached_property
    def max_chars(self) -> int:
        """Maximum number of characters in a prompt: `limit` times the length of the vocabulary's longest token."""
        return self.limit * max(map(len, self.loaded.tokenizer.get_vocab()))

    def open_engine(
        self, settings: Mapping[str, Any], max_rows: int, deliver: Callable[[Sequence[Event]], None] | None = None
    ) -> Engine:
        """Open an engine for jobs with these settings; see `scheduler.OpenEngine`."""
        model = self.loaded.model
        top, samples = settings.get(SCORES, (None, 0))
        diffusion = self.loaded.diffusion or is_gemma(model)
        recorder = ScoreRecorder(top) if top is not None and diffusion else None
        engine = open_engine(
            model,
            self.loaded.tokenizer,
            {name: value for name, value in settings.items() if name != SCORES},
            max_rows=max_rows,
            max_length=self.limit,
            stream=True,
            observers=() if recorder is None else (recorder,),
            deliver=deliver,
            prefill=self.prompts,
        )
        return engine if top is None and not samples else ScoringEngine(engine, model, recorder, top, samples)

    def plan(self) -> Capacity:
        """Batch size for texts of `limit` tokens that fits free memory, with the default number of new tokens."""
        loaded, new = self.loaded, self._new_tokens(self.defaults, 1)
        settings = {name: value for name, value in self.defaults.items() if name not in LENGTHS} | {"gen_length": new}
        prompt = max(self.limit - new, 1)
        return plan_batch(loaded.model, [prompt], settings, diffusion=loaded.diffusion, more=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode new tokens, without special tokens."""
        return str(self.loaded.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def jobs(self, request: TextRequest, listen: Callable[[int], Callable[[Event], None]]) -> list[Job]:
        """The validated jobs of a request.

        Args:
            listen: returns the listener of a choice, by its index.

        Raises:
            RequestError: for a prompt or a setting that cannot be sampled.
        """
        try:
            return self._jobs(request, listen)
        except PromptTooLongError as error:
            message = f"{error}, which are more than {self.limit} tokens"
            raise RequestError(message, param=request.prompt_field, code=TOO_LONG) from error
        except DlmBridgeError as error:
            param = error.field if isinstance(error, SettingError | RowError) else request.prompt_field
            raise RequestError(str(error), param=param) from error

    def _jobs(self, request: TextRequest, listen: Callable[[int], Callable[[Event], None]]) -> list[Job]:
        settings = combine_settings(self.loaded.model, self.defaults, request.settings)
        if request.infill:
            if not self.loaded.diffusion:
                raise RequestError(f"{self.name} is autoregressive: only diffusion models fill in masks", 400)
            settings = {name: value for name, value in settings.items() if name not in LENGTHS} | {"infill": True}
        if request.scored:
            self._check_scores(request, settings)
        constraint = self._constraint(request)
        copies = []
        for number, prompt in enumerate(self._prompts(request)):  # stops at the first prompt that is too long
            name = f"prompt[{number}]" if len(request.prompts) > 1 else request.prompt_field
            own = self._job_settings(prompt, name, settings, request.prompt_field)
            if request.scored:
                if request.bound and not prompt:
                    raise RequestError("elbo_samples needs a prompt of at least one token", param="dlm")
                own[SCORES] = (request.logprobs, request.bound or 0)
            compiled = None if constraint is None else self._compiled(constraint, request, prompt, own)
            copies += [(prompt, own, compiled)] * request.choices
        seed = request.seed if request.seed is not None else self._stored_seed(settings)
        rows = [prompt for prompt, *_ in copies]
        if request.infill:  # with the model's own masks, as `generate` seeds rows
            mask = resolve_settings(self.loaded.model, None, settings, prompt_width=1).limits.mask_token_id or 0
            rows = [[mask if token == MASK else token for token in prompt] for prompt in rows]
        seeds = row_seeds(secrets.randbits(62) if seed is None else seed, rows)
        jobs = []
        for index, ((prompt, own, compiled), job_seed) in enumerate(zip(copies, seeds, strict=True)):
            group = json.dumps({name: value for name, value in own.items() if name != "gen_length"}, sort_keys=True)
            jobs.append(Job(tuple(prompt), own, job_seed, group, listen(index), compiled))
        return jobs

    def _constraint(self, request: TextRequest) -> Any:
        """The constraint of the request's texts, a `structured.Constraint`; None if there is none."""
        if isinstance(request.constraint, tuple):
            return self._form(request)
        if request.tools is None:
            return request.constraint
        return request.tools.constraint(self.loaded.tokenizer.chat_template)

    def _form(self, request: TextRequest) -> Any:
        """The constraint of a whole text by those of its spans. Raises RequestError unless there is one per span."""
        (prompt,) = request.prompts
        pair = [prompt.prefix, prompt.suffix] if isinstance(prompt, InfillPrompt) else None
        texts = pair or SPAN.split(str(prompt))[::2]
        if len(request.constraint) != len(texts) - 1:
            listed = counted(len(request.constraint), "constraint")
            raise RequestError(
                f"{request.format_field} lists {listed} for {counted(len(texts) - 1, 'span')} to fill in",
                param=request.format_field,
            )
        return load("features", "form")([*chain(*zip(texts, request.constraint, strict=False)), texts[-1]])

    def _compiled(
        self, constraint: Any, request: TextRequest, prompt: Sequence[int], settings: Mapping[str, Any]
    ) -> Any:
        """The constraint for this model, see `Request.constraint`. Raises RequestError for one that is invalid, that
        the sampler cannot keep, or that no text of `max_tokens` satisfies."""
        field = request.constraint_field
        settings = {name: value for name, value in settings.items() if name != SCORES}
        try:
            return compile_constraint(self.loaded.model, self.loaded.tokenizer, constraint, field, prompt, settings)
        except DlmBridgeError as error:
            other = isinstance(error, SettingError) and error.field not in (None, "constraint")
            reason = f"`{error.field}` {error.reason}" if other else error.reason
            raise RequestError(f"{field}: {reason.replace('`gen_length=', '`max_tokens=')}", param=field) from error

    def call_parser(self, request: TextRequest) -> Any:
        """Parser of the calls of tools in a text of the request; None if it may not call any."""
        if request.tools is None:
            return None
        return request.tools.parser(self.loaded.tokenizer.chat_template)

    def _check_scores(self, request: TextRequest, settings: Mapping[str, Any]) -> None:
        """Raise RequestError for log probabilities or bounds that the model or its sampler does not have."""
        model = self.loaded.model
        if is_gemma(model):
            if request.bound:
                raise RequestError("elbo_samples: DiffusionGemma's drafts have no masks, no bound", param="dlm")
            if not supports_drafts(model, gemma_keywords(model, settings)):
                raise RequestError(
                    "logprobs are not computed by transformers' loop for DiffusionGemma", param="logprobs"
                )
        if request.bound:
            if request.texts > 1:
                raise RequestError("elbo_samples needs a single text: send several requests", param="dlm")
            if not self.loaded.diffusion:
                raise RequestError(
                    f"elbo_samples: {self.name} is autoregressive, the sum of its logprobs is exact", param="dlm"
                )
            bound_estimator(model)

    def _prompts(self, request: TextRequest) -> Iterator[list[int]]:
        tokenizer = self.loaded.tokenizer
        if request.chat:
            yield encode_chat(
                tokenizer,
                request.messages,
                self.name,
                max_chars=self.max_chars,
                template_args=request.variables,
            )
        for one in request.prompts:
            if isinstance(one, InfillPrompt):
                before = encode_text(tokenizer, one.prefix, max_chars=self.max_chars)
                after = encode_text(tokenizer, one.suffix, max_chars=self.max_chars, begins=False)
                yield [*before, *[MASK] * one.length, *after]
            elif one == "" and not request.infill:
                raise RequestError(
                    f"{request.prompt_field} is empty: give a text, or [[]], no token ids, to sample without one",
                    param=request.prompt_field,
                )
            elif isinstance(one, str):
                ids = encode_text(tokenizer, one, request.infill, self.max_chars)
                if request.infill and MASK not in ids:
                    raise RequestError("nothing to fill in: put [MASK] or [MASK:n] into the text", param="prompt")
                yield ids
            else:
                yield one

    def _new_tokens(self, settings: Mapping[str, Any], prompt: int) -> Any:
        """Number of new tokens after a prompt of this length: the settings' unchecked value, else the model's default
        or the room that is left. Raises DlmBridgeError."""
        model, asked = self.loaded.model, _asked_length(settings, prompt)
        if asked is not None:
            return asked
        if self.loaded.diffusion:
            usual = resolve_settings(model, None, settings, prompt_width=prompt).limits.gen_length
        else:
            usual = getattr(model.generation_config, "max_new_tokens", None) or NEW_TOKENS
        return min(usual, max(self.limit - prompt, 1))

    def _job_settings(self, prompt: list[int], name: str, settings: Mapping[str, Any], field: str) -> dict[str, Any]:
        """Settings of a prompt's jobs, with the number of new tokens as `gen_length`. Raises DlmBridgeError, and
        RequestError for the request's `field` if the prompt is too long."""
        model, diffusion = self.loaded.model, self.loaded.diffusion
        found = resolve_settings(model, None, settings, prompt_width=len(prompt)) if diffusion else None
        if found is not None and found.limits.infill:  # the prompt has its new tokens, but for those of some samplers
            if len(prompt) + found.limits.gen_length > self.limit:
                reason = f"the text has {len(prompt)} tokens with its masks, above the limit of {self.limit}"
                raise RequestError(reason, param=field, code=TOO_LONG)
            new = None
        else:
            new = self._new_tokens(settings, len(prompt))
        limit = self.limit
        own = {key: value for key, value in settings.items() if key not in LENGTHS} | {"gen_length": new}
        if isinstance(new, int) and len(prompt) + new > limit:
            raise RequestError(
                f"{name} has {counted(len(prompt), 'token')}; with {counted(new, 'new token')} (max_tokens) that is "
                f"{len(prompt) + new}, "
                f"above the limit of {limit}",
                param=field,
                code=TOO_LONG,
            )
        if found is not None:
            found.sampler.spec(SpecialTokens.of(found))
        check_prompts(model, [(name, prompt)], own)
        return own

    def _stored_seed(self, settings: Mapping[str, Any]) -> int | None:
        if not self.loaded.diffusion:
            return None
        seed = resolve_settings(self.loaded.model, None, settings, prompt_width=1).seed
        return seed if isinstance(seed, int) else None


def _asked_length(settings: Mapping[str, Any], prompt: int) -> Any:
    """Number of new tokens that the settings ask for after a prompt of this length; None if they do not."""
    for name in ("gen_length", "max_new_tokens"):
        if settings.get(name) is not None:
            return settings[name]
    longest = settings.get("max_length")
    return longest - prompt if isinstance(longest, int) else longest
