"""The server's own pages: `/`, how to call the model and a box to try it, and `/docs`. They load nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from dlm_bridge.generation.settings import resolve_settings
from dlm_bridge.serving.model import ServedModel

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ENDPOINTS = (
    ("POST /v1/chat/completions", "OpenAI's chat completions: messages, formatted with the chat template"),
    ("POST /v1/completions", "OpenAI's completions: prompt, a text, token ids, or a list of either"),
    ("POST /v1/responses", "OpenAI's responses: input (a text or messages), instructions, max_output_tokens"),
    ("POST /v1/infill", "fill in masks: prompt with [MASK] or [MASK:n], or prefix, suffix and max_tokens; can stream"),
    ("POST /v1/commits", "a completion or chat as a stream of all tokens in the order of the denoising"),
    ("GET /v1/models", "the model's name; requests may use any name"),
    ("GET /health", "for load balancers"),
    ("GET /metrics", "for Prometheus"),
)
FIELDS = (
    ("max_tokens", "maximum number of new tokens, together with the prompt at most {limit}"),
    ("temperature, top_p, top_k", "0 is greedy decoding, and the default"),
    ("seed", "the same text again, independent of other requests"),
    ("stop", "at most 4 strings that end the text"),
    ("n", "number of texts"),
    ("stream", "send tokens as soon as they are final"),
)
ERRORS = (
    ("400", "invalid_request_error", "error.param names the field at fault"),
    ("401", "authentication_error", "the API key is missing or wrong (Authorization: Bearer KEY)"),
    ("413, 415", "invalid_request_error", "the body is too large, or is not JSON"),
    ("429", "rate_limit_error", "the queue is full: Retry-After has the seconds to wait"),
    ("503", "server_error", "the server is being shut down"),
    ("504", "timeout_error", "the answer was not complete in time"),
)


def home(served: ServedModel, origin: str, has_key: bool) -> str:
    """The page at `/`. The model is not named to clients that may not have the key."""
    loaded, chats = served.loaded, bool(served.loaded.tokenizer.chat_template)
    family = getattr(getattr(loaded.model, "family", None), "title", None) or loaded.family
    kind = "diffusion" if loaded.diffusion else "autoregressive"
    modes = [("chat", "a message")] * chats + [("text", "a text to continue")]
    modes += [("masks", "a text with [MASK:n]")] * loaded.diffusion
    field, call = ("messages", "chat.completions") if chats else ("prompt", "completions")
    value = [{"role": "user", "content": "What is a bridge?"}] if chats else "A bridge is"
    secret, url = "..." if has_key else "none", f'<span class="origin">{escape(origin)}</span>/v1'
    key = ' \\\n    -H "Authorization: Bearer $KEY"' if has_key else ""
    path = call.replace(".", "/")
    body = escape(json.dumps({field: value, "max_tokens": 64}))
    answer = "choices[0].message.content" if chats else "choices[0].text"
    values = {
        "name": "dlm-bridge" if has_key else served.name,
        "about": "This server needs an API key."
        if has_key
        else f"{kind} language model ({family}), at most {served.limit:,} tokens with the prompt",
        "placeholder": value if isinstance(value, str) else value[0]["content"],
        "tokens": str(min(64, served.limit)),
        "keyless": "" if has_key else "hidden",
    }
    main = _filled(
        "home.html",
        modes="".join(f'<option value="{name}">{escape(text)}</option>' for name, text in modes),
        curl=f"curl {url}/{path} \\\n    -H 'Content-Type: application/json'{key} \\\n    -d '{body}'",
        python=(
            f'from openai import OpenAI\n\nclient = OpenAI(base_url="{url}", api_key="{secret}")\n'
            f'answer = client.{call}.create(\n    model="any", {field}={escape(json.dumps(value))}, max_tokens=64\n)\n'
            f"print(answer.{answer})"
        ),
        **{name: escape(text) for name, text in values.items()},
    )
    return _filled("frame.html", title=escape(values["name"]), main=main)


def docs(served: ServedModel, has_key: bool) -> str:
    """The page at `/docs`."""
    name = "dlm-bridge" if has_key else served.name
    parts = [
        f'<h1>API of {escape(name)}</h1>\n<p class="faint"><a href=".">Back to the model</a></p>',
        "<h2>Endpoints</h2>",
        _table(("endpoint", "use"), ENDPOINTS),
        "<h2>Fields of a request</h2>",
        _table(("field", "meaning"), [(field, text.format(limit=f"{served.limit:,}")) for field, text in FIELDS]),
        "<p>Every other field is a setting of the sampler; the error for an unknown one lists them. OpenAI's client "
        "sends them in <code>extra_body</code>.</p>",
    ]
    if served.loaded.diffusion and not has_key:
        sampler = resolve_settings(served.loaded.model, None, served.defaults, prompt_width=1).sampler
        rows = [
            (option.name, "" if (value := getattr(sampler, option.name)) is None else str(value), option.help)
            for option in type(sampler).options().values()
        ]
        parts += [
            f"<h2>Settings of the sampler {escape(sampler.name)}</h2>",
            _table(("field", "default", "meaning"), rows),
        ]
    example = {"error": {"message": "...", "type": "invalid_request_error", "param": "max_tokens", "code": None}}
    parts += [
        "<h2>Errors</h2>",
        _table(("status", "type", "meaning"), ERRORS),
        f"<pre>{escape(json.dumps(example))}</pre>",
    ]
    return _filled("frame.html", title=escape(f"API of {name}"), main="\n".join(parts))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is code."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = [
        f"<tr><td><code>{escape(first)}</code></td>{''.join(f'<td>{_code(each)}</td>' for each in others)}</tr>"
        for first, *others in rows
    ]
    return f'<div class="scroll"><table><tr>{titles}</tr>{"".join(lines)}</table></div>'


def _code(text: str) -> str:
    """A help text, whose settings are in backquotes."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _filled(file: str, /, **values: str) -> str:
    """Text of a file of this package, with {{NAME}} replaced."""
    text = resources.files(__package__).joinpath(file).read_text("utf-8")
    for key, value in values.items():
        text = text.replace("{{" + key + "}}", value)
    return text
