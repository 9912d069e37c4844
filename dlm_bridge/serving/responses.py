"""OpenAI's Responses API: validation of requests, and the bodies and events of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dlm_bridge.serving.choices import Choice
from dlm_bridge.serving.protocol import (
    UNSUPPORTED,
    AnswerBodies,
    Body,
    ListOf,
    TextPart,
    TextRequest,
    Unsupported,
    read_fields,
    text_request,
)

_STATELESS = "nothing is stored here: send the whole conversation as input"
# As `UNSUPPORTED`, in this API.
UNSUPPORTED_HERE: Unsupported = {
    **UNSUPPORTED,
    **dict.fromkeys(("conversation", "previous_response_id"), ((None,), _STATELESS)),
    **dict.fromkeys(("max_completion_tokens", "max_tokens"), ((None,), "use max_output_tokens")),
    **dict.fromkeys(("moderation", "prompt", "reasoning"), ((None,), "omit it")),
    "background": ((None, False), "set stream, or wait for the answer"),
    "include": ((None, []), "omit it"),
    "max_tool_calls": ((None,), "tools are not called: omit it"),
    "messages": ((), "use input"),
    "n": ((None, 1), "an answer has one text: send several requests"),
    "stream_options": ((None, {}, {"include_obfuscation": False}), "omit it"),
    "text": ((None, {}, {"format": {"type": "text"}}), "the format of the text cannot be forced: omit it"),
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


class _Response(Body):
    input: str | ListOf[_Item] = Field(
        min_length=1, description="a text, or a list of messages with a role and a content of text"
    )
    instructions: str | None = Field(None, description="a text")
    max_output_tokens: int | None = Field(None, ge=1, description="a whole number of at least 1")
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = Field(
        None,
        max_length=16,
        description="an object of at most 16 texts of at most 512 characters, with names of at most 64",
    )

    @model_validator(mode="after")
    def _rename_length(self) -> Self:
        self.max_tokens = self.max_output_tokens
        return self

    @property
    def prompts(self) -> dict[str, Any]:
        """Arguments of `TextRequest`."""
        items = [_Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = [{"role": ROLES.get(item.role, item.role), "content": item.content} for item in items]
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return {"messages": messages, "field": "input"}


@dataclass(frozen=True)
class ResponseRequest(TextRequest):
    """A validated request, with what its answer repeats."""

    instructions: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)


def parse_response(raw: bytes) -> ResponseRequest:
    """Validate the body of a request. Raises RequestError as `parse_request`."""
    given = read_fields(raw)
    found = text_request(_Response, given, chat=True, unsupported=UNSUPPORTED_HERE)
    return ResponseRequest(**vars(found), instructions=given.get("instructions"), metadata=given.get("metadata") or {})


@dataclass(frozen=True)
class ResponseBodies(AnswerBodies):
    """Body of a response, and the events of its stream."""

    request: ResponseRequest
    sent: list[str] = field(default_factory=list)  # types of the events so far

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Body of a finished response."""
        (choice,) = choices
        return self._response(choice)

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Events before the text."""
        return [
            self._event("response.created", response=self._response(None)),
            self._event("response.in_progress", response=self._response(None)),
            self._event("response.output_item.added", output_index=0, item=self._message(None)),
            self._event("response.content_part.added", **self._place, part=_text_part("")),
        ]

    def piece(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """Event with a piece of the text."""
        return self._event("response.output_text.delta", **self._place, delta=text, logprobs=[])

    def last(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """Events after the text."""
        (choice,) = choices
        response, text = self._response(choice), choice.text
        return [
            self._event("response.output_text.done", **self._place, text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place, part=_text_part(text)),
            self._event("response.output_item.done", output_index=0, item=self._message(choice)),
            self._event(f"response.{response['status']}", response=response),
        ]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self.id}", "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.sent.append(kind)
        return {"type": kind, "sequence_number": len(self.sent) - 1, **fields}

    def _message(self, choice: Choice | None) -> dict[str, Any]:
        """The output item. None: before its text."""
        content = [] if choice is None else [_text_part(choice.text)]
        head = {"id": f"msg_{self.id}", "type": "message", "role": "assistant", "content": content}
        return {**head, "status": _status(choice)}

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
            "output": [] if choice is None else [self._message(choice)],
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
        }


def _status(choice: Choice | None) -> str:
    if choice is None:
        return "in_progress"
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
