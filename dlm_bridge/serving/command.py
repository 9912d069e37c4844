"""`dlm-bridge serve`, `app` and `transformers`: a server, a page, and transformers' own commands with our families."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_bridge.cli.help import Device, DeviceMap, Dtype, Family, Like, Model, ModelCommand, Revision, Tokenizer
from dlm_bridge.errors import DlmBridgeError, printable

if TYPE_CHECKING:
    from dlm_bridge.loading import LoadedModel

LIMITS, BROWSERS = "Limits", "Browsers"
API_KEY = "DLM_BRIDGE_API_KEY"


def register_serve(app: typer.Typer) -> None:
    """Add `serve` to the app."""
    app.command("serve", cls=ModelCommand)(serve)


def register_app(app: typer.Typer) -> None:
    """Add `app` to the app."""
    app.command("app", cls=ModelCommand)(web_app)


def register_transformers(app: typer.Typer) -> None:
    """Add `transformers` to the app."""
    app.command("transformers", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
        transformers_command
    )


def serve(
    model: Model,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 is every network of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=API_KEY,
            show_envvar=False,
            help="Key that requests must send (Authorization: Bearer KEY); by default $DLM_BRIDGE_API_KEY, if set.",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Name of this server that requests may use (header Host); may be repeated. By default any, or those "
            "of this machine if it listens on this machine alone.",
            rich_help_panel=BROWSERS,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Web page's origin, such as https://example.com, whose scripts may use the server; may be repeated.",
            rich_help_panel=BROWSERS,
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A sampler's setting for requests without it; may be repeated."
        ),
    ] = None,
    batch_size: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Texts that are sampled at a time, at most; auto: as memory allows.",
            rich_help_panel=LIMITS,
        ),
    ] = "32",
    queue_size: Annotated[
        int,
        typer.Option(
            min=1, help="Texts that wait or are read, at most; further requests get 429.", rich_help_panel=LIMITS
        ),
    ] = 256,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a prompt and its new ones together, at most; by default the model's context, up to 4096.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_body: Annotated[
        int, typer.Option(min=1, metavar="MB", help="Size of a request, at most.", rich_help_panel=LIMITS)
    ] = 4,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.001,
            metavar="SECONDS",
            help="From a request's header to the end of its answer.",
            rich_help_panel=LIMITS,
        ),
    ] = 600.0,
    dtype: Dtype = "keep",
    device: Device = None,
    device_map: DeviceMap = None,
    tokenizer: Tokenizer = None,
    family: Family = None,
    revision: Revision = None,
    like: Like = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API: completions and chats, whole and streamed.

    Requests are sampled together. It listens on this machine alone unless --host says otherwise, and needs the extra
    `serve`.

    Example: dlm-bridge serve GSAI-ML/LLaDA-8B-Instruct --port 8000
    """
    _require("serve", ("fastapi", "uvicorn"))
    from dlm_bridge.cli.generate_request import parse_batch_size, parse_settings
    from dlm_bridge.serving.connections import LOOPBACK, bind
    from dlm_bridge.serving.model import ServedModel
    from dlm_bridge.serving.scheduler import Scheduler
    from dlm_bridge.serving.server import Limits, Server

    check_api_key(api_key)
    hosts, origins = allowed_host or [], cors_origin or []
    _check_names(
        "--allowed-host",
        hosts,
        r"\*|(\*\.)?[^\s*/:\[\]]+|\[[0-9a-fA-F:.]+\]",
        "a name without a port, such as example.com",
    )
    _check_names(
        "--cors-origin", origins, r"\*|[a-z][a-z0-9+.-]*://[^\s*/]+", "an origin, such as https://example.com"
    )
    defaults, rows = parse_settings(setting or []), parse_batch_size(batch_size)
    sock = bind(host, port)  # before the model is loaded, which may take minutes
    if ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
        hosts += [*LOOPBACK, host]
    elif api_key is None:
        typer.echo(
            f"warning: --host {host} without an API key: whoever reaches this machine can use the model; "
            f"set {API_KEY}",
            err=True,
        )
    loaded = _load(model, dtype, device, device_map, tokenizer, family, revision, like)
    name = printable(Path(model).resolve().name if Path(model).is_dir() else model)
    served = ServedModel(loaded, name, defaults, max_length)
    served.check()
    if rows is None:
        plan = served.plan()
        rows = plan.rows
        typer.echo(plan.summary, err=True)
    scheduler = Scheduler(served.open_engine, batch_size=rows, queue_size=queue_size)
    at = f"[{host}]" if ":" in host else host
    said = f"{printable(model)} ({loaded.family}): http://{at}:{sock.getsockname()[1]}/v1 (Ctrl-C ends)"
    limits = Limits(max_body * 2**20, timeout, api_key, tuple(hosts) or ("*",), tuple(origins))
    server = Server(served, scheduler, limits, sock, when_ready=lambda: print(said, flush=True))
    server.serve_forever()
    if server.busy:  # a forward pass or a prompt, for which nobody waits
        sys.stdout.flush()
        os._exit(0)


def _check_names(option: str, names: list[str], pattern: str, wanted: str) -> None:
    for name in names:
        if not re.fullmatch(pattern, name):
            raise DlmBridgeError(f"{option} {name!r} must be {wanted}, or *")


def check_api_key(key: str | None) -> None:
    """Raise DlmBridgeError for a key that no request can send, such as an empty one."""
    if key is None and os.environ.get(API_KEY) == "":  # which Typer takes for none
        key = ""
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise DlmBridgeError(
            f"--api-key or {API_KEY}: a key must be printable ASCII characters, without blanks around them: to serve "
            f"without a key, unset {API_KEY}"
        )


def web_app(
    model: Model,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The page is at http://127.0.0.1:PORT.")] = 7860,
    dtype: Dtype = "keep",
    device: Device = None,
    device_map: DeviceMap = None,
    tokenizer: Tokenizer = None,
    family: Family = None,
    revision: Revision = None,
    like: Like = None,
) -> None:
    """Open a page to sample in: watch the denoising, edit the sampler's settings, fill in masks.

    The page answers on this machine alone and loads nothing from elsewhere. It needs the extra `app`.

    Example: dlm-bridge app GSAI-ML/LLaDA-8B-Instruct
    """
    _require("app", ("gradio",))
    from dlm_bridge.serving.connections import HttpServer, bind
    from dlm_bridge.serving.web_page import PageModel, page_app

    sock = bind("127.0.0.1", port)  # before the model is loaded, which may take minutes
    loaded = _load(model, dtype, device, device_map, tokenizer, family, revision, like)
    shown = printable(model)
    page_model = PageModel(loaded.model, loaded.tokenizer, shown, diffusion=loaded.diffusion)
    said = f"{shown} ({loaded.family}): http://127.0.0.1:{port} (Ctrl-C ends)"
    app = page_app(page_model)
    try:
        HttpServer(app, sock, lambda: print(said, flush=True), grace_s=0, lifespan="on").serve_forever()
    finally:
        page_model.close()


def transformers_command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="Such as serve or chat, with its own arguments.")
    ],
) -> None:
    """Run transformers' own command line with the diffusion families registered.

    Its commands take models as they do of their own accord; `serve` and `chat` need the extra `serve`.

    Example: dlm-bridge transformers serve GSAI-ML/LLaDA-8B-Instruct --port 8000
    """
    if arguments[0] == "serve":
        _require("serve", ("openai", "pydantic", "fastapi", "uvicorn"))
        refuse_chats_without_template()
    from transformers.cli.transformers import app

    from dlm_bridge.models.auto_classes import register_model_names

    register_model_names()
    app(args=arguments, prog_name="dlm-bridge transformers")


def refuse_chats_without_template() -> None:
    """Let transformers' server answer 400 to a chat where the model has no chat template; it answers 500, with a
    traceback in its log. Other versions than those that were tried are left as they are."""
    try:
        from transformers.cli.serving import server
    except ImportError:
        return
    build = server.build_server

    def build_server(*arguments: Any, **options: Any) -> Any:
        from fastapi.responses import JSONResponse

        app = build(*arguments, **options)

        @app.exception_handler(ValueError)
        async def refuse(_: Any, error: ValueError) -> JSONResponse:
            if "chat_template" not in str(error):
                raise error
            message = "the model has no chat template: ask /v1/completions, or add chat_template.jinja to its folder"
            return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, 400)

        return app

    server.build_server = build_server


def _load(
    model: str,
    dtype: str,
    device: str | None,
    device_map: str | None,
    tokenizer: str | None,
    family: str | None,
    revision: str | None,
    like: str | None,
) -> LoadedModel:
    from transformers.utils import logging

    from dlm_bridge.loading import Placement, load_model

    logging.set_verbosity_error()  # warnings of transformers' generate are about settings that were checked here
    logging.disable_progress_bar()
    return load_model(
        model,
        Placement(device, device_map),
        dtype=dtype,
        family=family,
        revision=revision,
        like=like,
        tokenizer=tokenizer,
    )


def _require(extra: str, modules: tuple[str, ...]) -> None:
    """Raise DlmBridgeError unless the modules of an extra are installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise DlmBridgeError(f"this needs {', '.join(missing)}: pip install 'dlm-bridge[{extra}]'")
