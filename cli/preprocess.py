"""`dlm-bridge preprocess`: tokenise text to a Megatron pair (.bin, .idx)."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from dlm_bridge.cli.convert import Json, Overwrite, Resume, progress_bar
from dlm_bridge.errors import printable


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("preprocess")(preprocess)


def preprocess(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="Text, JSONL, parquet, a folder, a glob, or a dataset NAME:CONFIG:SPLIT."
        ),
    ],
    output: Annotated[str, typer.Option(metavar="PREFIX", help="Writes PREFIX.bin and PREFIX.idx.")],
    tokenizer: Annotated[str, typer.Option(help="Folder or Hub id.")],
    append_eod: Annotated[
        bool, typer.Option("--append-eod", help="End each document with the tokenizer's EOS.")
    ] = False,
    key: Annotated[
        str, typer.Option("--json-key", "--text-key", help="The field or column that holds the text.")
    ] = "text",
    workers: Annotated[
        int | None,
        typer.Option(help="Number of processes; 1 uses the tokenizer's own threads. Default: all cores."),
    ] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Tokenise text to a .bin/.idx pair in Megatron-LM's format.

    Example: dlm-bridge preprocess corpus.jsonl --output corpus --tokenizer GSAI-ML/LLaDA-8B-Base --append-eod
    """
    from dlm_bridge.data.preprocess import preprocess as run
    from dlm_bridge.loading.pretrained import load_tokenizer

    loaded = load_tokenizer(tokenizer, f"--tokenizer {tokenizer}")
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    with progress_bar("tokenising") as progress:
        report = run(inputs, output, loaded, append_eod, key, workers, overwrite, progress, resume)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report)))
        return
    typer.echo(
        f"{printable(output)}.bin, {printable(Path(output).name)}.idx: {report.documents:,} documents, "
        f"{report.tokens:,} tokens ({report.dtype}), {report.tokens_per_s:,.0f} tokens/s"
    )
