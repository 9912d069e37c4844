"""OpenAI's Responses API: validation of requests, and the bodies and events of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dlm_bridge.serving.choices import Choice
from dlm_bridge.serving.protocol import (
    MAX_TOP_LOGPROBS,
    UNSUPPORTED,
    AnswerBodies,
    Body,
    Function,
    ListOf,
    RequestError,
    TextPart,
    TextRequest,
    Unsupported,
    read_fields,
    text_request,
    with_read_arguments,
)
from dlm_bridge.serving.scores import TokenScore

LOGPROBS = "message.output_text.logprobs"  # the value of `include` that asks for log probabilities
_STATELESS = "nothing is stored here: send the whole conversation as input"
# As `UNSUPPORTED`, in this API.
UNSUPPORTED_HERE: Unsupported = {
    **UNSUPPORTED,
    **dict.fromkeys(("conversation", "previous_response_id"), ((None,), _STATELESS)),
    **dict.fromkeys(("max_completion_tokens", "max_tokens"), ((None,), "use max_output_tokens")),
    **dict.fromkeys(("moderation", "prompt", "reasoning"), ((None,), "omit it")),
    "background": ((None, False), "set stream, or wait for the answer"),
    "include": ((None, [], [LOGPROBS]), f"only {LOGPROBS} is supported"),
    "logprobs": ((None,), f"use include: [{LOGPROBS}]"),
    "max_tool_calls": ((None,), "parallel_tool_calls: false allows one call"),
    "messages": ((), "use input"),
    "n": ((None, 1), "an answer has one text: send several requests"),
    "stream_options": ((None, {}, {"include_obfuscation": False}), "omit it"),
    "truncation": ((None, "disabled"), "shorten the input"),
}
ROLES = {"developer": "system"}  # names of roles that chat templates do not have


class _Item(BaseModel):
    model_config = ConfigDict(strict=True)
    type: str = Field(default="message", pattern="^message$")
    role: str
    content: str | ListOf[TextPart]

    @model_validator(mode="after")
    def _join_parts(self) -> Self:
        if isinstance(self.content, list):
            self.content = "".join(part.text for part in self.content)
        return self


class _Call(BaseModel):
    model_config = ConfigDict(strict=True)
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _CallOutput(BaseModel):
    model_config = ConfigDict(strict=True)
    type: Literal["function_call_output"]
    call_id: str
    output: str | ListOf[TextPart]


class _Tool(Function):
    type: str = Field(pattern="^function$")


class _NamedTool(BaseModel):
    model_config = ConfigDict(strict=True)
    type: str = Field(pattern="^function$")
    name: str


class _Text(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    format: dict[str, Any] | None = None


class _Response(Body):
    input: str | ListOf[_Item | _Call | _CallOutput] = Field(
        min_length=1,
        description="a text, or a list of messages with a role and a content of text, of function_call and "
        "function_call_output",
    )
    instructions: str | None = Field(None, description="a text")
    include: ListOf[str] | None = Field(None, description=f'["{LOGPROBS}"]')
    max_output_tokens: int | None = Field(None, ge=1, description="a whole number of at least 1")
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None,
        max_length=16,
        description="an object of at most 16 texts of at most 512 characters, with names of at most 64",
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    text: _Text | None = Field(None, description="an object with a format")
    tools: ListOf[_Tool] | None = Field(
        None, description='a list of objects such as {"type": "function", "name": "look_up", ...}'
    )
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = Field(
        None, description='"none", "auto", "required" or {"type": "function", "name": "look_up"}'
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description=f"a whole number from 0 to {MAX_TOP_LOGPROBS}"
    )

    @model_validator(mode="after")
    def _rename_length(self) -> Self:
        self.max_tokens = self.max_output_tokens
        return self

    @property
    def prompts(self) -> dict[str, Any]:
        """Arguments of `TextRequest`."""
        messages = _messages([_Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if self.top_logprobs and not self.include:
            raise RequestError(f"top_logprobs needs include: [{LOGPROBS}]", param="top_logprobs")
        if self.include and self.tools:
            raise RequestError(f"include: {LOGPROBS} excludes tools: they are of an answer's text", param="include")
        choice = self.tool_choice
        return {
            "messages": messages,
            "field": "input",
            "logprobs": self.top_logprobs or 0 if self.include else None,
            "tools": self.called_tools(
                [Function(**tool.model_dump(exclude={"type", "strict"})) for tool in self.tools or ()],
                choice.name if isinstance(choice, _NamedTool) else None,
                choice,
                self.parallel_tool_calls,
            ),
        }


def _messages(items: Sequence[_Item | _Call | _CallOutput]) -> list[dict[str, Any]]:
    """The items as messages of a chat. Calls belong to the assistant's message before them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, _Item):
            messages.append({"role": ROLES.get(item.role, item.role), "content": item.content})
        elif isinstance(item, _CallOutput):
            parts = [item.output] if isinstance(item.output, str) else [part.text for part in item.output]
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": "".join(parts)})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    return [with_read_arguments(message) for message in messages]


@dataclass(frozen=True)
class ResponseRequest(TextRequest):
    """A validated request, with what its answer repeats.

    Args:
        stated_tools: the fields about tools.
    """

    instructions: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    stated_tools: dict[str, Any] = field(default_factory=dict)


def parse_response(raw: bytes) -> ResponseRequest:
    """Validate the body of a request. Raises RequestError as `parse_request`."""
    fields = read_fields(raw)
    if fields.get("response_format") is not None:
        raise RequestError("response_format is not supported: use text.format", param="response_format")
    choice, parallel = fields.get("tool_choice"), fields.get("parallel_tool_calls")
    stated = {"tools": fields.get("tools") or [], "tool_choice": "auto" if choice is None else choice}
    stated["parallel_tool_calls"] = parallel is not False
    text = fields.get("text")
    if isinstance(text, dict) and isinstance(text.get("format"), dict):
        fields = {**fields, "response_format": text["format"], "text": {**text, "format": {}}}
    try:
        found = text_request(_Response, fields, chat=True, unsupported=UNSUPPORTED_HERE)
    except RequestError as error:
        if not str(error.body["error"]["param"]).startswith("response_format"):
            raise
        message = str(error).replace("response_format", "text.format")
        raise RequestError(message, param="text") from None
    return ResponseRequest(
        **vars(found),
        instructions=fields.get("instructions"),
        metadata=fields.get("metadata") or {},
        stated_tools=stated if stated["tools"] else {},
    )


@dataclass(frozen=True)
class ResponseBodies(AnswerBodies):
    """Body of a response, and the events of its stream.

    A stream without tools begins with its message. With tools, the message begins with its text and ends before the
    first call.
    """

    request: ResponseRequest
    sent: list[str] = field(default_factory=list)  # types of the events so far
    deltas: list[str] = field(default_factory=list)  # of the message

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Body of a finished response."""
        (choice,) = choices
        return self._response(choice)

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Events before the text."""
        return [
            self._event("response.created", response=self._response(None)),
            self._event("response.in_progress", response=self._response(None)),
            *([] if self.request.tools is not None else self._begin_message()),
        ]

    def pieces(
        self,
        index: int,
        text: str,
        finish_reason: str | None,
        scores: Sequence[TokenScore] = (),
        calls: Sequence[dict[str, Any]] = (),
    ) -> list[dict[str, Any]]:
        """Events with a piece of the text, and with new calls."""
        events: list[dict[str, Any]] = []
        if text or self.request.tools is None:
            events += [] if self._began else self._begin_message()
            logprobs = self._scores(scores)
            self.deltas.append(text)
            events.append(self._event("response.output_text.delta", **self._place, delta=text, logprobs=logprobs))
        for call in calls:
            if self._began and not self._ended:
                events += self._end_message("".join(self.deltas), "completed")
            events += self._call_events(call)
        return events

    def last(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Events after the text."""
        (choice,) = choices
        response = self._response(choice)
        events: list[dict[str, Any]] = []
        if not self._ended and (self._began or not choice.calls):
            events += [] if self._began else self._begin_message()
            events += self._end_message(choice.text, _status(choice), choice.scores)
        return [*events, self._event(f"response.{response['status']}", response=response)]

    @property
    def _began(self) -> bool:
        """True if the stream has a message."""
        return "response.content_part.added" in self.sent

    @property
    def _ended(self) -> bool:
        """True if the stream's message is complete."""
        return "response.content_part.done" in self.sent

    def _begin_message(self) -> list[dict[str, Any]]:
        return [
            self._event("response.output_item.added", output_index=0, item=self._message("in_progress")),
            self._event("response.content_part.added", **self._place, part=_text_part("")),
        ]

    def _end_message(self, text: str, status: str, scores: Sequence[TokenScore] = ()) -> list[dict[str, Any]]:
        logprobs = self._scores(scores)
        part = _text_part(text, logprobs)
        return [
            self._event("response.output_text.done", **self._place, text=text, logprobs=logprobs),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=self._message(status, part)),
        ]

    def _call_events(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Events of a call, whose arguments are final."""
        whole = _call_item(call)
        place = {"item_id": whole["id"], "output_index": call["index"] + self._began}
        empty = {**whole, "arguments": "", "status": "in_progress"}
        name, arguments = "response.function_call_arguments", whole["arguments"]
        return [
            self._event("response.output_item.added", output_index=place["output_index"], item=empty),
            self._event(f"{name}.delta", **place, delta=arguments),
            self._event(f"{name}.done", **place, name=whole["name"], arguments=arguments),
            self._event("response.output_item.done", output_index=place["output_index"], item=whole),
        ]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self.id}", "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.sent.append(kind)
        return {"type": kind, "sequence_number": len(self.sent) - 1, **fields}

    def _scores(self, scores: Sequence[TokenScore]) -> list[dict[str, Any]]:
        return [] if self.request.logprobs is None else self.content_logprobs(scores)

    def _message(self, status: str, *parts: dict[str, Any]) -> dict[str, Any]:
        """The output item with the text."""
        head = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "content": list(parts)}
        return {**head, "status": status}

    def _output(self, choice: Choice) -> list[dict[str, Any]]:
        """The output items: a message, unless there are calls only, and the calls."""
        calls = [_call_item(call) for call in choice.calls]
        if calls and not choice.text:
            return calls
        return [self._message(_status(choice), _text_part(choice.text, self._scores(choice.scores))), *calls]

    def _response(self, choice: Choice | None) -> dict[str, Any]:
        status, usage, settings = _status(choice), None, self.request.settings
        if choice is not None:
            tokens = self.usage([choice])
            usage = {
                "input_tokens": tokens["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": tokens["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tokens["total_tokens"],
                **({"dlm": tokens["dlm"]} if "dlm" in tokens else {}),
            }
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self.request.instructions,
            "max_output_tokens": settings.get("gen_length"),
            "model": self.model,
            "output": [] if choice is None else self._output(choice),
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": settings.get("temperature"),
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": settings.get("top_p"),
            "truncation": "disabled",
            "usage": usage,
            "metadata": self.request.metadata,
            **self.request.stated_tools,
        }


def _status(choice: Choice | None) -> str:
    if choice is None:
        return "in_progress"
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _call_item(call: dict[str, Any]) -> dict[str, Any]:
    """Output item of a call of a chat's message."""
    head = {"id": f"fc_{call['id'].removeprefix('call_')}", "type": "function_call", "status": "completed"}
    return {**head, "call_id": call["id"], **call["function"]}


def _text_part(text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
