"""`dlm-bridge convert-to-dlm` and `upcycle`: another model is made of a checkpoint's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dlm_bridge.cli import convert
from dlm_bridge.cli.help import ModelCommand


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("convert-to-dlm", cls=ModelCommand)(convert_to_dlm)
    app.command("upcycle", cls=ModelCommand)(upcycle)


def convert_to_dlm(
    source: Annotated[str, typer.Argument(metavar="AR_HF", help="Hub folder or Hub id of an autoregressive family.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The Hub folder to write.")],
    mask_token: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="The mask token, added where it is new; the tokenizer's own, else <|mask|>."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORM", help="What it becomes: bidirectional, shifted or block-causal; or the family's name."
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(metavar="N", help="Block size of a block-causal model (default 4).")
    ] = None,
    dequantize_fp8: Annotated[
        bool, typer.Option("--dequantize-fp8", help="Block-scaled FP8 weights become bfloat16.")
    ] = False,
    dequantize_mxfp4: Annotated[
        bool, typer.Option("--dequantize-mxfp4", help="Experts in MXFP4 (gpt-oss) become bfloat16.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the noise in the mask token's rows.")] = 0,
    revision: convert.Revision = None,
    workers: convert.Workers = None,
    overwrite: convert.Overwrite = False,
    accept_changed_tensors: convert.AcceptChanged = False,
    dry_run: convert.DryRun = False,
    as_json: convert.Json = False,
) -> None:
    """Turn an autoregressive checkpoint into a diffusion one with the same weights, ready for pretrain.

    Example: dlm-bridge convert-to-dlm Qwen/Qwen3-0.6B Qwen3-0.6B-dlm --mask-token '<|mask|>'
    """
    from dlm_bridge.convert.to_dlm import convert_to_dlm as run

    with convert.progress_bar("converting") as progress:
        report = run(
            source,
            output,
            mask_token,
            to,
            seed=seed,
            block_size=block_size,
            dequantize_fp8=dequantize_fp8,
            dequantize_mxfp4=dequantize_mxfp4,
            revision=revision,
            workers=workers,
            overwrite=overwrite,
            dry_run=dry_run,
            accept_changed_tensors=accept_changed_tensors,
            progress=progress,
        )
    convert.show_report(report.as_dict(), as_json)


def upcycle(
    source: Annotated[str, typer.Argument(metavar="DENSE_HF", help="Hub folder or Hub id of a dense model.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The Hub folder to write.")],
    experts: Annotated[int, typer.Option(metavar="N", help="Copies of each MLP.")],
    top_k: Annotated[int, typer.Option(metavar="K", help="Copies that a token goes through.")] = 2,
    granularity: Annotated[
        int, typer.Option(metavar="G", help="Experts that each copy is cut into, a power of two.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="Of the routers' noise.")] = 0,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="The largest weight file.")] = "5GB",
    revision: convert.Revision = None,
    workers: convert.Workers = None,
    overwrite: convert.Overwrite = False,
    accept_changed_tensors: convert.AcceptChanged = False,
    dry_run: convert.DryRun = False,
    as_json: convert.Json = False,
) -> None:
    """Turn a dense checkpoint into one with experts that computes the same, ready for pretrain.

    Example: dlm-bridge upcycle Qwen/Qwen3-0.6B Qwen3-8x0.6B --experts 8 --top-k 2
    """
    from dlm_bridge.convert.to_moe import upcycle as run

    with convert.progress_bar("upcycling") as progress:
        report = run(
            source,
            output,
            experts,
            top_k,
            granularity=granularity,
            seed=seed,
            shard_size=shard_size,
            revision=revision,
            workers=workers,
            overwrite=overwrite,
            dry_run=dry_run,
            accept_changed_tensors=accept_changed_tensors,
            progress=progress,
        )
    convert.show_report(report.as_dict(), as_json)
