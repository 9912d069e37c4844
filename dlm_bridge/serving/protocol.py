"""OpenAI's completions and chat completions: what a request says, and the bodies of answers and errors."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlm_bridge.errors import DlmBridgeError, shortened
from dlm_bridge.generation.prompts import check_template_args
from dlm_bridge.serving.choices import Choice

# Fields of OpenAI's that say nothing about the text.
IGNORED = (
    "metadata", "model", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
    "user",
)  # fmt: skip
# Fields of OpenAI's that no sampler here can follow, with the values that ask for nothing, and what to do instead.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((None,), "answers are text"),
    "best_of": ((None, 1), "use n"),
    "echo": ((None, False), "the prompt is not repeated"),
    "frequency_penalty": ((None, 0), "use repetition_penalty"),
    "function_call": ((None, "none", "auto"), "functions are not called: leave it out"),
    "functions": ((None, []), 'functions are not called: leave it out, or set function_call to "none"'),
    "logit_bias": ((None, {}), "use suppress_tokens"),
    "logprobs": (
        (None, False),
        "a token's probability in the step that committed it is no log probability of the text: leave it out",
    ),
    "modalities": ((None, ["text"]), "answers are text"),
    "parallel_tool_calls": ((None, False, True), "tools are not called: leave it out"),
    "prediction": ((None,), "leave it out"),
    "presence_penalty": ((None, 0), "use repetition_penalty"),
    "reasoning_effort": ((None,), "leave it out"),
    "response_format": ((None, {"type": "text"}), "the text's format cannot be forced: leave it out"),
    "suffix": ((None, ""), "dlm-bridge generate --infill fills in"),
    "tool_choice": ((None, "none", "auto"), "tools are not called: leave it out"),
    "tools": ((None, []), 'tools are not called: leave it out, or set tool_choice to "none"'),
    "top_logprobs": ((None, 0), "leave it out"),
    "verbosity": ((None,), "leave it out"),
    "web_search_options": ((None,), "leave it out"),
}
# Settings of `generate` that are the server's own to choose, or that change what an answer is.
NOT_OF_A_REQUEST = {
    "device": "--device is an option of the server",
    "execution": "--set execution=... is an option of the server",
    "infill": "dlm-bridge generate --infill fills in",
    "num_return_sequences": "use n",
    "output_history": "/v1/commits streams every commit",
    "return_dict_in_generate": "leave it out",
    "span_lengths": "dlm-bridge generate --infill fills in",
    "stop_strings": "use stop",
    "streamer": "use stream",
    "generator": "use seed",
    "tokenizer": "--tokenizer is an option of the server",
}
MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_LENGTH = 4, 256  # strings, as OpenAI's; characters of each
MAX_SETTINGS = 65_536  # characters of a request's settings of the sampler, as JSON


class RequestError(Exception):
    """A request that is not answered with a text.

    Args:
        kind: OpenAI's `type` of the error.
        param: the field at fault.
        retry_after_s: seconds for the header of that name.
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
class TextRequest:
    """What a request asks for.

    Args:
        chat: answer as a chat completion.
        prompts: texts or token ids; empty for a chat.
        messages: of a chat.
        template_args: variables of the chat template (`chat_template_kwargs`).
        settings: of the sampler, without a seed.
        choices: texts for each prompt.
        include_usage: a stream ends with the usage.
    """

    chat: bool
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    template_args: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    choices: int = 1
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False

    @property
    def texts(self) -> int:
        """The number of texts that it asks for."""
        return max(len(self.prompts), 1) * self.choices


def parse_request(raw: bytes, chat: bool | None) -> TextRequest:
    """The request in a body. `chat` None: a chat where it has messages. Raises RequestError."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    if chat is None:
        chat = "messages" in body
    for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if body.get(choice) == "none":  # none of them is to be called
            body.pop(tools, None)
    _refuse(body)
    own = {"messages", "chat_template_kwargs"} if chat else {"prompt"}
    own |= {
        "generation_config", "ignore_eos", "max_completion_tokens", "max_tokens", "n", "seed", "stop", "stream",
        "stream_options",
    }  # fmt: skip
    settings = _generation_config(body.get("generation_config"))
    settings |= {name: value for name, value in body.items() if name not in {*own, *IGNORED, *REFUSED}}
    for name in settings:
        if name in NOT_OF_A_REQUEST:
            raise RequestError(f"{name}: {NOT_OF_A_REQUEST[name]}", param=name)
    settings = {name: value for name, value in settings.items() if value is not None or name == "eos_token_id"}
    if settings.get("top_k") == -1:  # vLLM's way to say: of all tokens
        settings["top_k"] = 0
    if _flag(body, "ignore_eos"):
        settings["eos_token_id"] = None
    length = _same(body, "max_tokens", "max_completion_tokens")
    if length is not None:
        settings.pop("max_new_tokens", None)
        settings["gen_length"] = _whole("max_tokens", length, 1)
    stop = body.get("stop")
    if stop:
        strings = stop if isinstance(stop, list) else [stop]
        if not all(isinstance(string, str) and string for string in strings):
            raise RequestError("stop must be a string or a list of strings, none empty", param="stop")
        if len(strings) > MAX_STOPS or max(map(len, strings)) > MAX_STOP_LENGTH:
            raise RequestError(
                f"stop must be at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters", param="stop"
            )
        settings["stop_strings"] = [_text("stop", string) for string in strings]
    sizes = {name: len(json.dumps(value)) for name, value in settings.items()}
    if sum(sizes.values()) > MAX_SETTINGS:
        largest = max(sizes, key=lambda name: sizes[name])
        raise RequestError(f"{largest}: settings are limited to {MAX_SETTINGS} characters", param=largest)
    stored_seed = settings.pop("seed", None)  # of a generation_config
    seed = body.get("seed", stored_seed)
    stream = _flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RequestError("stream_options must be an object", param="stream_options")
    if options and not stream:
        raise RequestError("stream_options are those of a stream: set stream as well", param="stream_options")
    return TextRequest(
        chat=chat,
        prompts=() if chat else _prompts(body.get("prompt")),
        messages=_messages(body.get("messages")) if chat else (),
        template_args=_template_args(body.get("chat_template_kwargs")) if chat else {},
        settings=settings,
        choices=_whole("n", 1 if body.get("n") is None else body["n"], 1, MAX_CHOICES),
        seed=None if seed is None else _whole("seed", seed),
        stream=stream,
        include_usage=_flag(options or {}, "include_usage"),
    )


@dataclass(frozen=True)
class AnswerBodies:
    """The bodies of one answer.

    Args:
        model: the served model's name.
        prompt_tokens: of all prompts.
    """

    chat: bool
    model: str
    prompt_tokens: int
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        found = []
        for index, choice in enumerate(choices):
            text: dict[str, Any] = {"text": choice.text}
            if self.chat:
                text = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
            found.append({"index": index, **text, "logprobs": None, "finish_reason": choice.finish_reason})
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": found, "usage": self.usage(choices)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a chat's choice."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None) if self.chat else None

    def piece(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A chunk with a piece of a choice's text."""
        if self.chat:
            return self._chunk(index, {"content": text} if text else {}, finish_reason)
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("text_completion"), "choices": [choice]}

    def last(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The chunk with the usage."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": self.usage(choices)}

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


def _refuse(body: Mapping[str, Any]) -> None:
    for name, (nothing, remedy) in REFUSED.items():
        if name in body and not any(type(body[name]) is type(one) and body[name] == one for one in nothing):
            if isinstance(body[name], float) and body[name] in nothing:
                continue
            raise RequestError(f"{name} is not supported: {remedy}", param=name)


def _generation_config(value: Any) -> dict[str, Any]:
    """The settings in a `generation_config`, an object or its JSON, as `transformers chat` sends it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RequestError("generation_config is not JSON", param="generation_config") from None
    if value is not None and not isinstance(value, dict):
        raise RequestError("generation_config must be a JSON object", param="generation_config")
    return dict(value or {})


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """A text, token ids, or a list of either."""
    if isinstance(value, str):
        return (_text("prompt", value),)
    if isinstance(value, list) and value:
        if all(_is_whole(token) for token in value):
            return (tuple(value),)
        if all(isinstance(one, str) for one in value):
            return tuple(_text("prompt", one) for one in value)
        if all(isinstance(one, list) and all(_is_whole(token) for token in one) for one in value):
            return tuple(tuple(one) for one in value)
    raise RequestError("prompt must be a string, a list of token ids, or a list of either", param="prompt")


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    """A conversation; contents in parts of text are joined."""
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise RequestError("messages must be a list of objects with role and content", param="messages")
    found = []
    for number, message in enumerate(value):
        where = f"messages[{number}]"
        content = message.get("content")
        if content is None and message.get("role") == "assistant":  # it called a tool
            content = ""
        if isinstance(content, list):
            parts = [part.get("text", part.get("refusal")) if isinstance(part, dict) else None for part in content]
            if any(not isinstance(part, str) for part in parts):
                raise RequestError(f"{where}.content has a part that is not text", param=where)
            content = "".join(map(str, parts))
        if not isinstance(message.get("role"), str) or not isinstance(content, str):
            raise RequestError(f"{where} must have a role and a content, both strings", param=where)
        found.append({**message, "content": _text(where, content)})
    return tuple(found)


def _template_args(value: Any) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if value is not None and not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object", param=name)
    try:
        check_template_args(value or {}, name)
    except DlmBridgeError as error:
        raise RequestError(str(error), param=name) from None
    return dict(value or {})


def _text(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} holds a lone surrogate, which is not a character", param=name) from None
    return text


def _same(body: Mapping[str, Any], name: str, other: str) -> Any:
    values = {one: body[one] for one in (name, other) if body.get(one) is not None}
    if len(values) == 2 and body[name] != body[other]:
        raise RequestError(f"{name} and {other} are the same: give one of them", param=name)
    return next(iter(values.values()), None)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(name: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    low, high = minimum is not None, maximum is not None
    if not _is_whole(value) or (low and value < (minimum or 0)) or (high and value > (maximum or 0)):
        bounds = f" from {minimum} to {maximum}" if high else f", {minimum} or above" if low else ""
        raise RequestError(f"{name} must be a whole number{bounds}, not {str(value)[:40]}", param=name)
    return int(value)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false", param=name)
    return bool(value)
