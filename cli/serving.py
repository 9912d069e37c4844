"""`dlm-bridge app`: a page to sample in. `dlm-bridge transformers`: transformers' own commands with our families."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from dlm_bridge.cli.help import LOADING, cast_dtypes, completes, family_names
from dlm_bridge.errors import DlmBridgeError


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("app")(web_app)
    app.command("transformers", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
        transformers_command
    )


def web_app(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub folder or id, or Megatron checkpoint.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="The page is at http://127.0.0.1:PORT.")] = 7860,
    dtype: Annotated[
        str,
        typer.Option(
            help="keep (as stored), bf16, fp16 or fp32.",
            autocompletion=completes(cast_dtypes),
            rich_help_panel=LOADING,
        ),
    ] = "keep",
    device: Annotated[
        str | None, typer.Option(help="Such as cpu, cuda or cuda:1; a GPU by default.", rich_help_panel=LOADING)
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(
            metavar="MAP",
            help="Several GPUs, CPU and disk: auto, or a JSON object of devices.",
            rich_help_panel=LOADING,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or id; the model's own by default.", rich_help_panel=LOADING)
    ] = None,
    family: Annotated[
        str | None,
        typer.Option(
            help="The model family, where config.json cannot tell.",
            autocompletion=completes(family_names),
            rich_help_panel=LOADING,
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a Hub id.", rich_help_panel=LOADING)
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="HF", help="Hub model of a Megatron checkpoint of another program.", rich_help_panel=LOADING
        ),
    ] = None,
) -> None:
    """Open a page to sample in: watch the denoising, edit the sampler's settings, fill in masks.

    The page answers on this machine alone and loads nothing from elsewhere. It needs the extra `app`.

    Example: dlm-bridge app GSAI-ML/LLaDA-8B-Instruct
    """
    _require("app", ("gradio",))
    from transformers.utils import logging

    from dlm_bridge.generation.display.web_page import PageModel, serve_page
    from dlm_bridge.loading import Placement, load_model

    logging.set_verbosity_error()  # warnings of transformers' generate are about settings that were checked here
    logging.disable_progress_bar()
    loaded = load_model(
        model,
        Placement(device, device_map),
        dtype=dtype,
        family=family,
        revision=revision,
        like=like,
        tokenizer=tokenizer,
    )
    page_model = PageModel(loaded.model, loaded.tokenizer, model, diffusion=loaded.diffusion)
    typer.echo(f"{model} ({loaded.family}): http://127.0.0.1:{port} (Ctrl-C ends)")
    try:
        serve_page(page_model, port)
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
    from transformers.cli.transformers import app

    from dlm_bridge.registration import register_model_names

    register_model_names()
    app(args=arguments, prog_name="dlm-bridge transformers")


def _require(extra: str, modules: tuple[str, ...]) -> None:
    """Raise DlmBridgeError unless the modules of an extra are installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise DlmBridgeError(f"this needs {', '.join(missing)}: pip install 'dlm-bridge[{extra}]'")
