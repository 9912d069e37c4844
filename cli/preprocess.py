"""`dlm-bridge preprocess`: tokenise text to a Megatron pair (.bin, .idx)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_bridge.cli.convert import Json, progress_bar
from dlm_bridge.cli.help import declared_parameters, with_parameters
from dlm_bridge.data.options import PreprocessOptions
from dlm_bridge.errors import counted, printable

Inputs = Annotated[
    list[str],
    typer.Argument(metavar="INPUT...", help="Text, JSONL, parquet, a folder, a glob, or a dataset NAME:CONFIG:SPLIT."),
]


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    parameters = {"inputs": (Inputs, ...), **declared_parameters(PreprocessOptions), "as_json": (Json, False)}
    app.command("preprocess")(with_parameters(preprocess, parameters))


def preprocess(as_json: bool = False, **options: Any) -> None:
    """Tokenise text to a .bin/.idx pair in Megatron-LM's format.

    Example: dlm-bridge preprocess corpus.jsonl --output corpus --tokenizer GSAI-ML/LLaDA-8B-Base --append-eod
    """
    from dlm_bridge.data.preprocess import preprocess as run
    from dlm_bridge.loading.pretrained import load_tokenizer

    settings = PreprocessOptions(**options)
    tokenizer = load_tokenizer(settings.tokenizer)
    with progress_bar("tokenising") as progress:
        report = run(settings, tokenizer, progress)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
        return
    output = printable(settings.output)
    typer.echo(
        f"{output}.bin, {Path(output).name}.idx: {counted(report.documents, 'document')}, "
        f"{counted(report.tokens, 'token')} ({report.dtype}), {report.tokens_per_s:,.0f} tokens/s"
    )
