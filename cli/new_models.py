"""`dlm-bridge convert-to-dlm` and `upcycle`: create a new model from a checkpoint's weights."""

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
            metavar="TEXT", help="The mask token, added if new. Default: the tokenizer's own, or else <|mask|>."
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="FORM", help="Form of the result: bidirectional, shifted, block-causal, or a family's name."
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(metavar="N", help="Block size of a block-causal model (default 4).")
    ] = None,
    dequantize_fp8: Annotated[
        bool, typer.Option("--dequantize-fp8", help="Read block-scaled FP8 weights as bfloat16.")
    ] = False,
    dequantize_mxfp4: Annotated[
        bool, typer.Option("--dequantize-mxfp4", help="Read experts in MXFP4 (gpt-oss) as bfloat16.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the mask token's random embedding.")] = 0,
    revision: convert.Revision = None,
    workers: convert.Workers = None,
    overwrite: convert.Overwrite = False,
    accept_changed_tensors: convert.AcceptChanged = False,
    dry_run: convert.DryRun = False,
    as_json: convert.Json = False,
) -> None:
    """Adapt an autoregressive checkpoint to diffusion: same weights and a mask token, ready for pretrain.

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
    experts: Annotated[int, typer.Option(metavar="N", help="Number of copies of each MLP.")],
    top_k: Annotated[int, typer.Option(metavar="K", help="Copies per token.")] = 2,
    granularity: Annotated[int, typer.Option(metavar="G", help="Experts per copy, a power of two.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the routers' random weights.")] = 0,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest weight file.")] = "5GB",
    revision: convert.Revision = None,
    workers: convert.Workers = None,
    overwrite: convert.Overwrite = False,
    accept_changed_tensors: convert.AcceptChanged = False,
    dry_run: convert.DryRun = False,
    as_json: convert.Json = False,
) -> None:
    """Convert a dense checkpoint to a mixture of experts with the same logits, ready for pretrain.

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
