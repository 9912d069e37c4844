"""`dlm-bridge generate`: sample from a diffusion or autoregressive model, one prompt or a file of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_bridge.cli.generate_request import (
    ALIASES,
    SETTINGS,
    Arguments,
    parse_batch_size,
    parse_settings,
    parse_template_args,
)
from dlm_bridge.cli.help import (
    LOADING,
    ChatTemplateArgs,
    Device,
    DeviceMap,
    Dtype,
    Family,
    Like,
    Model,
    ModelCommand,
    Revision,
    Tokenizer,
    TpPlan,
    completes,
    general_choices,
    sampler_names,
)
from dlm_bridge.errors import DlmBridgeError

HELP = """Sample from a model: a diffusion one with its family's sampler, an autoregressive one with transformers' own.

MODEL is a Hub folder or id, or a Megatron checkpoint. The text goes to stdout, and how it was made to stderr. A
setting that a sampler does not have is refused with those that it has.

Example:

  dlm-bridge generate GSAI-ML/LLaDA-8B-Instruct --chat --prompt 'What is a bridge?' --gen-length 128 --show

Many prompts, {"prompt": ...} or {"messages": [...]} a line:

  dlm-bridge generate MODEL --jsonl in.jsonl --output out.jsonl

On several GPUs with --device-map auto, or:

  torchrun --nproc-per-node 4 -m dlm_bridge.cli generate MODEL --tp-plan auto --prompt ...

  torchrun --nproc-per-node 8 -m dlm_bridge.cli generate MODEL --tp 2 --jsonl in.jsonl --output out.jsonl
"""
Option = typer.Option
COMPLETED = {
    "algorithm": sampler_names,
    "cache": general_choices("cache"),
    "execution": general_choices("execution"),
}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("generate", cls=ModelCommand, help=HELP)(_command())


def _command() -> Callable[..., None]:
    """`generate` with an option for each of `SETTINGS`."""

    def command(**options: Any) -> None:
        usual = {name: options.pop(name) for name in SETTINGS}
        settings = {name: value for name, value in usual.items() if value is not None}
        if options.pop("infill"):
            settings["infill"] = True
        for name, value in parse_settings(options.pop("set") or []).items():
            if name in settings:
                raise DlmBridgeError(f"--set {name}: --{name.replace('_', '-')} says it already")
            settings[name] = value
        options["template_args"] = parse_template_args(options.pop("chat_template_args") or [])
        options["batch_size"] = parse_batch_size(options["batch_size"])
        request = Arguments(settings=settings, **options)
        request.check()
        # Imported only now: a mistyped option should answer at once.
        from dlm_bridge.cli.generate_run import run

        run(request)

    annotations = _run_options() | _sampling_options() | _loading_options()
    defaults: dict[str, Any] = {
        "model": inspect.Parameter.empty,
        "field": "prompt",
        "batch_size": "8",
        "dtype": "keep",
        **dict.fromkeys(("chat", "infill", "commit_steps", "overwrite", "resume", "show", "as_json"), False),
    }
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=annotation)
        for name, annotation in annotations.items()
    ]
    command.__annotations__ = annotations
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which Typer reads
    return command


def _run_options() -> dict[str, Any]:
    """Prompts, outputs and how rows are sampled together."""
    return {
        "model": Model,
        "prompt": Annotated[str | None, Option(metavar="TEXT", help="The prompt.")],
        "chat": Annotated[bool, Option("--chat", help="The prompt is a user's message: use the chat template.")],
        "system": Annotated[str | None, Option(metavar="TEXT", help="Of --chat: the system's message.")],
        "chat_template_args": ChatTemplateArgs,
        "infill": Annotated[
            bool, Option("--infill", help="Fill the prompt's [MASK] or [MASK:n], a token or n of them.")
        ],
        "jsonl": Annotated[str | None, Option(metavar="FILE", help="Prompts, one JSON object a line; - is stdin.")],
        "field": Annotated[str, Option(help="Of --jsonl: where a row has its prompt.")],
        "batch_size": Annotated[
            str, Option(metavar="N|auto", help="Of --jsonl: rows that are sampled together; auto: as memory allows.")
        ],
        "commit_steps": Annotated[
            bool,
            Option(
                "--commit-steps", help="Of --jsonl: write prompt_token_ids and commit_steps, for sft on trajectories."
            ),
        ],
        "output": Annotated[Path | None, Option(metavar="FILE", help="Write there, whole or not at all.")],
        "overwrite": Annotated[bool, Option("--overwrite", help="Replace --output, --html and --svg.")],
        "resume": Annotated[
            bool,
            Option("--resume", help="With --jsonl: continue from OUTPUT.partial, left by an interrupt."),
        ],
        "show": Annotated[bool, Option("--show", help="Watch the denoising, where stdout is a terminal.")],
        "html": Annotated[Path | None, Option(metavar="FILE", help="Write an animated page of the denoising.")],
        "svg": Annotated[Path | None, Option(metavar="FILE", help="Write an animated picture of the denoising.")],
        "as_json": Annotated[bool, Option("--json", help="One JSON object on stdout.")],
    }


def _sampling_options() -> dict[str, Any]:
    """An option for each of `SETTINGS`, and --set."""
    annotations: dict[str, Any] = {}
    for name, (kind, text) in SETTINGS.items():
        flags = [f"--{word.replace('_', '-')}" for word in (name, *ALIASES.get(name, ()))]
        more: dict[str, Any] = {"rich_help_panel": "Sampling"}
        if name in COMPLETED:
            more["autocompletion"] = completes(COMPLETED[name])
        annotations[name] = Annotated[kind | None, Option(*flags, help=text, **more)]
    annotations["set"] = Annotated[
        list[str] | None,
        Option("--set", metavar="NAME=VALUE", rich_help_panel="Sampling", help="Any other setting. May be repeated."),
    ]
    return annotations


def _loading_options() -> dict[str, Any]:
    """Which model, and where it goes."""
    panel: dict[str, Any] = {"rich_help_panel": LOADING}
    return {
        "dtype": Dtype,
        "device": Device,
        "device_map": DeviceMap,
        "offload_folder": Annotated[
            str | None, Option(metavar="DIR", help="Where --device-map puts what goes to the disk.", **panel)
        ],
        "tp_plan": TpPlan,
        "tp": Annotated[
            int | None, Option(min=1, help="The same in groups of N processes, each with a share of --jsonl.", **panel)
        ],
        "tokenizer": Tokenizer,
        "family": Family,
        "revision": Revision,
        "like": Like,
    }
