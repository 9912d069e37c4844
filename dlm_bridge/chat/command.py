"""`dlm-bridge chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_bridge.cli.generate_request import parse_options, sampling_parameters, take_settings, text_parameters
from dlm_bridge.cli.help import ModelCommand, with_parameters
from dlm_bridge.distributed import world_size
from dlm_bridge.errors import InputFileError, SettingError
from dlm_bridge.settings import LoadingOptions, common_option

if TYPE_CHECKING:
    from dlm_bridge.chat.local import LocalModel

NOT_OFFERED = ("tp_plan", "tp")  # loading options of commands with several processes
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Hub folder or id, or Megatron checkpoint. With --url: its name there; by default the first.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ChatOptions(LoadingOptions):
    """Options of `chat`, without the sampler's settings."""

    url: str | None = common_option(
        None, "Server with OpenAI's API that answers instead, such as http://127.0.0.1:8000.", metavar="URL"
    )
    api_key: str | None = common_option(
        None, "With --url: key of the server; by default $DLM_BRIDGE_API_KEY, if set.", metavar="TEXT"
    )
    system: str | None = common_option(None, "System message.", metavar="TEXT")
    chat_template_args: dict[str, Any] = common_option(
        {}, "Variable of the chat template: enable_thinking=false. Repeatable.", metavar="KEY=VALUE"
    )


def register(app: typer.Typer) -> None:
    """Add `chat` to the app."""
    parameters = {"model": (Model, None), **text_parameters(ChatOptions, NOT_OFFERED), **sampling_parameters()}
    app.command("chat", cls=ModelCommand)(with_parameters(chat, parameters))


def chat(model: str | None, **given: Any) -> None:
    """Chat with a model in the terminal, and watch how its answers are denoised.

    Type /help for the commands: they show and set the sampler's settings, start again, and save the conversation.
    Ctrl-C stops an answer; Ctrl-D ends.

    Example: dlm-bridge chat GSAI-ML/LLaDA-8B-Instruct --gen-length 128 --preset fast

    With a server, of dlm-bridge or any other with OpenAI's API:

      dlm-bridge chat --url http://127.0.0.1:8000
    """
    options = parse_options(given)
    settings = take_settings(options)
    request = ChatOptions(**options)
    if model is None and request.url is None:
        raise SettingError("model", "name a model, or a server with `url`")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InputFileError(
            "stdin",
            "chat needs a terminal: `dlm-bridge generate --chat` answers one message, with --jsonl a file of them",
        )
    from dlm_bridge.chat.session import Session

    if request.url is None:
        speaker: Any = _load(str(model), request)
    else:
        from dlm_bridge.chat.remote import RemoteModel

        key = os.environ.get("DLM_BRIDGE_API_KEY") if request.api_key is None else request.api_key
        speaker = RemoteModel.connect(request.url, key, model, request.chat_template_args)
    speaker.check(settings)
    Session(speaker, settings, request.system).run()


def _load(model: str, request: ChatOptions) -> LocalModel:
    from transformers.utils import logging

    from dlm_bridge.chat.local import LocalModel
    from dlm_bridge.generation.prompts import encode_chat
    from dlm_bridge.loading import Placement, load_model

    if (processes := world_size()) > 1:
        raise SettingError("WORLD_SIZE", f"is {processes}, but a chat is one process: start one")
    logging.set_verbosity_error()  # transformers' generate warns about settings that are checked here
    logging.disable_progress_bar()
    loaded = load_model(model, Placement.of(request), **request.source)
    encode_chat(loaded.tokenizer, [{"role": "user", "content": "?"}], model)  # refused without a template
    return LocalModel(loaded, model, request.chat_template_args)
