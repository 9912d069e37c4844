"""A model behind OpenAI's API as the partner of a conversation. Imports torch only to check settings."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.console import Console

from dlm_bridge.errors import SettingError, one_line, printable
from dlm_bridge.settings import nearest

# Fields of OpenAI's API that are not settings of `generate`, and their names for those that are.
FIELDS = (
    "frequency_penalty", "logit_bias", "max_completion_tokens", "max_tokens", "presence_penalty", "reasoning_effort",
    "stop",
)  # fmt: skip
NAMES = {"gen_length": "max_tokens", "max_new_tokens": "max_tokens", "stop_strings": "stop"}
CONNECT_S = 10.0


@dataclass
class RemoteModel:
    """A model of a server with OpenAI's API.

    Args:
        url: address up to and including /v1.
        template_args: variables of the chat template.
    """

    url: str
    headers: Mapping[str, str]
    name: str
    template_args: Mapping[str, Any]

    @classmethod
    def connect(cls, url: str, key: str | None, name: str | None, template_args: Mapping[str, Any]) -> RemoteModel:
        """Ask the server for its models. Raises SettingError if it does not answer or does not have the model."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError("url", f"{url!r} must be an address such as http://127.0.0.1:8000")
        url = url.rstrip("/") if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            response = httpx.get(f"{url}/models", headers=headers, timeout=CONNECT_S)
            _check(response)
            names = [str(each["id"]) for each in response.json()["data"]]
        except (httpx.HTTPError, UnicodeError) as error:
            raise SettingError("url", f"{url} does not answer: {one_line(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, SettingError):
                raise
            raise SettingError("url", f"{url}/models is not the list of models of OpenAI's API") from error
        if not names or (name is not None and name not in names):
            raise SettingError("model", f"{url} does not have {name}: it has {', '.join(names) or 'none'}")
        return cls(url, headers, name or names[0], template_args)

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise SettingError for invalid values and near misses of known names. Any other name is the server's."""
        from dlm_bridge.generation.config import TRANSFORMERS_SETTINGS, check_values
        from dlm_bridge.generation.options import COMMAND_LINE
        from dlm_bridge.generation.samplers import SAMPLERS

        known = {*COMMAND_LINE, *SAMPLERS.parameters(), *TRANSFORMERS_SETTINGS, *FIELDS}
        for name in settings:
            if name not in known and (hint := nearest(name, known, cutoff=0.8, mark="`")):
                raise SettingError(name, f"is unknown: {hint}")
        check_values(settings)

    def describe(self, settings: Mapping[str, Any]) -> str:
        """Name of the sampler: only the server knows it."""
        return f"the sampler of {self.url}"

    def answer(
        self, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any], console: Console
    ) -> tuple[str, str]:
        """Answer and print the text as it comes. Returns the answer and a summary.

        Raises:
            SettingError: the server refuses the request, or does not answer.
        """
        began, parts = time.perf_counter(), []
        for piece in self._pieces(messages, settings):
            parts.append(piece)
            console.out(printable(piece), end="", highlight=False)
        console.line()
        text = "".join(parts)
        return text, f"{len(text)} characters in {time.perf_counter() - began:.2f} s"

    def stop(self) -> bool:
        """A request has no point at which to stop: it is interrupted."""
        return False

    def _pieces(self, messages: Sequence[Mapping[str, str]], settings: Mapping[str, Any]) -> Iterator[str]:
        body = {NAMES.get(name, name): value for name, value in settings.items()}
        body |= {"model": self.name, "messages": list(messages), "stream": True}
        if self.template_args:
            body["chat_template_kwargs"] = dict(self.template_args)
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        try:
            with httpx.stream(
                "POST", f"{self.url}/chat/completions", json=body, headers=dict(self.headers), timeout=timeout
            ) as response:
                if response.status_code != 200:
                    response.read()
                    _check(response)
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        yield _piece(json.loads(data))
        except httpx.HTTPError as error:
            raise SettingError("url", f"{self.url} does not answer: {one_line(error)}") from error


def _check(response: httpx.Response) -> None:
    """Raise SettingError, with the server's reason, unless a request succeeded."""
    if response.status_code == 200:
        return
    try:
        error = response.json()["error"]
        reason = one_line(ValueError(error["message"] if isinstance(error, dict) else error))
    except (ValueError, KeyError, TypeError):
        reason = response.reason_phrase
    remedy = ": set `api_key`" if response.status_code == 401 else ""
    raise SettingError("url", f"{response.url} answers {response.status_code}, {reason}{remedy}")


def _piece(chunk: Any) -> str:
    """Text of a streamed chunk. Raises SettingError for an error in its place."""
    if "error" in chunk:
        raise SettingError("url", f"the server stopped: {chunk['error'].get('message', chunk['error'])}")
    choices = chunk.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""
