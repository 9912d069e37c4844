"""`dlm-bridge serve`, `app` and `transformers`: a server, a page, and transformers' own commands with our families."""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_bridge import terminal
from dlm_bridge.cli.generate_request import parse_options, text_parameters
from dlm_bridge.cli.help import Model, ModelCommand, with_parameters
from dlm_bridge.cli.launch import with_processes
from dlm_bridge.distributed import is_main, world_size
from dlm_bridge.errors import MissingExtraError, SettingError, printable
from dlm_bridge.registration import load, registered
from dlm_bridge.serving.options import AppOptions, ServeOptions
from dlm_bridge.settings import LoadingOptions

if TYPE_CHECKING:
    from dlm_bridge.generation.batch_size import Capacity
    from dlm_bridge.loading import LoadedModel
    from dlm_bridge.serving.model import ServedModel
    from dlm_bridge.serving.shared import SharedEngine

API_KEY = "DLM_BRIDGE_API_KEY"
NOT_OFFERED = ("offload_folder", "tp_plan")  # loading options of other commands


def register_serve(app: typer.Typer) -> None:
    """Add `serve` to the app."""
    _add(app, "serve", serve, ServeOptions, NOT_OFFERED)


def register_app(app: typer.Typer) -> None:
    """Add `app` to the app."""
    _add(app, "app", web_app, AppOptions, (*NOT_OFFERED, "tp"))


def _add(app: typer.Typer, name: str, command: Any, options: type, without: Sequence[str]) -> None:
    command = with_parameters(command, {"model": (Model, ...), **text_parameters(options, without)})
    app.command(name, cls=ModelCommand)(_with_replicas(with_processes(command)) if "tp" not in without else command)


def _with_replicas(command: Callable[..., None]) -> Callable[..., None]:
    """The command, or with `replicas` the extension that runs it in each of them."""

    @functools.wraps(command)
    def on_replicas(**given: Any) -> None:
        (command if given["replicas"] is None else load("features", "serve --replicas"))(**given)

    return on_replicas


def register_transformers(app: typer.Typer) -> None:
    """Add `transformers` to the app."""
    app.command("transformers", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
        transformers_command
    )


def serve(model: str, **given: Any) -> None:
    """Serve a model over HTTP with OpenAI's API: completions and chats, whole and streamed.

    Requests are sampled together. The server listens on this machine alone unless --host names another address. With
    --nproc-per-node N, N processes share the model (tensor parallelism); with --replicas N, N processes have a copy
    each, behind one address. It needs the extra `serve`.

    Example: dlm-bridge serve GSAI-ML/LLaDA-8B-Instruct --port 8000
    """
    require_extra("serve", ("fastapi", "uvicorn", "prometheus_client"))
    options = ServeOptions(**parse_options(given))
    if options.prefix_cache is not None:
        load("features", "prefix cache")  # refused before the model is loaded
    from dlm_bridge.serving.scheduler import Scheduler
    from dlm_bridge.serving.server import Server

    processes = world_size()
    options = dataclasses.replace(options, tp=options.tp or (processes if processes > 1 else None))
    if not is_main():
        _follow(model, options)
        return
    sock, options, address = listen(options)
    name = printable(Path(model).resolve().name if Path(model).is_dir() else model)
    served, plan, shared = _served(model, name, options)
    if plan is not None and not terminal.is_quiet():
        typer.echo(plan.summary, err=True)
    batch_size = plan.rows if plan is not None else options.batch_size or 1
    scheduler = Scheduler((shared or served).open_engine, batch_size=batch_size, queue_size=options.queue_size)
    ready = f"{printable(model)} ({served.loaded.family}): {address} (Ctrl-C ends)"
    server = Server(served, scheduler, options, sock, when_ready=lambda: print(ready, flush=True))
    server.serve_forever()
    if server.busy:  # a forward pass or a prompt that no client waits for
        sys.stdout.flush()
        os._exit(0)
    if shared is not None:
        shared.end()


def listen(options: ServeOptions) -> tuple[socket.socket, ServeOptions, str]:
    """Check the options of a server's address and bind it. Returns its socket, the options with the API key and with
    the names that requests may use, and its URL. Raises SettingError."""
    from dlm_bridge.serving.connections import LOOPBACK, bind

    key = checked_api_key(options.api_key)
    hosts, host = list(options.allowed_host), options.host
    _check_names(
        "allowed_host",
        hosts,
        r"\*|(\*\.)?[^\s*/:\[\]]+|\[[0-9a-fA-F:.]+\]",
        "a name without a port, such as example.com",
    )
    _check_names(
        "cors_origin",
        options.cors_origin,
        r"\*|[a-z][a-z0-9+.-]*://[^\s*/]+",
        "an origin, such as https://example.com",
    )
    sock = bind(host, options.port)  # before the model is loaded, which can take minutes
    if ipaddress.ip_address(sock.getsockname()[0]).is_loopback:
        hosts += [*LOOPBACK, host]
    elif key is None:
        typer.echo(
            f"warning: the server listens on {host} without an API key: whoever reaches this machine can use the "
            f"model; set {API_KEY}",
            err=True,
        )
    address = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}/v1"
    return sock, dataclasses.replace(options, api_key=key, allowed_host=hosts), address


def _served(model: str, name: str, options: ServeOptions) -> tuple[ServedModel, Capacity | None, SharedEngine | None]:
    """The model, the batch size that fits memory if it is not set, and the engine of several processes."""
    from dlm_bridge.serving.model import ServedModel
    from dlm_bridge.serving.shared import SharedEngine

    served = ServedModel(_load(model, options), name, options.set, options.max_length)
    served.check()
    served = dataclasses.replace(served, prompts=_prompt_cache(served, options))  # its memory is not free
    plan = served.plan() if options.batch_size is None else None
    return served, plan, SharedEngine(served) if world_size() > 1 else None


def _prompt_cache(served: ServedModel, options: ServeOptions) -> Any:
    """The `prefix_cache.PromptCache` of the options; None without the extension or for an autoregressive model."""
    if options.prefix_cache is None and ("prefix cache" not in registered("features") or not served.loaded.diffusion):
        return None
    return load("features", "prefix cache")(
        served.loaded.model,
        dict(served.defaults),
        prefix_cache=options.prefix_cache,
        prefill_chunk=options.prefill_chunk,
    )


def _follow(model: str, options: ServeOptions) -> None:
    """Serve as one of the processes that share the model, but not the first."""
    _, _, shared = _served(model, model, options)
    assert shared is not None
    shared.follow()


def _check_names(setting: str, names: list[str], pattern: str, wanted: str) -> None:
    for name in names:
        if not re.fullmatch(pattern, name):
            raise SettingError(setting, f"{name!r} must be {wanted}, or *")


def checked_api_key(key: str | None) -> str | None:
    """The key, by default that of the environment. Raises SettingError for a key that no request can send, such as an
    empty one."""
    key = os.environ.get(API_KEY) if key is None else key
    if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
        raise SettingError(
            "api_key",
            f"a key (also in {API_KEY}) must be printable ASCII characters without blanks around them: to serve "
            f"without a key, unset {API_KEY}",
        )
    return key


def web_app(model: str, **given: Any) -> None:
    """Open a page to sample in: watch the denoising, edit the sampler's settings, fill in masks.

    The page answers on this machine alone and loads nothing from elsewhere. It needs the extra `app`.

    Example: dlm-bridge app GSAI-ML/LLaDA-8B-Instruct
    """
    require_extra("app", ("gradio",))
    if (processes := world_size()) > 1:
        raise SettingError("WORLD_SIZE", f"is {processes}, but the page is one process: start one (srun --ntasks=1)")
    options = AppOptions(**given)
    from dlm_bridge.serving.connections import HttpServer, bind
    from dlm_bridge.serving.web_page import PageModel, page_app

    sock = bind("127.0.0.1", options.port)  # before the model is loaded, which can take minutes
    loaded = _load(model, options)
    shown = printable(model)
    page_model = PageModel(loaded.model, loaded.tokenizer, shown, diffusion=loaded.diffusion)
    ready = f"{shown} ({loaded.family}): http://127.0.0.1:{options.port} (Ctrl-C ends)"
    app = page_app(page_model)
    try:
        HttpServer(app, sock, lambda: print(ready, flush=True), grace_s=0, lifespan="on").serve_forever()
    finally:
        page_model.close()


def transformers_command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="COMMAND...", help="serve, chat or another command, with its own arguments.")
    ],
) -> None:
    """Run transformers' own command line with the diffusion families registered.

    The commands and their arguments are transformers' own. `serve` and `chat` need the extra `serve`.

    Example: dlm-bridge transformers serve GSAI-ML/LLaDA-8B-Instruct --port 8000
    """
    if arguments[0] == "serve":
        require_extra("serve", ("openai", "pydantic", "fastapi", "uvicorn"))
        refuse_chats_without_template()
    from transformers.cli.transformers import app

    from dlm_bridge.models.auto_classes import register_model_names

    register_model_names()
    app(args=arguments, prog_name="dlm-bridge transformers")


def refuse_chats_without_template() -> None:
    """Patch transformers' server to answer 400 to a chat if the model has no chat template. It answers 500 otherwise
    (5.23, 5.24), with a traceback in its log."""
    from transformers.cli.serving import server

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


def _load(model: str, options: LoadingOptions) -> LoadedModel:
    from transformers.utils import logging

    from dlm_bridge.loading import Placement, load_model

    logging.set_verbosity_error()  # transformers' generate warns about settings that were checked here
    logging.disable_progress_bar()
    return load_model(model, Placement.of(options), **options.source)


def require_extra(extra: str, modules: tuple[str, ...]) -> None:
    """Raise MissingExtraError unless the modules of an extra are installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtraError(", ".join(missing), f"not installed: pip install 'dlm-bridge[{extra}]'")
