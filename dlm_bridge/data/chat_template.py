"""Chat templates: rendering of conversations, and the character spans of their answers.

A template with {% generation %} marks answers itself. For other templates, the rendering of the whole conversation is
compared with the rendering of its beginning:

    all messages                              ... <user> hi <end> <assistant> yes <end> <user> ...
    messages[:i] with the generation prompt   ... <user> hi <end> <assistant>

Answer i starts at the end of this prompt. It includes everything that the template writes after the message's text and
before the next header. To find the end of the text, the conversation is rendered again with the text replaced by a
character that does not occur elsewhere: both renderings are equal from the end of the text on. The conversation is
never searched for a text.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from transformers.utils.chat_template_utils import render_jinja_template

from dlm_bridge.data.messages import Conversation
from dlm_bridge.errors import CheckpointError, InputFileError, SettingError, one_line
from dlm_bridge.files.reading import reading

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
REMEDY = "set `chat_template` to one that marks answers with {% generation %}, as TRL's training templates do"
PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True)
class RenderedConversation:
    """Rendered conversation with the spans (start, end) of its answers."""

    text: str
    answers: list[tuple[int, int]]
    where: str
    templated: bool = True  # False: plain text from the row, without a template


def set_chat_template(tokenizer: Any, name: str) -> None:
    """Set a tokenizer's chat template: a file, or the name of one of its own templates or of one that the installed
    TRL ships. Raises SettingError."""
    own = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    shipped = importlib.util.find_spec("trl")
    folder = Path(shipped.origin).parent / "chat_templates" if shipped and shipped.origin else None
    if name in own:
        tokenizer.chat_template = own[name]
        return
    path = Path(name)
    if not path.is_file() and folder is not None and re.fullmatch(r"[\w.-]+", name):
        path = folder / f"{name}.jinja"
    if not path.is_file():
        known = sorted([*own, *(file.stem for file in (folder.glob("*.jinja") if folder else ()))])
        listed = f"; known names: {', '.join(known)}" if known else ", and TRL, which ships some, is not installed"
        raise SettingError("chat_template", f"{name} is neither a file nor the name of a template{listed}")
    with reading(path, "not UTF-8 text", kind=InputFileError):
        tokenizer.chat_template = path.read_text("utf-8")


def check_template(tokenizer: Any, where: str) -> None:
    """Raise CheckpointError for a tokenizer without a chat template."""
    if tokenizer.chat_template is None:
        raise CheckpointError(
            tokenizer.name_or_path or "tokenizer",
            f"the tokenizer has no chat template, which {where} needs: set `chat_template`, or `tokenizer` to one "
            "with a template, or use texts instead of messages",
        )


def render_prompt(conversation: Conversation, tokenizer: Any) -> str:
    """Render messages with the generation prompt. Raises InputFileError if the template refuses them."""
    check_template(tokenizer, conversation.where)
    return _Renderings(conversation, tokenizer, prompt=True).whole


def render_answers(conversation: Conversation, tokenizer: Any) -> RenderedConversation:
    """Render messages, with the spans of trained answers.

    Raises:
        InputFileError: the template refuses the messages, omits one of them, or renders them so that an answer cannot
            be distinguished from the text around it.
    """
    check_template(tokenizer, conversation.where)
    renderings = _Renderings(conversation, tokenizer)
    spans = renderings.marked_spans()
    if spans is None:
        spans = [renderings.span(number) for number in conversation.answers]
    return RenderedConversation(renderings.whole, spans, conversation.where)


class _Renderings:
    """Renderings of a conversation and of parts of it. Messages are numbered from 0."""

    def __init__(self, conversation: Conversation, tokenizer: Any, prompt: bool = False) -> None:
        self._conversation, self._tokenizer, self._where = conversation, tokenizer, conversation.where
        self._template = tokenizer.get_chat_template(tools=conversation.tools)
        self._settings = dict(tokenizer.special_tokens_map)
        self._messages, self.whole = self._accepted(conversation.messages, prompt)
        self._count = len(self._messages)
        self._other = next(chr(code) for code in PRIVATE_USE if chr(code) not in self.whole)
        self._text = functools.cache(self._text_of)
        self._appended = ""
        if prompt:
            return
        self._check_tool_calls()
        if self._text(self._count, prompt=True) == self.whole:
            # The template ends with the header of an answer whatever it is asked for, or never writes one here.
            self._appended = self._header(self._count)
            if not self._appended and self._text(0, prompt=True) is None and not self._header_behind_user(self._count):
                raise self._refused("writes the same with and without the header of an answer at the end")
            self.whole = self.whole.removesuffix(self._appended)

    def marked_spans(self) -> list[tuple[int, int]] | None:
        """Spans that {% generation %} marks in trained messages; None if the template marks none."""
        if not MARKED.search(self._template):
            return None
        text, spans = self._apply(self._messages, marks=True)
        if not spans or not text.startswith(self.whole):
            return None
        answers = self._conversation.answers
        if len(answers) == sum(message["role"] == "assistant" for message in self._messages):
            return spans
        ends = [(self._end_of_own(number), number) for number in range(self._count)]
        return [span for span in spans if self._message_of(span, ends) in answers]

    def span(self, number: int) -> tuple[int, int]:
        """Span of an answer: from the end of its header to the end of its turn."""
        start, here = self._start(number), self._behind(self._count, number)
        if here is None:
            raise self._refused(f"does not write message {number + 1}")
        if number == self._count - 1:
            return start, len(self.whole)
        own, following = len(self.whole) - len(here), self._end_of_own(number + 1)
        if self._messages[number + 1]["role"] != "assistant" and following is not None and start < following <= own:
            raise self._refused(f"writes message {number + 2} inside message {number + 1}")
        lengths = []
        for tail in self._tails(number):
            if (shared := self._shared(tail, here)) or not tail:
                lengths.append(shared)
            if shared and here.startswith(tail):
                break
        if not lengths:
            raise self._refused(f"writes the end of message {number + 1} differently once others follow")
        return start, own + max(lengths)

    def _start(self, number: int) -> int:
        prompt = self._text(number, prompt=True)
        if prompt is not None and self.whole.startswith(prompt):
            if number == 0 or self._messages[number - 1]["role"] == "user":
                return len(prompt)
            header = self._header_behind_user(number)  # DiffusionGemma's template writes it behind tools, unasked
            written = not prompt.endswith(header) and self.whole.startswith(header, len(prompt))
            return len(prompt) + len(header) * written
        # The template writes earlier messages differently once others follow, or opens the answer (with <think>) where
        # it is asked for one. What it writes behind the message before is compared.
        header = self._header(number)
        for before in reversed(range(number)):
            asked, here = self._behind(number, before, prompt=True), self._behind(self._count, before)
            if asked is not None and here is not None:
                shared = self._shared(asked, here)
                if shared > len(asked) - len(header) or shared == len(asked):
                    return len(self.whole) - len(here) + shared
                break
        raise self._refused(f"writes another header before message {number + 1} than before an answer")

    def _tails(self, number: int) -> Iterator[str]:
        """Yield the text that the template writes after a message's own text and before the next header, if the
        generation prompt follows and if another answer follows."""
        if (asked := self._behind(number + 1, number, prompt=True)) is not None:
            for header in filter(None, (self._header(number), self._header(number + 1))):
                if asked.endswith(header):
                    yield asked.removesuffix(header)
            if self._header(number + 1) == "":
                yield asked
        header, followed = self._header(number), self._behind(number + 1, number, followed=True)
        if header and followed is not None:
            followed = followed.partition(self._other)[0]  # template text alone
            for length in range(len(header), len(header) // 2, -1):  # the prompt may open the answer (with <think>)
                if header[:length] in followed:
                    yield followed.partition(header[:length])[0]
                    return

    def _header(self, count: int) -> str:
        """Text that the generation prompt adds to the first `count` messages. For a template that always writes the
        generation prompt: its rendering of no messages."""
        asked, plain = self._text(count, prompt=True), self._text(count)
        if asked is None or plain is None:
            return ""
        if asked == plain:
            alone = self._text(0, prompt=True) or ""
            length, edges = _common(asked[::-1], alone[::-1]), self._edges(alone)
            return alone[min(edge for edge in edges if edge >= len(alone) - length) :]
        if not asked.startswith(plain):  # both end with marks, which may begin alike: compare whole tokens
            asked, plain = (
                self._behind(count, count - 1, prompt) or text for prompt, text in ((True, asked), (False, plain))
            )
        return asked[self._shared(asked, plain) :]

    def _header_behind_user(self, count: int) -> str:
        """Generation prompt after the last user message among the first `count` messages."""
        users = (number for number in reversed(range(count)) if self._messages[number]["role"] == "user")
        return self._header(next(users, -1) + 1)

    def _end_of_own(self, number: int) -> int | None:
        """End of a message's own text; None if the template does not write it."""
        here = self._behind(self._count, number)
        return None if here is None else len(self.whole) - len(here)

    def _message_of(self, span: tuple[int, int], ends: Sequence[tuple[int | None, int]]) -> int | None:
        """Assistant message that a marked span belongs to: the first message whose own text does not end before the
        span or, if that has another role, the last assistant message before it."""
        for end, number in ends:
            if end is not None and end >= span[0]:
                earlier = range(number, -1, -1)
                return next((each for each in earlier if self._messages[each]["role"] == "assistant"), None)
        return next((number for _, number in reversed(ends) if self._messages[number]["role"] == "assistant"), None)

    def _behind(self, count: int, number: int, prompt: bool = False, followed: bool = False) -> str | None:
        """Text after a message's own text in the rendering of the first `count` messages; None if it is not
        written."""
        text, other = (self._text(count, each, prompt, followed) for each in (None, number))
        if text is None or other is None or text == other:
            return None
        shared = _common(text[::-1], other[::-1])
        text = text[len(text) - shared :]
        return text.removesuffix(self._appended) if count == self._count and not (prompt or followed) else text

    def _shared(self, text: str, other: str) -> int:
        """Length in characters of the longest common prefix that consists of whole tokens of `text`."""
        length = _common(text, other)
        return (
            length
            if length == min(len(text), len(other))
            else max(edge for edge in self._edges(text) if edge <= length)
        )

    def _edges(self, text: str) -> list[int]:
        """Start and end positions of the tokens of a text."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [0, len(text), *(edge for offset in encoded["offset_mapping"] for edge in offset)]

    # -- rendering

    def _accepted(self, messages: list[dict[str, Any]], prompt: bool) -> tuple[list[dict[str, Any]], str]:
        """Messages in the form that the template supports, and their rendering. Most templates take the arguments of a
        tool call as a mapping, DeepSeek's as JSON text."""
        has_calls = any("tool_calls" in message for message in messages)
        refusals = []
        for form in (messages, [_with_json_text(message) for message in messages]) if has_calls else (messages,):
            try:
                return form, self._apply(form, prompt)[0]
            except Exception as error:  # whatever a template raises
                refusals.append(one_line(error))
        raise InputFileError(self._where, f"the chat template refuses it: {refusals[0]}")

    def _check_tool_calls(self) -> None:
        """Raise InputFileError for a tool call that the template omits."""
        for number, message in enumerate(self._messages):
            for place, call in enumerate(calls := message.get("tool_calls", [])):
                renamed = {**call, "function": {**call["function"], "name": self._other}}
                messages = list(self._messages)
                messages[number] = {**message, "tool_calls": [*calls[:place], renamed, *calls[place + 1 :]]}
                if self._try(messages) == self.whole:
                    raise self._refused(f"does not write tool call {place + 1} of message {number + 1}")

    def _text_of(
        self, count: int, other: int | None = None, prompt: bool = False, followed: bool = False
    ) -> str | None:
        """Render the first `count` messages, with the text of message `other` replaced and, if `followed`, with
        another answer appended. None if the template refuses them."""
        messages = self._messages[:count]
        if other is not None:
            messages[other] = self._with_other_text(messages[other])
        if followed:
            messages = [*messages, {"role": "assistant", "content": self._other}]
        return self._try(messages, prompt)

    def _try(self, messages: list[dict[str, Any]], prompt: bool = False) -> str | None:
        """Render messages. None if the template refuses them (although it accepts the whole conversation)."""
        try:
            return self._apply(messages, prompt)[0]
        except Exception:  # whatever a template raises
            return None

    def _with_other_text(self, message: dict[str, Any]) -> dict[str, Any]:
        other = f"{self._other}{self._other}"
        changed = {**message, "content": other if message["content"] or "tool_calls" not in message else ""}
        if "tool_calls" in message:
            changed["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": {"text": other}}}
                for call in message["tool_calls"]
            ]
            if any(isinstance(call["function"]["arguments"], str) for call in message["tool_calls"]):
                changed = _with_json_text(changed)
        return changed

    def _apply(
        self, messages: list[dict[str, Any]], prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render messages. Returns the text and the spans that the template marks."""
        texts, spans = cast(Any, render_jinja_template)(
            [messages],
            tools=self._conversation.tools,
            chat_template=self._template,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **self._settings,
        )
        return texts[0], spans[0] if marks else []

    def _refused(self, reason: str) -> InputFileError:
        return InputFileError(
            self._where, f"the chat template of tokenizer {self._tokenizer.name_or_path} {reason}: {REMEDY}"
        )


def _with_json_text(message: dict[str, Any]) -> dict[str, Any]:
    """Convert the arguments of a message's tool calls to JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message


def _common(text: str, other: str) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[low:middle] == other[low:middle] else (low, middle - 1)
    return low
