"""The conversation: reads lines, runs the commands that begin with a slash, and asks the model."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from dlm_bridge.cli.generate_request import parse_settings
from dlm_bridge.errors import DlmBridgeError, InputFileError, NonFiniteError, RowError, SettingError, printable
from dlm_bridge.files.atomic import atomic_file
from dlm_bridge.settings import nearest

Message = dict[str, str]
DEFAULT = "default"  # value of /set that removes a setting


class Speaker(Protocol):
    """The partner of a conversation: `local.LocalModel` or `remote.RemoteModel`."""

    name: str

    def check(self, settings: Mapping[str, Any]) -> None: ...
    def describe(self, settings: Mapping[str, Any]) -> str: ...
    def answer(
        self, messages: Sequence[Message], settings: Mapping[str, Any], console: Console
    ) -> tuple[str, str]: ...
    def stop(self) -> bool: ...


class Session:
    """A conversation with a model, and the sampler's settings.

    Args:
        settings: keyword arguments of `generate`.
        system: system message, which /reset keeps.
    """

    def __init__(self, speaker: Speaker, settings: Mapping[str, Any], system: str | None) -> None:
        self.speaker, self.settings = speaker, dict(settings)
        self._first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._first)
        self._console = Console(highlight=False)
        self._saved: set[Path] = set()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self.help,
            "/reset": self.reset,
            "/set": self.set,
            "/save": self.save,
            "/quit": self.quit,
        }

    def run(self) -> None:
        """Read and answer lines until /quit or the end of the input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # history and editing of lines
        self._note(f"Chat with {printable(self.speaker.name)}. /help lists the commands.")
        with contextlib.suppress(EOFError), _on_interrupt(self._interrupt):
            while True:
                self._read_and_answer()

    def _read_and_answer(self) -> None:
        try:
            line = _read()
        except KeyboardInterrupt:
            self._note("\nCtrl-D or /quit ends.")
            return
        except UnicodeDecodeError:
            self._note("The line is not UTF-8 text.")
            return
        try:
            if line.startswith("/"):
                self.command(line)
            elif line.strip():
                self.say(line)
        except KeyboardInterrupt:
            self._note("\nStopped. The message and its answer are not part of the conversation.")
        except RowError as error:
            fits = isinstance(error, NonFiniteError) or len(self.messages) == len(self._first)
            self._error(f"{error}{'' if fits else '; /reset starts a new conversation'}")
        except DlmBridgeError as error:
            self._error(str(error))

    def say(self, text: str) -> None:
        """Send a message and show the answer; both become part of the conversation if the answer is complete."""
        messages = [*self.messages, {"role": "user", "content": text}]
        answer, summary = self.speaker.answer(messages, self.settings, self._console)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        self._note(summary)

    def command(self, line: str) -> None:
        """Run a line that begins with a slash. Raises SettingError for an unknown command."""
        word, _, rest = line.strip().partition(" ")
        if word not in self._commands:
            hint = nearest(word, self._commands, "/help lists the commands")
            raise SettingError(word, f"is unknown: {hint}; a message may begin with a blank")
        self._commands[word](rest.strip())

    def help(self, _: str) -> None:
        """Show the commands."""
        self._note(
            "/set NAME=VALUE  set a sampler setting; the value default removes it\n"
            "/set             show the settings\n"
            "/reset           start a new conversation\n"
            "/save FILE       save the conversation as a line of JSON, for generate --jsonl or sft\n"
            "/quit            end; so does Ctrl-D\n"
            "A line that ends with a backslash continues on the next. Ctrl-C stops an answer."
        )

    def reset(self, _: str) -> None:
        """Forget the messages, except for the system message."""
        self.messages = list(self._first)
        self._note("New conversation.")

    def set(self, pair: str) -> None:
        """Set or remove a setting. Raises DlmBridgeError, and changes nothing, for an invalid one."""
        if pair:
            changed = self.settings | parse_settings([pair])
            changed = {name: value for name, value in changed.items() if value != DEFAULT}
            self.speaker.check(changed)
            self.settings = changed
        given = " ".join(f"{name}={json.dumps(value)}" for name, value in self.settings.items())
        self._note(f"Settings: {given or 'none'}\nSampler: {self.speaker.describe(self.settings)}")

    def save(self, name: str) -> None:
        """Write the conversation to a file. Raises DlmBridgeError for a file of anything else."""
        if not name:
            raise SettingError("/save", "name a file: /save chat.jsonl")
        if self.messages == self._first:
            raise SettingError("/save", "there are no messages yet")
        path = Path(name).expanduser().absolute()
        if path not in self._saved and path.exists():
            raise InputFileError(path, "exists: choose another name")
        row = {"model": self.speaker.name, "settings": self.settings, "messages": self.messages}
        with atomic_file(path, overwrite=True) as stream:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._saved.add(path)
        self._note(f"Saved to {path}.")

    def quit(self, _: str) -> None:
        """End the session."""
        raise EOFError

    def _interrupt(self, *_: Any) -> None:
        """Handle SIGINT: stop a local answer after its forward pass; raise KeyboardInterrupt in any other case."""
        if not self.speaker.stop():
            raise KeyboardInterrupt

    def _note(self, text: str) -> None:
        self._console.print(printable(text), style="dim", markup=False)

    def _error(self, text: str) -> None:
        self._console.print(printable(text), style="red", markup=False)


def _read() -> str:
    """Read a message. Raises EOFError at the end of the input."""
    line = input("> ")
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{input('. ')}"
    return line


@contextlib.contextmanager
def _on_interrupt(handler: Callable[..., None]) -> Iterator[None]:
    """Context manager that replaces the handler of SIGINT by one that need not end the process: `processes` would end
    it a few seconds after the signal."""
    wakeup, before = signal.set_wakeup_fd(-1), signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(wakeup)
