"""`dlm-bridge generate`: sample from a diffusion or autoregressive model, one prompt or a file of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import typer

from dlm_bridge.cli.generate_request import (
    GenerateOptions,
    parse_options,
    sampling_parameters,
    take_settings,
    text_parameters,
)
from dlm_bridge.cli.help import (
    LOADING,
    Model,
    ModelCommand,
    declared_parameters,
    split_option,
    with_parameters,
)
from dlm_bridge.cli.launch import with_processes
from dlm_bridge.errors import SettingError
from dlm_bridge.generation.options import SAMPLING, SHARED
from dlm_bridge.settings import LoadingOptions, Option, check_choice, options_of

HELP = """Sample from a model: diffusion models with their family's sampler, autoregressive models with transformers'.

MODEL is a Hub folder or id, or a Megatron checkpoint. The text goes to stdout, statistics go to stderr. `--algorithm X
--help` lists the settings of a sampler; settings that it does not have are refused.

Example:

  dlm-bridge generate GSAI-ML/LLaDA-8B-Instruct --chat --prompt 'What is a bridge?' --gen-length 128 --show

A file of prompts, one {"prompt": ...} or {"messages": [...]} per line:

  dlm-bridge generate MODEL --jsonl in.jsonl --output out.jsonl

On several GPUs, with --device-map auto or:

  dlm-bridge generate MODEL --nproc-per-node 4 --tp-plan auto --prompt ...

  dlm-bridge generate MODEL --nproc-per-node 8 --tp 2 --jsonl in.jsonl --output out.jsonl
"""


class GenerateCommand(ModelCommand):
    """`generate`, whose help lists the settings of the sampler given by --algorithm."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["algorithm"] = [value for _, value in split_option(args, ("--algorithm",))[1]]
        return super().parse_args(ctx, args)

    def _panels(self, ctx: Any) -> dict[str, list[Any]]:
        panels = super()._panels(ctx)
        for name in ctx.meta["algorithm"][-1:]:
            from dlm_bridge.generation import SAMPLERS

            check_choice("algorithm", name, SAMPLERS)
            own = [_shown(declared) for declared in SAMPLERS[name].options().values()]
            general = [each for each in panels.pop(SAMPLING) if each.name not in SHARED]
            panels |= {f"Sampler {name}": own, SAMPLING: general, LOADING: panels.pop(LOADING)}
        return panels


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("generate", cls=GenerateCommand, help=HELP)(_command())


def _command() -> Callable[..., None]:
    """`generate` with the declared options."""

    def command(**given: Any) -> None:
        options = parse_options(given)
        settings = take_settings(options)
        if options["infill"]:
            if "infill" in settings:
                raise SettingError("infill", "has two values: remove it from `set`")
            settings["infill"] = True
        loading = LoadingOptions(**{name: options.pop(name) for name in options_of(LoadingOptions)})
        request = GenerateOptions(settings=settings, loading=loading, **options)
        request.check()
        # Imported after the checks, so that errors appear at once.
        from dlm_bridge.cli.generate_run import run

        run(request)

    parameters = {"model": (Model, ...), **text_parameters(GenerateOptions), **sampling_parameters()}
    return with_processes(with_parameters(command, {**parameters, **declared_parameters(LoadingOptions)}))


def _shown(declared: Option) -> SimpleNamespace:
    """A sampler's parameter as a row of the help page."""
    flag = f"--{declared.name.replace('_', '-')}" if declared.name in SHARED else f"--set {declared.name}="
    return SimpleNamespace(
        param_type_name="option",
        name=declared.name,
        opts=[flag],
        secondary_opts=[],
        is_flag=True,
        help=declared.help,
        required=False,
        default=declared.default,
        show_default=declared.default is not None and str(declared.default),
    )
