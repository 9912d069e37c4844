"""OpenAI's completions and chat completions, and infilling: validation of requests, and the bodies of answers and
errors."""

from __future__ import annotations

import codecs
import contextlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, Json, ValidationError, model_validator
from pydantic_core import from_json

from dlm_bridge.errors import DlmBridgeError, shortened
from dlm_bridge.generation.prompts import check_template_args
from dlm_bridge.registration import load
from dlm_bridge.serving.choices import REPLACEMENT_CHARACTER, Choice, Decode
from dlm_bridge.serving.scores import TokenScore

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
    "echo": (
        (None, False),
        "answers do not repeat the prompt, and a bidirectional model has no log probabilities of its tokens",
    ),
    "function_call": ((None, "none", "auto"), "use tool_choice"),
    "functions": ((None, []), "use tools"),
    "logit_bias": ((None, {}), "use suppress_tokens"),
    "modalities": ((None, ["text"]), "answers are text"),
    "prompt_logprobs": ((None,), "the log probabilities of a prompt are not computed: omit it"),
    "suffix": ((None, ""), "/v1/infill fills in the text between a prefix and a suffix"),
}
NO_TOOLS: Unsupported = {
    **dict.fromkeys(("parallel_tool_calls", "tool_choice"), ((None, False, True, "none", "auto"), "omit it")),
    "tools": ((None, []), "/v1/chat/completions calls tools"),
}
# Fields that state the format of a text; the extension `structured` reads them.
FORMATS = (
    "ebnf", "guided_choice", "guided_grammar", "guided_json", "guided_json_object", "guided_regex", "json_schema",
    "regex", "response_format", "structural_tag", "structured_outputs",
)  # fmt: skip
MAX_TOP_LOGPROBS = 20
MAX_BOUND_SAMPLES = 128
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
        constraint: the texts' format, see `FORMATS`; None: any text; a tuple with one for each span to fill in.
        format_field: name of the JSON field that states it.
        tools: the tools of a chat that may be called, a `ToolChoice` of the extension `structured`.
        logprobs: number of most probable tokens to list with the log probability of each token; None: neither.
        bound: forward passes of the bound of a text's log-likelihood; 0: no bound, None: no figures of sampling.
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
    constraint: Any = None
    format_field: str = ""
    tools: Any = None
    logprobs: int | None = None
    bound: int | None = None

    @property
    def prompt_field(self) -> str:
        """Name of the JSON field that contains the prompts."""
        return self.field or ("messages" if self.chat else "prompt")

    @property
    def constraint_field(self) -> str:
        """Name of the JSON field that constrains the texts."""
        return self.format_field or "tools"

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template, with the tools."""
        return self.template_args if self.tools is None else {**self.template_args, "tools": self.tools.tools}

    @property
    def scored(self) -> bool:
        """True if the answer has log probabilities or bounds."""
        return self.logprobs is not None or bool(self.bound)

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


class Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    type: str = Field(pattern="^function$")
    function: Function


class _FunctionName(BaseModel):
    model_config = STRICT
    name: str


class _NamedTool(BaseModel):
    model_config = STRICT
    type: str = Field(pattern="^function$")
    function: _FunctionName


class _Figures(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    elbo_samples: int = Field(0, ge=0, le=MAX_BOUND_SAMPLES)


class _StreamOptions(BaseModel):
    model_config = STRICT
    include_usage: bool | None = None


class Body(BaseModel):
    """Fields of all kinds of requests. Every other field is a setting of the sampler.

    A field's description completes the error message "FIELD must be ...".
    """

    model_config = ConfigDict(strict=True, extra="allow")
    dlm: _Figures | bool | None = Field(
        None, description=f'true, or an object such as {{"elbo_samples": 16}}, at most {MAX_BOUND_SAMPLES}'
    )
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

    def called_tools(self, functions: Sequence[Function], name: str | None, choice: Any, parallel: bool | None) -> Any:
        """`TextRequest.tools`: the functions that may be called. `name`: the only one of them, or None; `choice`: the
        field `tool_choice`. Raises RequestError."""
        if not functions:
            if choice not in (None, "none", "auto"):
                raise RequestError("tool_choice needs tools", param="tool_choice")
            return None
        names = [one.name for one in functions]
        if name is not None and name not in names:
            raise RequestError(f"tool_choice: {name} is not among the tools: {', '.join(names)}", param="tool_choice")
        if len({*names}) < len(names):
            raise RequestError("tools have a name twice", param="tools")
        if self.stop:
            raise RequestError("stop excludes tools: a stop string could end a call", param="stop")
        return extension("tools", "tools").ToolChoice(
            [{"type": "function", "function": one.model_dump(exclude_none=True)} for one in functions],
            required=name is not None or choice == "required",
            name=name,
            parallel=parallel is not False,
        )

    @property
    def bound(self) -> int | None:
        """`TextRequest.bound`."""
        return self.dlm.elbo_samples if isinstance(self.dlm, _Figures) else 0 if self.dlm else None


class _Completion(Body):
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description=f"a whole number from 0 to {MAX_TOP_LOGPROBS}"
    )
    prompt: str | Annotated[ListOf[int] | ListOf[str] | ListOf[ListOf[int]], Field(min_length=1)] = Field(
        description="a string, a list of token ids, or a list of either"
    )

    @property
    def prompts(self) -> dict[str, Any]:
        """Arguments of `TextRequest`."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return {"prompts": [self.prompt] if single else self.prompt, "logprobs": self.logprobs}


class _Chat(Body):
    messages: ListOf[_Message] = Field(
        min_length=1, description="a list of objects with a role and a content of text, both strings"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="a JSON object")
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description=f"a whole number from 0 to {MAX_TOP_LOGPROBS}"
    )
    tools: ListOf[_Tool] | None = Field(
        None, description='a list of objects such as {"type": "function", "function": {"name": "look_up", ...}}'
    )
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = Field(
        None, description='"none", "auto", "required" or {"type": "function", "function": {"name": "look_up"}}'
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")

    @property
    def prompts(self) -> dict[str, Any]:
        """Arguments of `TextRequest`. Raises RequestError for reserved names of template variables, and for fields
        that contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: set it to true", param="top_logprobs")
        template_args, name = self.chat_template_kwargs or {}, "chat_template_kwargs"
        try:
            check_template_args(template_args, name)
        except DlmBridgeError as error:
            raise RequestError(str(error), param=name) from None
        return {
            "messages": [with_read_arguments(each.model_dump()) for each in self.messages],
            "template_args": template_args,
            "logprobs": self.top_logprobs or 0 if self.logprobs else None,
            "tools": self.called_tools(
                [tool.function for tool in self.tools or ()],
                self.tool_choice.function.name if isinstance(self.tool_choice, _NamedTool) else None,
                self.tool_choice,
                self.parallel_tool_calls,
            ),
        }


def with_read_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as objects, as chat templates expect, in place of OpenAI's texts."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    read = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError, RecursionError):
                call = {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
        read.append(call)
    return {**message, "tool_calls": read}


class _Infill(Body):
    prompt: str | None = Field(None, description="a text with masks, [MASK] or [MASK:n]")
    prefix: str | None = Field(None, description="a text")
    suffix: str | None = Field(None, description="a text")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description=f"a whole number from 0 to {MAX_TOP_LOGPROBS}"
    )

    @property
    def prompts(self) -> dict[str, Any]:
        """Arguments of `TextRequest`. Raises RequestError for fields that do not say what to fill in."""
        return {**self._filled(), "infill": True, "logprobs": self.logprobs}

    def _filled(self) -> dict[str, Any]:
        length = self.max_tokens or self.max_completion_tokens
        if self.stop:
            raise RequestError("stop is not supported: the length of the masks is given", param="stop")
        if self.prompt is None:
            for name, value in (("prompt", self.prefix or self.suffix), ("max_tokens", length)):
                if value is None:
                    raise RequestError(
                        "set prompt (a text with [MASK] or [MASK:n]), or prefix, suffix and max_tokens", param=name
                    )
            return {"prompts": [InfillPrompt(self.prefix or "", self.suffix or "", length or 1)]}
        for name, value in (("prefix", self.prefix), ("suffix", self.suffix), ("max_tokens", length)):
            if value is not None:
                raise RequestError(f"{name} excludes prompt, in which [MASK:n] stands for n tokens", param=name)
        return {"prompts": [self.prompt]}


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
    unsupported |= {"dlm": ((None, False), "omit it")}
    fields, name, spans = read_fields(raw), "structured_outputs", ()
    if isinstance(fields.get(name), list):  # one constraint per span
        read = extension("structured output", name).read_constraint
        try:
            spans = tuple(read(one, f"{name}[{number}]") for number, one in enumerate(fields.pop(name)))
        except DlmBridgeError as error:
            raise RequestError(str(error), param=str(error.field)) from None
    request = text_request(_Infill, fields, chat=False, unsupported=unsupported)
    if not spans:
        return request
    if request.constraint is not None:
        raise RequestError(f"{request.format_field} excludes {name}: set one of them", param=name)
    return replace(request, constraint=spans, format_field=name)


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
    _refuse(fields, unsupported if chat else {**unsupported, **NO_TOOLS})
    formats = {name: fields.pop(name) for name in FORMATS if name in fields}
    stated = _stated(formats)
    body = _validated(kind, fields)
    prompts = body.prompts
    if stated is not None and prompts.get("tools") is not None:
        raise RequestError(
            f"{stated.field} excludes tools: a text has one constraint; set tool_choice to none, or omit one",
            param=stated.field,
        )
    settings = _settings(body)
    stored_seed = settings.pop("seed", None)  # in a generation_config
    if not (stored_seed is None or type(stored_seed) is int):
        raise RequestError("seed must be a whole number", param="seed")
    if body.stream_options is not None and body.stream_options.model_fields_set and not body.stream:
        raise RequestError("stream_options apply to streams only: set stream as well", param="stream_options")
    return TextRequest(
        chat=chat,
        **prompts,
        constraint=None if stated is None else stated.constraint,
        format_field="" if stated is None else stated.field,
        bound=body.bound,
        settings=settings,
        choices=body.n or 1,
        seed=body.seed if "seed" in body.model_fields_set else stored_seed,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def extension(feature: str, field: str) -> Any:
    """A module of the extension `structured`. Raises RequestError if it is not installed."""
    try:
        return load("features", feature)
    except DlmBridgeError as error:
        raise RequestError(f"{field} is not supported: {error}", param=field) from None


def _stated(formats: Mapping[str, Any]) -> Any:
    """The constraint that the fields of `FORMATS` state; None if they state none. Raises RequestError."""
    given = {name: value for name, value in formats.items() if value not in (None, {"type": "text"})}
    if not given:
        return None
    try:
        return extension("structured output", next(iter(given))).read_fields(given)
    except DlmBridgeError as error:
        field = str(error.field or next(iter(given)))
        raise RequestError(str(error), param=field) from None


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
        decode: text of tokens.
    """

    request: TextRequest
    model: str
    prompt_tokens: int
    decode: Decode = lambda tokens: ""
    offsets: dict[int, int] = field(default_factory=dict)  # characters of scored tokens so far, by choice
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
                message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
                if choice.calls:
                    message |= {"content": choice.text or None, "tool_calls": choice.calls}
                text = {"message": message}
            logprobs = self.logprobs(index, choice.scores)
            found.append({"index": index, **text, "logprobs": logprobs, "finish_reason": choice.finish_reason})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": found, "usage": self.usage(choices)}

    def opening(self, index: int) -> list[dict[str, Any]]:
        """First chunks of a choice: only chats have one."""
        return [self._chunk(index, {"role": "assistant", "content": ""}, None)] if self.chat else []

    def pieces(
        self,
        index: int,
        text: str,
        finish_reason: str | None,
        scores: Sequence[TokenScore] = (),
        calls: Sequence[dict[str, Any]] = (),
    ) -> list[dict[str, Any]]:
        """Chunks with a piece of a choice's text, and the scores and the calls of tools that are new."""
        logprobs = self.logprobs(index, scores)
        if self.chat:
            delta = ({"content": text} if text else {}) | ({"tool_calls": list(calls)} if calls else {})
            return [self._chunk(index, delta, finish_reason, logprobs)]
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return [{**self._head("text_completion"), "choices": [choice]}]

    def last(self, choices: Sequence[Choice]) -> list[Any]:
        """End of a stream, with the usage if it was asked for."""
        if not self.request.include_usage:
            return ["[DONE]"]
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return [{**self._head(kind), "choices": [], "usage": self.usage(choices)}, "[DONE]"]

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        new = sum(len(choice.tokens) for choice in choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
            **({} if self.request.bound is None else {"dlm": self._figures(choices)}),
        }

    def _figures(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Figures of the sampling of all texts; those of a single text are its bound and its constraint's."""
        forwards = sum(choice.forwards for choice in choices)
        new = sum(len(choice.tokens) for choice in choices)
        found: dict[str, Any] = {"forwards": forwards, "tokens_per_forward": new / max(forwards, 1)}
        first = choices[0]
        if first.log_mass is not None and len(choices) == 1:
            found["constraint_log_mass"] = first.log_mass
        if first.bound is not None:
            found |= {
                "elbo_nats": first.bound.value,
                "elbo_stderr": first.bound.error,
                "mc_samples": self.request.bound,
            }
        return found

    def logprobs(self, index: int, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        """Log probabilities of a choice's next tokens in OpenAI's format; None if the request does not ask for
        them."""
        if self.request.logprobs is None:
            return None
        if self.chat:
            return {"content": self.content_logprobs(scores), "refusal": None}
        tokens = [self._text(score.token) for score in scores]
        first = self.offsets.get(index, 0)
        offsets = list(accumulate(map(len, tokens), initial=first))
        self.offsets[index] = offsets.pop()
        return {
            "tokens": tokens,
            "token_logprobs": [score.logprob for score in scores],
            "top_logprobs": [{self._text(token): value for token, value in score.top} for score in scores],
            "text_offset": offsets,
        }

    def content_logprobs(self, scores: Sequence[TokenScore]) -> list[dict[str, Any]]:
        """Entries of `logprobs.content`."""
        return [
            {
                **self._token(score.token, score.logprob),
                "top_logprobs": [self._token(token, value) for token, value in score.top],
            }
            for score in scores
        ]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        incomplete = REPLACEMENT_CHARACTER in text  # a part of a character
        return {"token": text, "logprob": logprob, "bytes": None if incomplete else list(text.encode())}

    def _text(self, token: int) -> str:
        return self.decode([token])

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
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
            found.append({"index": index, "text": choice.text, **self.filled(choice), "finish_reason": "stop"})
        head = {"id": f"infill-{self.id}", "object": "infill", "created": self.created, "model": self.model}
        return {**head, "choices": found, "usage": self.usage(choices)}

    def filled(self, choice: Choice) -> dict[str, Any]:
        """The text in place of each run of masks and, if asked for, the log probabilities of its tokens."""
        found: dict[str, Any] = {"infills": choice.infills}
        if self.request.logprobs is not None:
            runs = choice.runs
            scores = None if runs is None else [choice.scores[begin:end] for begin, end in runs]
            found["logprobs"] = scores and [{"content": self.content_logprobs(own)} for own in scores]
        return found

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Token counts: the texts' tokens include those of the prompt."""
        new = sum(len(choice.tokens) - self.prompt_tokens for choice in choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": new,
            "total_tokens": self.prompt_tokens + new,
        }
