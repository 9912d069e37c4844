"""Calls of tools: the language of a text with calls, and its parts.

The format of a call is the one that the model's chat template writes and asks for:

    <tool_call>                                         Hermes, Qwen, SmolLM2 and others
    {"name": "look_up", "arguments": {"word": "tide"}}
    </tool_call>

    {"name": "look_up", "arguments": {"word": "tide"}}  templates without these tags
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlm_bridge.errors import SettingError
from dlm_bridge.structured.composed import tools_constraint
from dlm_bridge.structured.constraint import Constraint


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a call.

    Args:
        begin, end: texts around the JSON; empty: the JSON alone.
        separator: text between two calls.
    """

    begin: str = ""
    end: str = ""
    separator: str = ""

    @classmethod
    def of(cls, chat_template: str | Mapping[str, str] | None) -> ToolFormat:
        """Format of a chat template, or of the one of several that transformers uses with tools."""
        if isinstance(chat_template, Mapping):
            chat_template = chat_template.get("tool_use", chat_template.get("default"))
        template = chat_template or ""
        if "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder's calls are XML
            return cls("<tool_call>\n", "\n</tool_call>", "\n")
        return cls()


@dataclass(frozen=True)
class ToolChoice:
    """Which tools a text may or must call.

    Args:
        tools: the tools as OpenAI's requests have them.
        required: the text is a call; otherwise it may also be a text without a call.
        name: the only tool that may be called; None: all.
        parallel: several calls are allowed.
    """

    tools: Sequence[Mapping[str, Any]]
    required: bool = False
    name: str | None = None
    parallel: bool = True

    def parser(self, chat_template: str | Mapping[str, str] | None) -> CallParser:
        """Parser of the calls in a text under this choice."""
        return CallParser(ToolFormat.of(chat_template))

    def constraint(self, chat_template: str | Mapping[str, str] | None) -> Constraint:
        """The texts that these tools allow in the format of a chat template. Raises SettingError for a choice that the
        format does not have."""
        style = ToolFormat.of(chat_template)
        if not self.required and not style.begin:
            raise SettingError(
                "tool_choice",
                "auto needs a chat template that marks calls with <tool_call>: without a mark, a text and a call "
                'cannot be told apart; set it to "required" or to a function',
            )
        functions = [tool["function"] for tool in self.tools]
        chosen = [(one["name"], one.get("parameters")) for one in functions if self.name in (None, one["name"])]
        several = self.parallel and self.name is None and bool(style.begin)
        return tools_constraint(
            chosen,
            (style.begin, style.end, style.separator),
            required=self.required,
            several=several,
        )


@dataclass
class CallParser:
    """Incremental parser of a text with calls.

    A piece of content never ends inside the possible beginning of a call. A call is returned when it is complete, with
    all its arguments.
    """

    style: ToolFormat
    _held: str = ""
    _inside: bool = False
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, piece: str, *, last: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Content and calls that a piece of the text completes; `last`: no text follows."""
        self._held += piece
        content, first = "", len(self.calls)
        if not self.style.begin:
            if last and self._held and not self._call(self._held):
                content = self._held
            return content, self.calls[first:]
        begin, end = self.style.begin.strip(), self.style.end.strip()
        while True:
            if self._inside:
                # An argument may contain the end's text: only the JSON before the true one is complete.
                place = self._held.find(end)
                while place >= 0 and not self._call(self._held[:place]):
                    place = self._held.find(end, place + 1)
                mark = end
            else:
                mark, place = begin, self._held.find(begin)
                content += self._text(self._held[: max(place, 0)])
            if place < 0:
                break
            self._held = self._held[place + len(mark) :]
            self._inside = not self._inside
        if not self._inside:
            held = 0 if last else _overlap(self._held, begin)
            content += self._text(self._held[: len(self._held) - held])
            self._held = self._held[len(self._held) - held :]
        elif last:  # only without a constraint
            content, self._held = content + begin + self._held, ""
        return content, self.calls[first:]

    def _text(self, part: str) -> str:
        """A part of the content, without the blanks between two calls."""
        return part if part.strip() or not self.calls else ""

    def _call(self, text: str) -> bool:
        """Add the call of a JSON text. False if it is not one."""
        try:
            found = json.loads(text)
            name, arguments = found["name"], found["arguments"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        # The arguments as the model wrote them: a second serialization could change numbers.
        raw = text.strip()[:-1].partition('"arguments": ')[2]
        arguments = raw if _equal(raw, arguments) else json.dumps(arguments, ensure_ascii=False)
        call = {"name": name, "arguments": arguments}
        self.calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": call})
        return True


def _equal(text: str, value: Any) -> bool:
    try:
        return bool(json.loads(text) == value)
    except ValueError:
        return False


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that is a beginning of the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
