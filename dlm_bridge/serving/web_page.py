"""Web page to sample in: prompt, settings of every sampler that supports the model, and a live view of the denoising.

One thread generates, so calls of several tabs wait for each other. When a tab is closed or Stop is pressed, Gradio
closes the iterator of `PageModel.sample`, and the call ends after its next forward pass.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import PlainTextResponse

from dlm_bridge.display.trace import (
    BAR,
    MASKED,
    STEPS,
    LiveTrace,
    StoppedError,
    TokenStrings,
    TraceFrame,
    confidence_colour,
)
from dlm_bridge.errors import DlmBridgeError, SettingError
from dlm_bridge.generation.offline import GeneratedTexts, check_prompts, write_texts
from dlm_bridge.generation.options import GENERAL as DECLARED
from dlm_bridge.generation.options import requirement
from dlm_bridge.generation.prompts import WrittenPrompt, as_message
from dlm_bridge.generation.samplers import SAMPLERS, Sampler
from dlm_bridge.generation.settings import fitting_samplers, resolve_settings
from dlm_bridge.serving.connections import LOOPBACK
from dlm_bridge.settings import Option

CONTINUE, CHAT, FILL = "Continue", "Chat", "Fill in [MASK:n]"
FRAME_SECONDS = 0.1  # time between two frames of a call
LABELS = {CONTINUE: "Prompt", CHAT: "Message", FILL: "Text with [MASK], a token to fill, or [MASK:n], n of them"}
READS = ("GET", "HEAD")
POSTED = tuple(
    f"/gradio_api/{name}" for name in ("queue/join", "call/", "cancel", "reset")
)  # endpoints that the page uses
CSS = """
.denoising { white-space: pre-wrap; overflow-wrap: anywhere; font: 0.95rem/1.7 ui-monospace, monospace;
  min-height: 8rem; max-height: 34rem; overflow-y: auto; }
.denoising .given, .denoising-status { opacity: 0.65; }
.denoising .masked { opacity: 0.3; }
.denoising .fresh { background: color-mix(in srgb, currentColor 22%, transparent); border-radius: 3px; }
.refusal { border-left: 4px solid #c62828; padding: 0.5rem 0.8rem; }
"""
# The browser blocks content of other sites.
CONTENT_SECURITY_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; form-action 'self'; frame-ancestors 'none'"
)


@dataclass(frozen=True)
class Control:
    """One setting on the page.

    Args:
        default: shown on the page; not passed to the sampler.
        hint: description of the values.
    """

    name: str
    option: Option
    default: Any = None
    hint: str = ""

    def value(self, shown: Any) -> Any:
        """The setting's value, None for its default. The sampler validates it."""
        if isinstance(shown, bool):
            return None if shown == bool(self.default) else shown
        if self.option.choices or not shown:
            return shown or None
        try:
            return json.loads(shown)
        except ValueError:
            return shown


SEED = Control("seed", DECLARED["seed"], hint="equal seeds give equal texts")
# Controls of every diffusion sampler, in addition to its own parameters.
GENERAL = (
    Control("cache", DECLARED["cache"]),
    SEED,
    Control("span_lengths", DECLARED["span_lengths"], hint="lengths to try when filling in, such as [4, 8]"),
)


class PageModel:
    """A model as the page uses it: its controls, and its texts as HTML.

    Args:
        name: name of the model on the page.
        diffusion: sample with this package's `generate`, else with transformers' own.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, *, diffusion: bool) -> None:
        self.model, self.tokenizer, self.name, self.diffusion = model, tokenizer, name, diffusion
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="generate")
        self._traces: set[LiveTrace] = set()

    @property
    def modes(self) -> list[str]:
        """Modes of the page, the model's main mode first."""
        chat = [CHAT] if self.tokenizer.chat_template is not None else []
        return [*chat, CONTINUE, *([FILL] if self.diffusion else [])]

    def controls(self) -> dict[str, list[Control]]:
        """Controls of each sampler that supports the model, the model's own sampler first. An autoregressive model has
        only transformers' sampler, under the name ""."""
        if not self.diffusion:
            own = [Control(name, declared) for name, declared in Sampler.options().items()]
            return {"": [*own, SEED]}
        stored = getattr(getattr(self.model, "generation_config", None), "algorithm", None)
        names = sorted(fitting_samplers(self.model.family), key=lambda name: name != stored)
        return {name: [*self._parameters(name), *GENERAL] for name in names}

    def sample(
        self,
        mode: str,
        prompt: str,
        algorithm: str,
        shown: Mapping[str, Any],
        turns: list[dict[str, str]] | None = None,
    ) -> Iterator[str]:
        """Sample a text. Yields HTML of the newest state; the last one has the call's summary, or an error.

        Args:
            shown: values of the sampler's controls, by name.
            turns: messages of the chat so far. The new message and a complete answer are appended.
        """
        turns = [] if turns is None else turns
        trace: LiveTrace | None = None
        call: Future[GeneratedTexts] | None = None
        try:
            settings = self._settings(mode, algorithm, shown)
            written = WrittenPrompt(text=prompt)
            if mode == CHAT:
                written = WrittenPrompt(messages=(*turns, *as_message(prompt, None).messages))
            trace, call = self._start(mode, written, settings)
            while not call.done():
                if trace.changed.wait(FRAME_SECONDS):
                    trace.changed.clear()
                    yield frame_html(trace.last)
                    trace.stopped.wait(FRAME_SECONDS)
            result = call.result()
            if mode == CHAT:
                turns[:] = [*written.messages, {"role": "assistant", "content": result.texts[0]}]
            yield frame_html(trace.last, result.summary)
        except DlmBridgeError as error:
            yield refusal_html(str(error))
        except StoppedError:
            return
        finally:
            if trace is not None:
                trace.stopped.set()

    @property
    def running(self) -> int:
        """Number of calls that generate or wait."""
        return len(self._traces)

    def close(self) -> None:
        """Stop every call and reject new ones."""
        for trace in list(self._traces):
            trace.stopped.set()
        self._executor.shutdown()

    def _start(
        self, mode: str, written: WrittenPrompt, settings: Mapping[str, Any]
    ) -> tuple[LiveTrace, Future[GeneratedTexts]]:
        ids = written.encode(self.tokenizer, self.name, infill=mode == FILL)
        check_prompts(self.model, [("the prompt", ids)], settings, f"[MASK] and '{FILL}'")
        trace = LiveTrace(TokenStrings(self.tokenizer), ids)
        write = partial(write_texts, self.model, self.tokenizer, [ids], settings)
        self._traces.add(trace)
        call = self._executor.submit(write, streamer=trace if self.diffusion else trace.token_streamer())
        call.add_done_callback(lambda _: self._traces.discard(trace))
        return trace, call

    def _settings(self, mode: str, algorithm: str, shown: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `write_texts`: the settings that differ from their defaults."""
        known = self.controls()
        if algorithm not in known:
            raise SettingError("algorithm", f"{algorithm!r} is unknown: the page has {', '.join(known)}")
        found = {one.name: one.value(shown.get(one.name)) for one in known[algorithm]}
        settings = {name: value for name, value in found.items() if value is not None}
        if self.diffusion:
            settings["algorithm"] = algorithm
        return {**settings, "infill": True} if mode == FILL else settings

    def _parameters(self, algorithm: str) -> list[Control]:
        """A sampler's own parameters, with the defaults of this model's checkpoint and family."""
        try:
            sampler = resolve_settings(self.model, None, {"algorithm": algorithm}, prompt_width=1).sampler
            defaults = {name: getattr(sampler, name) for name in sampler.parameters()}
        except DlmBridgeError:  # the checkpoint stores settings of another sampler: refused when it runs
            defaults = SAMPLERS[algorithm].parameters()
        return [Control(name, each, defaults[name]) for name, each in SAMPLERS[algorithm].options().items()]


def frame_html(frame: TraceFrame, summary: str | None = None) -> str:
    """HTML of the tokens, coloured by the model's probability, the newest ones marked; then the progress, or `summary`
    instead, and the legend."""
    parts = []
    for string, step, confidence in zip(frame.strings, frame.committed_at, frame.confidence, strict=True):
        if string is None:
            parts.append(f'<span class="masked">{MASKED}</span>')
        elif not step:
            parts.append(f'<span class="given">{html.escape(string)}</span>')
        else:
            mark = ' class="fresh"' if step == frame.forwards and summary is None else ""
            colour = "" if confidence is None else f' style="color:{confidence_colour(confidence)}"'
            title = "" if confidence is None else f' title="{confidence:.3f}"'
            parts.append(f"<span{mark}{colour}{title}>{html.escape(string)}</span>")
    caption = summary or f"forward {frame.forwards}, {frame.committed} tokens committed"
    legend = ""
    if any(confidence is not None for confidence in frame.confidence):
        bars = "".join(f'<span style="color:{confidence_colour(step / STEPS)}">{BAR}</span>' for step in range(STEPS))
        legend = f' &nbsp; <span style="white-space:nowrap">probability when committed: 0 {bars} 1</span>'
    status = f'<div class="denoising-status">{html.escape(caption)}{legend}</div>'
    return f'<div class="denoising">{"".join(parts)}</div>{status}'


def refusal_html(message: str) -> str:
    """HTML of an error message."""
    return f'<div class="refusal" role="alert">{html.escape(message)}</div>'


def build_page(page_model: PageModel) -> Any:
    """The page, a `gradio.Blocks` without Gradio's analytics."""
    import gradio as gr

    controls, modes = page_model.controls(), page_model.modes
    with gr.Blocks(title=f"dlm-bridge: {page_model.name}", analytics_enabled=False) as page:
        gr.Markdown(f"### {page_model.name}", sanitize_html=True)
        with gr.Row():
            with gr.Column(scale=3):
                mode = gr.Radio(modes, value=modes[0], show_label=False, visible=len(modes) > 1)
                prompt = gr.Textbox(label=LABELS[modes[0]], lines=3, elem_id="prompt")
                with gr.Row():
                    start = gr.Button("Generate", variant="primary")
                    stop = gr.Button("Stop")
                    new_chat = gr.Button("New chat", visible=modes[0] == CHAT)
                turns = gr.State([])
                shown = gr.HTML(elem_id="shown")
            with gr.Column(scale=2):
                algorithm = gr.Dropdown(
                    list(controls), value=next(iter(controls)), label="Sampler", visible=page_model.diffusion
                )
                columns, widgets = [], {}
                for name, own in controls.items():
                    with gr.Column(visible=name == algorithm.value, elem_id=f"sampler-{name}") as column:
                        widgets[name] = _widgets(own)
                    columns.append(column)
        everything = [widget for own in widgets.values() for widget in own.values()]

        def sample(values: dict[Any, Any]) -> Iterator[dict[Any, Any]]:
            own, messages = widgets.get(values[algorithm], {}), list(values[turns])
            given = {name: values[widget] for name, widget in own.items()}
            for text in page_model.sample(values[mode], values[prompt], values[algorithm], given, messages):
                yield {shown: text}
            if len(messages) > len(values[turns]):
                yield {turns: messages, prompt: ""}

        runs = [
            event(
                sample,
                {mode, prompt, turns, algorithm, *everything},
                [shown, turns, prompt],
                show_progress="hidden",
                api_name=api_name,
            )
            for event, api_name in ((start.click, "sample"), (prompt.submit, False))
        ]
        stop.click(None, cancels=runs, api_name=False)
        new_chat.click(lambda: ([], ""), None, [turns, shown], cancels=runs, show_progress="hidden", api_name=False)
        mode.change(
            lambda mode: (gr.update(label=LABELS[mode]), gr.update(visible=mode == CHAT)),
            mode,
            [prompt, new_chat],
            show_progress="hidden",
            api_name=False,
        )
        algorithm.change(
            lambda chosen: [gr.update(visible=name == chosen) for name in widgets],
            algorithm,
            columns,
            show_progress="hidden",
            api_name=False,
        )
    return page


def page_app(page_model: PageModel) -> Any:
    """The page as an ASGI application with lifespan events, which accepts requests of this machine only."""
    import gradio as gr
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_PagePolicy)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK, www_redirect=False)
    return gr.mount_gradio_app(
        app,
        build_page(page_model),
        "/",
        server_name="127.0.0.1",
        css=CSS,
        ssr_mode=False,
        mcp_server=False,
        run_history=False,
        enable_monitoring=False,
        footer_links=[],
    )


def _widgets(controls: Sequence[Control]) -> dict[str, Any]:
    """Dropdowns, text fields and, below those, checkboxes, by name. Numbers have text fields as well: empty means the
    default, which Gradio's number fields cannot express."""
    import gradio as gr

    widgets: dict[str, Any] = {}
    with gr.Row():
        for control in controls:
            default = "" if control.default is None else f"{control.default}"
            about: dict[str, Any] = {"label": control.name, "elem_id": f"setting-{control.name}", "min_width": 190}
            if control.option.choices:
                choices = [
                    (f"default: {default}" if default else "default", ""),
                    *((one, one) for one in control.option.choices),
                ]
                widgets[control.name] = gr.Dropdown(choices, value="", **about)
            elif "bool" not in str(control.option.type):
                info = control.hint or requirement(control.option)
                widgets[control.name] = gr.Textbox(placeholder=default or "none", info=info, **about)
    for control in controls:
        if control.name not in widgets:
            widgets[control.name] = gr.Checkbox(value=bool(control.default), label=control.name)
    return widgets


class _PagePolicy:
    """ASGI middleware that adds CONTENT_SECURITY_POLICY to every answer and blocks every POST except those of POSTED:
    Gradio has endpoints that store uploaded data."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                header = (b"content-security-policy", CONTENT_SECURITY_POLICY.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        app = self._app
        if scope["type"] == "http" and not (scope["method"] in READS or scope["path"].startswith(POSTED)):
            app = PlainTextResponse("no such endpoint", 404)
        await app(scope, receive, send_with_policy)
