"""`dlm-bridge convert-to-dlm` and `upcycle`: create a new model from a checkpoint's weights."""

from __future__ import annotations

from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_bridge.cli import convert
from dlm_bridge.cli.help import declared_parameters
from dlm_bridge.convert.settings import ToDlmSettings, UpcycleSettings


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    output = {"output": convert.argument("OUT", "The Hub folder to write.", Path)}
    source = {"source": convert.argument("AR_HF", "Hub folder or Hub id of an autoregressive family.")}
    convert.add_command(app, "convert-to-dlm", convert_to_dlm, source | output, declared_parameters(ToDlmSettings))
    source = {"source": convert.argument("DENSE_HF", "Hub folder or Hub id of a dense model.")}
    experts = Annotated[int, typer.Option(metavar="N", help="Number of copies of each MLP.")]
    options = {"experts": (experts, Parameter.empty)} | declared_parameters(UpcycleSettings)
    convert.add_command(app, "upcycle", upcycle, source | output, options)


def convert_to_dlm(source: str, output: Path, as_json: bool, **settings: Any) -> None:
    """Adapt an autoregressive checkpoint to diffusion: same weights and a mask token, ready for pretrain.

    Example: dlm-bridge convert-to-dlm Qwen/Qwen3-0.6B Qwen3-0.6B-dlm --mask-token '<|mask|>'
    """
    from dlm_bridge.convert import to_dlm

    with convert.progress_bar("converting") as progress:
        report = to_dlm.convert_to_dlm(source, output, **settings, progress=progress)
    convert.show_report(report.as_dict(), as_json)


def upcycle(source: str, output: Path, as_json: bool, **settings: Any) -> None:
    """Convert a dense checkpoint to a mixture of experts with the same logits, ready for pretrain.

    Example: dlm-bridge upcycle Qwen/Qwen3-0.6B Qwen3-8x0.6B --experts 8 --top-k 2
    """
    from dlm_bridge.convert import to_moe

    with convert.progress_bar("upcycling") as progress:
        report = to_moe.upcycle(source, output, **settings, progress=progress)
    convert.show_report(report.as_dict(), as_json)
