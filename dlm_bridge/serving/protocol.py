"""OpenAI's completions and chat completions, and infilling: validation of requests, and the bodies of answers and
errors."""

from __future__ import annotations

import codecs
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, Json, ValidationError, model_validator
from pydantic_core import from_json

from dlm_bridge.errors import DlmBridgeError, shortened
from dlm_bridge.generation.prompts import check_template_args
from dlm_bridge.serving.choices import Choice

# Fields of OpenAI's API that do not affect the text.
IGNORED = {
    "metadata", "model", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
    "user",
}  # fmt: skip
# Fields of OpenAI's API that no sampler supports: their neutral values, which are accepted, and the remedy for others.
Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]
UNSUPPORTED: Unsupported = {
    **dict.fromkeys(("prediction", "reasoning_effort", "verbosity", "web_search_options"), ((None,), "omit it")),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), ((None, 0), "use repetition_penalty")),
    "audio": ((None,), "answers are text"),
    "best_of": ((None, 1), "use n"),
    "echo": ((None, False), "answers do not repeat the prompt"),
    "function_call": ((None, "none", "auto"), "functions are not called: omit it"),
    "functions": ((None, []), 'functions are not called: omit it, or set function_call to "none"'),
    "logit_bias": ((None, {}), "use suppress_tokens"),
    "logprobs": (
        (None, False),
        "the probability of a token in the step that commits it is not a log-probability of the text: omit it",
    ),
    "modalities": ((None, ["text"]), "answers are text"),
    "parallel_tool_calls": ((None, False, True), "tools are not called: omit it"),
    "response_format": ((None, {"type": "text"}), "the format of the text cannot be forced: omit it"),
    "suffix": ((None, ""), "/v1/infill fills in the text between a prefix and a suffix"),
    "tool_choice": ((None, "none", "auto"), "tools are not called: omit it"),
    "tools": ((None, []), 'tools are not called: omit it, or set tool_choice to "none"'),
    "top_logprobs": ((None, 0), "omit it"),
}
# Settings of `generate` that only the server sets, or that would change the form of the answer.
NOT_OF_A_REQUEST = {
    **dict.fromkeys(("device", "execution", "tokenizer"), "is set when the server is started"),
    "infill": "/v1/infill fills in masks",
    "span_lengths": "dlm-bridge generate chooses the length of masks",
    "num_return_sequences": "use n",
    "output_history": "/v1/commits streams every commit",
    "return_dict_in_generate": "omit it",
    "stop_strings": "use stop",
    "streamer": "use stream",
    "generator": "use seed",
}
MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_LENGTH = 4, 256  # number of stop strings, as in OpenAI's API, and their characters
MAX_SETTINGS = 65_536  # characters of a request's sampler settings as JSON


class RequestError(Exception):
    """An error that is the answer to a request.

    Args:
        kind: the error's `type` in OpenAI's API.
        param: the JSON field at fault.
        retry_after_s: seconds in the header Retry-After.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        message = " ".join(shortened(message).split())  # it may quote the request
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class InfillPrompt:
    """Text before and after `length` masks."""

    prefix: str
    suffix: str
    length: int


@dataclass(frozen=True)
class TextRequest:
    """A validated request.

    Args:
        chat: format `messages` with the chat template.
        prompts: texts or token ids; empty for a chat.
        messages: the conversation of a chat.
        infill: fill in the masks of the only prompt, a text or an `InfillPrompt`.
        field: name of the JSON field that contains the prompts.
        template_args: variables of the chat template (`chat_template_kwargs`).
        settings: sampler settings without the seed.
        choices: number of texts per prompt.
        include_usage: end a stream with the token counts.
    """

    chat: bool
    prompts: Sequence[str | list[int] | InfillPrompt] = ()
    messages: Sequence[dict[str, Any]] = ()
    template_args: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    choices: int = 1
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    infill: bool = False
    field: str = ""

    @property
    def prompt_field(self) -> str:
        """Name of the JSON field that contains the prompts."""
        return self.field or ("messages" if self.chat else "prompt")

    @property
    def texts(self) -> int:
        """Number of texts that the request asks for."""
        return max(len(self.prompts), 1) * self.choices


T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]  # one error, not one per element of a long list
STRICT = ConfigDict(strict=True)


class TextPart(BaseModel):
    model_config = STRICT
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    role: str
    content: str | ListOf[TextPart] | None = None

    @model_validator(mode="after")
    def _join_parts(self) -> Self:
        if isinstance(self.content, list):
            self.content = "".join(part.text for part in self.content)
        if self.content is None and self.role == "assistant":  # the message calls a tool
            self.content = ""
        if self.content is None:
            raise ValueError
        return self


class _StreamOptions(BaseModel):
    model_config = STRICT
    include_usage: bool | None = None


class Body(BaseModel):
    """Fields of all kinds of requests. Every other field is a setting of the sampler.

    A field's description completes the error message "FIELD must be ...".
    """

    model_config = ConfigDict(strict=True, extra="allow")
    generation_config: dict[str, Any] | Json[dict[str, Any]] | None = Field(None, description="a JSON object")
    ignore_eos: bool | None = Field(None, description="true or false")
    max_tokens: int | None = Field(None, ge=1, description="a whole number of at least 1")
    max_completion_tokens: int | None = Field(None, ge=1, description="a whole number of at least 1")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description=f"a whole number from 1 to {MAX_CHOICES}")
    seed: int | None = Field(None, description="a whole number")
    stop: (
        Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
        | Annotated[
            ListOf[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]], Field(max_length=MAX_STOPS)
        ]
        | None
    ) = Field(
        None,
        description=f"a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_LENGTH} characters",
    )
    stream: bool | None = Field(None, description="true or false")
    stream_options: _StreamOptions | None = Field(None, description='an object such as {"include_usage": true}')

    @property
    def prompts(self) -> dict[str, Any]:
        """Arguments of `TextRequest`."""
        raise NotImplementedError


class _Completion(Body):
    prompt: str | Annotated[ListOf[int] | ListOf[str] | ListOf[ListOf[int]], Field(min_length=1)] = Field(
        description="a string, a list of token ids, or a list of either"
    )

    @property
    def prompts(self) -> dict[str, Any]:
        """Arguments of `TextRequest`."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return {"prompts": [self.prompt] if single else self.prompt}


class _Chat(Body):
    messages: ListOf[_Message] = Field(
        min_length=1, description="a list of objects with a role and a content of text, both strings"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="a JSON object")

    @property
    def prompts(self) -> dict[str, Any]:
        """Arguments of `TextRequest`. Raises RequestError for reserved names of template variables."""
        template_args, name = self.chat_template_kwargs or {}, "chat_template_kwargs"
        try:
            check_template_args(template_args, name)
        except DlmBridgeError as error:
            raise RequestError(str(error), param=name) from None
        return {"messages": [each.model_dump() for each in self.messages], "template_args": template_args}


class _Infill(Body):
    prompt: str | None = Field(None, description="a text with masks, [MASK] or [MASK:n]")
    prefix: str | None = Field(None, description="a text")
    suffix: str | None = Field(None, description="a text")

    @property
    def prompts(self) -> dict[str, Any]:
        """Arguments of `TextRequest`. Raises RequestError for fields that do not say what to fill in."""
        length = self.max_tokens or self.max_completion_tokens
        if self.stop:
            raise RequestError("stop is not supported: the length of the masks is given", param="stop")
        if self.prompt is None:
            for name, value in (("prompt", self.prefix or self.suffix), ("max_tokens", length)):
                if value is None:
                    raise RequestError(
                        "set prompt (a text with [MASK] or [MASK:n]), or prefix, suffix and max_tokens", param=name
                    )
            return {"prompts": [InfillPrompt(self.prefix or "", self.suffix or "", length or 1)], "infill": True}
        for name, value in (("prefix", self.prefix), ("suffix", self.suffix), ("max_tokens", length)):
            if value is not None:
                raise RequestError(f"{name} excludes prompt, in which [MASK:n] stands for n tokens", param=name)
        return {"prompts": [self.prompt], "infill": True}


def parse_request(raw: bytes, chat: bool | None) -> TextRequest:
    """Validate the body of a request.

    Args:
        chat: the kind of request; None: a chat if the body has messages.

    Raises:
        RequestError: for a body that is not valid JSON, and for a field that is unsupported or malformed.
    """
    fields = read_fields(raw)
    if chat is None:
        chat = "messages" in fields
    return text_request(_Chat if chat else _Completion, fields, chat=chat)


def parse_infill(raw: bytes) -> TextRequest:
    """Validate the body of a request to fill in masks. Raises RequestError as `parse_request`."""
    unsupported = {name: found for name, found in UNSUPPORTED.items() if name != "suffix"}
    return text_request(_Infill, read_fields(raw), chat=False, unsupported=unsupported)


def read_fields(raw: bytes) -> dict[str, Any]:
    """Fields of the JSON object in a body. Raises RequestError for anything else."""
    try:
        fields = from_json(raw.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError("the body must be a JSON object")
    return fields


def text_request(
    kind: type[Body], fields: dict[str, Any], *, chat: bool, unsupported: Unsupported = UNSUPPORTED
) -> TextRequest:
    """The request with these fields. Raises RequestError for one that is `unsupported` or malformed."""
    for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if fields.get(choice) == "none":  # the tools are not to be called
            fields.pop(tools, None)
    _refuse(fields, unsupported)
    body = _validated(kind, fields)
    settings = _settings(body)
    stored_seed = settings.pop("seed", None)  # in a generation_config
    if not (stored_seed is None or type(stored_seed) is int):
        raise RequestError("seed must be a whole number", param="seed")
    if body.stream_options is not None and body.stream_options.model_fields_set and not body.stream:
        raise RequestError("stream_options apply to streams only: set stream as well", param="stream_options")
    return TextRequest(
        chat=chat,
        **body.prompts,
        settings=settings,
        choices=body.n or 1,
        seed=body.seed if "seed" in body.model_fields_set else stored_seed,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _refuse(fields: Mapping[str, Any], unsupported: Unsupported) -> None:
    for name, (neutral, remedy) in unsupported.items():
        if name in fields and not any(
            fields[name] == one and (type(fields[name]) is type(one) or isinstance(fields[name], float))
            for one in neutral
        ):
            raise RequestError(f"{name} is not supported: {remedy}", param=name)


def _validated(kind: type[Body], fields: dict[str, Any]) -> Body:
    """The validated fields. The error names the first malformed field, and the message of a chat by its index."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        places = [each["loc"] for each in error.errors(include_url=False, include_context=False, include_input=False)]
        name = places[0][0]
        index = next((part for place in places if place[0] == name for part in place if isinstance(part, int)), None)
        param = f"{name}[{index}]" if name in ("messages", "input") and index is not None else str(name)
        message = f"{name} must be {kind.model_fields[str(name)].description}"
        raise RequestError(message if param == name else f"{param}: {message}", param=param) from None


def _settings(body: Body) -> dict[str, Any]:
    """Sampler settings of a request: its generation_config, its further fields, and OpenAI's fields by our names."""
    extra = body.model_extra or {}
    settings = {**(body.generation_config or {})}
    settings |= {name: value for name, value in extra.items() if name not in IGNORED and name not in UNSUPPORTED}
    for name in settings:
        if name in NOT_OF_A_REQUEST:
            raise RequestError(f"{name}: {NOT_OF_A_REQUEST[name]}", param=name)
    settings = {name: value for name, value in settings.items() if value is not None or name == "eos_token_id"}
    if settings.get("top_k") == -1:  # all tokens, in vLLM's API
        settings["top_k"] = 0
    if body.ignore_eos:
        settings["eos_token_id"] = None
    lengths = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(lengths) > 1:
        raise RequestError(
            "max_tokens and max_completion_tokens have the same meaning: set one of them", param="max_tokens"
        )
    if lengths:
        settings.pop("max_new_tokens", None)
        settings["gen_length"] = lengths.pop()
    if body.stop:
        settings["stop_strings"] = [body.stop] if isinstance(body.stop, str) else body.stop
    sizes = {name: len(json.dumps(value)) for name, value in settings.items()}
    if sum(sizes.values()) > MAX_SETTINGS:
        largest = max(sizes, key=lambda name: sizes[name])
        raise RequestError(f"{largest}: settings are limited to {MAX_SETTINGS} characters", param=largest)
    return settings


@dataclass(frozen=True)
class AnswerBodies:
    """Bodies of one answer.

    Args:
        model: name of the served model.
        prompt_tokens: total number of prompt tokens, without masks.
    """

    request: TextRequest
    model: str
    prompt_tokens: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def chat(self) -> bool:
        """True for a chat completion."""
        return self.request.chat

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Body of an answer that is not streamed."""
        found = []
        for index, choice in enumerate(choices):
            text: dict[str, Any] = {"text": choice.text}
            if self.chat:
                text = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            found.append({"index": index, **text, "logprobs": None, "finish_reason": choice.finish_reason})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": found, "usage": self.usage(choices)}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """First chunks of a choice: only chats have one."""
        return [self._chunk(index, {"role": "assistant", "content": ""}, None)] if self.chat else []

    def piece(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A chunk with a piece of a choice's text."""
        if self.chat:
            return self._chunk(index, {"content": text} if text else {}, finish_reason)
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("text_completion"), "choices": [choice]}

    def last(self, choices: Sequence[Choice]) -> list[Any]:
        """End of a stream, with the usage if it was asked for."""
        if not self.request.include_usage:
            return ["[DONE]"]
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return [{**self._head(kind), "choices": [], "usage": self.usage(choices)}, "[DONE]"]

    def usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        new = sum(len(choice.tokens) for choice in choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
        }

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}


class InfillBodies(AnswerBodies):
    """Bodies of an answer of /v1/infill."""

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Body with the whole text of each choice, and the text in place of each run of masks."""
        found = []
        for index, choice in enumerate(choices):
            found.append({"index": index, "text": choice.text, "infills": choice.infills, "finish_reason": "stop"})
        head = {"id": f"infill-{self.id}", "object": "infill", "created": self.created, "model": self.model}
        return {**head, "choices": found, "usage": self.usage(choices)}

    def usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        """Token counts: the texts' tokens include those of the prompt."""
        new = sum(len(choice.tokens) - self.prompt_tokens for choice in choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
        }
