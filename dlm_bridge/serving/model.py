"""The served model: requests become jobs, which are checked, and tokens become texts."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.generation.autoregressive import NEW_TOKENS
from dlm_bridge.generation.batch_size import Capacity, plan_batch
from dlm_bridge.generation.offline import check_prompts, open_engine
from dlm_bridge.generation.prompts import PromptTooLongError, encode_chat, encode_text
from dlm_bridge.generation.request import Engine, Event
from dlm_bridge.generation.samplers import SpecialTokens
from dlm_bridge.generation.settings import combine_settings, resolve_settings
from dlm_bridge.generation.token_sampling import row_seeds
from dlm_bridge.loading import LoadedModel
from dlm_bridge.serving.protocol import RequestError, TextRequest
from dlm_bridge.serving.scheduler import Job

CONVERSATION = "the conversation"  # its name in errors
TOO_LONG = "context_length_exceeded"  # OpenAI's code
DEFAULT_LENGTH = 4096  # of prompt and new tokens: memory is planned for rows of this length
LENGTHS = ("gen_length", "max_new_tokens", "max_length")  # settings that say how many new tokens


@dataclass(frozen=True)
class ServedModel:
    """A model, its tokenizer, and what the server says of them.

    Args:
        name: of the model in answers.
        defaults: settings of requests that do not name them.
        max_length: tokens of a prompt and its new ones together, at most; None: the model's context,
            DEFAULT_LENGTH at most.
    """

    loaded: LoadedModel
    name: str
    defaults: Mapping[str, Any]
    max_length: int | None = None

    def check(self) -> None:
        """Raise DlmBridgeError where the model cannot be sampled from, or with the defaults."""
        settings = dict(self.defaults)
        if not self.loaded.diffusion and _asked_length(settings, 0) is None:
            settings["gen_length"] = 1
        check_prompts(self.loaded.model, [(self.name, [0])], settings)

    @property
    def limit(self) -> int:
        """Tokens of a prompt and its new ones together, at most."""
        config = self.loaded.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        if self.max_length is not None:
            return self.max_length if context is None else min(self.max_length, context)
        return DEFAULT_LENGTH if context is None else min(context, DEFAULT_LENGTH)

    @cached_property
    def max_chars(self) -> int:
        """Characters of a prompt, at most: those of `limit` tokens, each the longest of the vocabulary."""
        return self.limit * max(map(len, self.loaded.tokenizer.get_vocab()))

    def open_engine(
        self, settings: Mapping[str, Any], max_rows: int, deliver: Callable[[Sequence[Event]], None]
    ) -> Engine:
        """The engine of jobs with these settings; see `scheduler.OpenEngine`."""
        return open_engine(
            self.loaded.model,
            self.loaded.tokenizer,
            settings,
            max_rows=max_rows,
            max_length=self.limit,
            stream=True,
            deliver=deliver,
        )

    def plan(self) -> Capacity:
        """The rows of `limit` tokens that free memory holds, with the new tokens of a request that names none."""
        loaded, new = self.loaded, self._new_tokens(self.defaults, 1)
        settings = {name: value for name, value in self.defaults.items() if name not in LENGTHS} | {"gen_length": new}
        prompt = max(self.limit - new, 1)
        return plan_batch(loaded.model, [prompt], settings, diffusion=loaded.diffusion, more=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of new tokens, without special ones."""
        return str(self.loaded.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def jobs(self, request: TextRequest, listen: Callable[[int], Callable[[Event], None]]) -> list[Job]:
        """The jobs of a request, checked; `listen` gives the listener of a choice. Raises RequestError."""
        try:
            return self._jobs(request, listen)
        except PromptTooLongError as error:
            message = f"{error}, which are more than {self.limit} tokens"
            raise RequestError(message, param="messages" if request.chat else "prompt", code=TOO_LONG) from error
        except DlmBridgeError as error:
            raise RequestError(str(error)) from error

    def _jobs(self, request: TextRequest, listen: Callable[[int], Callable[[Event], None]]) -> list[Job]:
        settings = combine_settings(self.loaded.model, self.defaults, request.settings)
        several = len(request.prompts) > 1
        copies = []
        for number, prompt in enumerate(self._prompts(request)):  # a prompt that is too long is the last to be encoded
            name = f"prompt[{number}]" if several else CONVERSATION if request.chat else "the prompt"
            own = self._settled(prompt, name, settings, "messages" if request.chat else "prompt")
            copies += [(prompt, own)] * request.choices
        seed = request.seed if request.seed is not None else self._stored_seed(settings)
        seeds = row_seeds(secrets.randbits(62) if seed is None else seed, [prompt for prompt, _ in copies])
        jobs = []
        for index, ((prompt, own), job_seed) in enumerate(zip(copies, seeds, strict=True)):
            group = json.dumps({name: value for name, value in own.items() if name != "gen_length"}, sort_keys=True)
            jobs.append(Job(tuple(prompt), own, job_seed, group, listen(index)))
        return jobs

    def _prompts(self, request: TextRequest) -> Iterator[list[int]]:
        tokenizer = self.loaded.tokenizer
        if request.chat:
            yield encode_chat(
                tokenizer,
                request.messages,
                self.name,
                max_chars=self.max_chars,
                template_args=request.template_args,
            )
        for one in request.prompts:
            yield encode_text(tokenizer, one, max_chars=self.max_chars) if isinstance(one, str) else list(one)

    def _new_tokens(self, settings: Mapping[str, Any], prompt: int) -> Any:
        """New tokens behind a prompt of this length: as many as the settings say, whatever that is, else the model's
        own number, as far as there is room. Raises DlmBridgeError."""
        model, asked = self.loaded.model, _asked_length(settings, prompt)
        if asked is not None:
            return asked
        if self.loaded.diffusion:
            usual = resolve_settings(model, None, settings, prompt_width=prompt).limits.gen_length
        else:
            usual = getattr(model.generation_config, "max_new_tokens", None) or NEW_TOKENS
        return min(usual, max(self.limit - prompt, 1))

    def _settled(self, prompt: list[int], name: str, settings: Mapping[str, Any], field: str) -> dict[str, Any]:
        """The settings of a prompt's jobs, with the number of new tokens as `gen_length`. Raises DlmBridgeError or
        RequestError, which names the request's `field`."""
        model, diffusion = self.loaded.model, self.loaded.diffusion
        found = resolve_settings(model, None, settings, prompt_width=len(prompt)) if diffusion else None
        new, limit = self._new_tokens(settings, len(prompt)), self.limit
        own = {key: value for key, value in settings.items() if key not in LENGTHS} | {"gen_length": new}
        if isinstance(new, int) and len(prompt) + new > limit:
            raise RequestError(
                f"{name} has {len(prompt)} tokens; with {new} new ones (max_tokens) that is {len(prompt) + new}, "
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
    """The new tokens that the settings ask for behind a prompt of this length; None: they do not say."""
    for name in ("gen_length", "max_new_tokens"):
        if settings.get(name) is not None:
            return settings[name]
    longest = settings.get("max_length")
    return longest - prompt if isinstance(longest, int) else longest
