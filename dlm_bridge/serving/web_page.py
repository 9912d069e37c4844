"""Web page to sample in: prompt, settings of every sampler that supports the model, and a live view of the denoising.

One thread generates, so calls of several tabs wait for each other. When a tab is closed or Stop is pressed, Gradio
closes the iterator of `PageModel.sample`, and the call ends after its next forward pass.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from dlm_bridge.errors import DlmBridgeError, InputFileError, SettingError, counted
from dlm_bridge.generation.offline import GeneratedTexts, check_prompts, ending_tokens, write_texts
from dlm_bridge.generation.options import GENERAL as DECLARED
from dlm_bridge.generation.prompts import SPAN, WrittenPrompt, as_message
from dlm_bridge.generation.samplers import SAMPLERS, Sampler
from dlm_bridge.generation.settings import fitting_samplers, resolve_settings
from dlm_bridge.registration import load
from dlm_bridge.serving.connections import LOOPBACK
from dlm_bridge.settings import Option, check_choice, requirement

CONTINUE, CHAT, FILL = "Continue", "Chat", "Fill in [MASK:n]"
FRAME_SECONDS = 0.1  # time between two frames of a call
LABELS = {CONTINUE: "Prompt", CHAT: "Message", FILL: "Text with [MASK], a token to fill, or [MASK:n], n of them"}
EXAMPLES = {
    CONTINUE: ("Tom was a", "Once upon a time, a river", "def reverse(text):"),
    CHAT: ("What is a river?", "Write a poem about rain in four lines.", "Write a Python function that adds numbers."),
    FILL: ("Tom was a[MASK:4] near the river.", "The capital of France is [MASK].", "def add(a, b): return[MASK:3]"),
}
CONSTRAINTS = (
    "What each mask may become, a line for each: a regular expression, or an object such as "
    '{"choice": ["cat", "dog"]}. An empty or missing line: anything.'
)
ANYTHING = {"regex": "[\\s\\S]*"}
PRESETS = {"fast": "commits more tokens per forward pass", "careful": "fewer"}
COMMON = ("preset", "gen_length", "steps", "temperature", "seed")  # settings that are always shown
READS = ("GET", "HEAD")
POSTED = tuple(
    f"/gradio_api/{name}" for name in ("queue/join", "call/", "cancel", "reset")
)  # endpoints that the page uses
CSS = """
.gradio-container { --block-info-text-color: color-mix(in srgb, var(--body-text-color) 70%, transparent); }
.denoising, .turn { white-space: pre-wrap; overflow-wrap: anywhere; font: 0.95rem/1.7 ui-monospace, monospace; }
.denoising { min-height: 8rem; max-height: 34rem; overflow-y: auto; }
.turn { padding: 0.3rem 0.8rem; margin-bottom: 0.5rem; border-radius: 6px; }
.turn.user { background: color-mix(in srgb, currentColor 9%, transparent); margin-left: 15%; }
.turn + .denoising { min-height: 3.4rem; padding: 0.3rem 0.8rem; }
.denoising .given, .denoising-status { opacity: 0.65; }
.denoising .masked { opacity: 0.3; }
.denoising .after { opacity: 0.4; }
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
        hint: added to the option's help.
    """

    name: str
    option: Option
    default: Any = None
    hint: str = ""

    @property
    def info(self) -> str:
        """What the setting does, and its valid values."""
        if self.hint or self.option.choices or "bool" in str(self.option.type):
            return f"{self.option.help} {self.hint}".strip()
        return f"{self.option.help} Values: {requirement(self.option)}.".strip()

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


SEED = Control("seed", DECLARED["seed"], hint="Equal seeds give equal texts.")
# Controls of every diffusion sampler, in addition to its own parameters.
GENERAL = (
    Control("cache", DECLARED["cache"]),
    SEED,
    Control("span_lengths", DECLARED["span_lengths"], hint="Such as [4, 8]."),
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
        return {name: [preset_control(name), *self._parameters(name), *GENERAL] for name in names}

    def sample(
        self,
        mode: str,
        prompt: str,
        algorithm: str,
        shown: Mapping[str, Any],
        turns: list[dict[str, str]] | None = None,
        constraints: str = "",
    ) -> Iterator[str]:
        """Sample a text. Yields HTML of the newest state; the last one has the call's summary, or an error.

        A chat shows its messages, and of the newest answer the denoising; other modes show the prompt and the text.

        Args:
            shown: values of the sampler's controls, by name.
            turns: messages of the chat so far. The new message and a complete answer are appended.
            constraints: constraints of the masks to fill in, one per line.
        """
        turns = [] if turns is None else turns
        trace: LiveTrace | None = None
        call: Future[GeneratedTexts] | None = None
        written, before = WrittenPrompt(text=prompt), ""
        if mode == CHAT:
            before = turns_html(turns)
            written = WrittenPrompt(messages=(*turns, *as_message(prompt, None).messages))
        try:
            if not prompt.strip():
                raise InputFileError("prompt", "is empty: write a text or choose an example")
            settings = self._settings(mode, algorithm, shown)
            constraint = read_form(prompt, constraints) if mode == FILL else None
            trace, call, begin = self._start(mode, written, settings, constraint)
            if mode == CHAT:
                before = turns_html(written.messages)
            while not call.done():
                if trace.changed.wait(FRAME_SECONDS):
                    trace.changed.clear()
                    yield before + frame_html(trace.last.after(begin))
                    trace.stopped.wait(FRAME_SECONDS)
            result = call.result()
            if mode == CHAT:
                turns[:] = [*written.messages, {"role": "assistant", "content": result.texts[0]}]
            yield before + frame_html(trace.last.after(begin), result.summary)
        except DlmBridgeError as error:
            yield before + refusal_html(str(error))
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
        self, mode: str, written: WrittenPrompt, settings: Mapping[str, Any], constraint: Any
    ) -> tuple[LiveTrace, Future[GeneratedTexts], int]:
        """Start a call. Returns its trace, its result, and the first position to show."""
        ids = written.encode(self.tokenizer, self.name, infill=mode == FILL)
        check_prompts(self.model, [("the prompt", ids)], settings, f"[MASK] and '{FILL}'")
        trace = LiveTrace(TokenStrings(self.tokenizer), ids, ending_tokens(self.model, settings))
        write = partial(write_texts, self.model, self.tokenizer, [ids], settings, constraint=constraint)
        self._traces.add(trace)
        call = self._executor.submit(write, streamer=trace if self.diffusion else trace.token_streamer())
        call.add_done_callback(lambda _: self._traces.discard(trace))
        return trace, call, len(ids) if mode == CHAT else 0

    def _settings(self, mode: str, algorithm: str, shown: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `write_texts`: the settings that differ from their defaults."""
        known = self.controls()
        check_choice("algorithm", algorithm, known)
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


def read_form(prompt: str, constraints: str) -> Any:
    """The constraint of a text by those of its masks, one per line; None if there are none. Raises SettingError."""
    lines = constraints.rstrip().splitlines()
    if not lines:
        return None
    texts = SPAN.split(prompt)[::2]
    if len(lines) > len(texts) - 1:
        raise SettingError(
            "constraint", f"has {counted(len(lines), 'line')} for {counted(len(texts) - 1, 'mask')}: one for each"
        )
    read = load("features", "structured output").read_constraint
    parts: list[Any] = []
    for number, line in enumerate([*lines, *[""] * (len(texts) - 1 - len(lines))], 1):
        value: Any = {"regex": line} if line.strip() else ANYTHING
        if line.lstrip().startswith("{"):
            try:
                value = json.loads(line)
            except ValueError as error:
                raise SettingError("constraint", f"of mask {number} is not valid JSON: {error}") from None
        parts += [texts[number - 1], read(value)]
    return load("features", "form")([*parts, texts[-1]])


def preset_control(algorithm: str) -> Control:
    """Choice of the presets that a sampler has."""
    presets, words = SAMPLERS[algorithm].presets, []
    for preset, values in presets.items():
        shown = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        words.append(f"{preset}{shown and f' ({shown})'} {PRESETS[preset]}")
    about = f"{'; '.join(words).capitalize()}." if words else "This sampler has only its published values."
    return Control("preset", replace(DECLARED["preset"], choices=tuple(presets), help=about), "published")


def turns_html(turns: Sequence[Mapping[str, str]]) -> str:
    """HTML of the messages of a chat."""
    return "".join(f'<div class="turn {turn["role"]}">{html.escape(turn["content"])}</div>' for turn in turns)


def frame_html(frame: TraceFrame, summary: str | None = None) -> str:
    """HTML of the tokens, coloured by the model's probability, the newest ones marked, and grey after the end of the
    text; then the progress, or `summary` instead, and the legend."""
    parts = []
    tokens = zip(frame.strings, frame.committed_at, frame.confidence, strict=True)
    for place, (string, step, confidence) in enumerate(tokens):
        if place >= frame.end and string is not None:
            parts.append(f'<span class="after">{html.escape(string)}</span>')
        elif string is None:
            parts.append(f'<span class="masked">{MASKED}</span>')
        elif not step:
            parts.append(f'<span class="given">{html.escape(string)}</span>')
        else:
            mark = ' class="fresh"' if step == frame.forwards and summary is None else ""
            colour = "" if confidence is None else f' style="color:{confidence_colour(confidence)}"'
            title = "" if confidence is None else f' title="{confidence:.3f}"'
            parts.append(f"<span{mark}{colour}{title}>{html.escape(string)}</span>")
    caption = summary or f"forward {frame.forwards}, {counted(frame.committed, 'token')} committed"
    legend = ""
    if any(confidence is not None for confidence in frame.confidence):
        bars = "".join(f'<span style="color:{confidence_colour(step / STEPS)}">{BAR}</span>' for step in range(STEPS))
        legend = f' &nbsp; <span style="white-space:nowrap">probability when committed: 0 {bars} 1</span>'
    if frame.end < len(frame.strings):
        legend += " &nbsp; grey: after the end of the text"
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
                shown = gr.HTML(elem_id="shown")
                prompt = gr.Textbox(
                    label=LABELS[modes[0]], lines=3, elem_id="prompt", placeholder="Shift+Enter generates."
                )
                constraints = gr.Textbox(
                    label="Constraints",
                    info=CONSTRAINTS,
                    lines=2,
                    elem_id="constraints",
                    placeholder="[0-9]+",
                    visible=modes[0] == FILL,
                )
                with gr.Row():
                    examples = [gr.Button(text, size="sm", min_width=160) for text in EXAMPLES[modes[0]]]
                with gr.Row():
                    start = gr.Button("Generate", variant="primary", min_width=140)
                    stop = gr.Button("Stop", min_width=140)
                    new_chat = gr.Button("New chat", visible=modes[0] == CHAT, min_width=140)
                turns = gr.State([])
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
            asked = values[mode], values[prompt], values[algorithm], given, messages, values[constraints]
            for text in page_model.sample(*asked):
                yield {shown: text}
            if len(messages) > len(values[turns]):
                yield {turns: messages, prompt: ""}

        runs = [
            event(
                sample,
                {mode, prompt, turns, algorithm, constraints, *everything},
                [shown, turns, prompt],
                show_progress="hidden",
                api_name=api_name,
            )
            for event, api_name in ((start.click, "sample"), (prompt.submit, False))
        ]
        stop.click(None, cancels=runs, api_name=False)
        new_chat.click(lambda: ([], ""), None, [turns, shown], cancels=runs, show_progress="hidden", api_name=False)
        mode.change(
            lambda mode: (
                gr.update(label=LABELS[mode]),
                gr.update(visible=mode == CHAT),
                gr.update(visible=mode == FILL),
                *EXAMPLES[mode],
            ),
            mode,
            [prompt, new_chat, constraints, *examples],
            show_progress="hidden",
            api_name=False,
        )
        for example in examples:
            example.click(lambda text: text, example, prompt, show_progress="hidden", api_name=False)
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
    """Widgets by name, with what each setting does; those that are not in `COMMON` are folded away."""
    import gradio as gr

    common = sorted((one for one in controls if one.name in COMMON), key=lambda one: COMMON.index(one.name))
    with gr.Row():
        widgets = {control.name: _widget(control) for control in common}
    with gr.Accordion("More settings", open=False), gr.Row():
        others = {control.name: _widget(control) for control in controls if control.name not in COMMON}
    return {**widgets, **others}


def _widget(control: Control) -> Any:
    """Dropdown, checkbox or text field. Numbers have text fields as well: empty means the default, which Gradio's
    number fields cannot express."""
    import gradio as gr

    default = "" if control.default is None else f"{control.default}"
    about: dict[str, Any] = {
        "label": control.name, "info": control.info, "elem_id": f"setting-{control.name}", "min_width": 190
    }  # fmt: skip
    if control.option.choices or control.name == "preset":
        first = f"default: {default}" if default else "default"
        return gr.Dropdown([(first, ""), *((one, one) for one in control.option.choices)], value="", **about)
    if "bool" in str(control.option.type):
        return gr.Checkbox(value=bool(control.default), **about)
    return gr.Textbox(placeholder=default or "none", **about)


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
