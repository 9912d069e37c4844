"""The training commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

PRETRAIN_HELP = """Train a model on text: from its weights, or from nothing with --from-scratch.

Every option can stand in a YAML file given with --config, under its name with underscores; the command line wins.
DIR gets config.yaml, metrics.jsonl (a line a step), loss.png and checkpoints/step-NNNNNNN, each a Hub folder.

Example:

  dlm-bridge pretrain --model GSAI-ML/LLaDA-8B-Base --data 'corpus/*.jsonl' --output run --steps 1000 --precision bf16

On several processes: torchrun --nproc-per-node 2 -m dlm_bridge.cli pretrain ...
"""


def register(app: typer.Typer) -> None:
    """Add the training commands to the app."""
    app.command(help=PRETRAIN_HELP)(pretrain)


def pretrain(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Hub folder or id, Megatron checkpoint, or a config.json's folder.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="Text, JSONL, parquet, a folder, a glob, or mock. May be repeated.")
    ] = None,
    more_data: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    output: Annotated[str | None, typer.Option(help="The run's folder.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of options.")] = None,
    engine: Annotated[str | None, typer.Option(help="accelerate.")] = None,
    family: Annotated[str | None, typer.Option(help="The model family, where config.json cannot tell.")] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="Where the model's config has none.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or id; the model's own by default.")] = None,
    from_scratch: Annotated[
        bool | None, typer.Option("--from-scratch/--from-weights", help="Initialise from config.json and --seed.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Sequences a step, over all processes.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Sequences at once on a process.")] = None,
    seq_length: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of data order, noise and initial weights.")] = None,
    objective: Annotated[
        str | None, typer.Option(help="masked, shifted, block, causal, ...; the family's own by default.")
    ] = None,
    length_variation: Annotated[float | None, typer.Option(help="Share of sequences cut to a random length.")] = None,
    mask_annealing_steps: Annotated[
        int | None, typer.Option(help="Steps over which causal attention opens to bidirectional.")
    ] = None,
    block_schedule: Annotated[
        str | None, typer.Option(help="step:block size pairs, growing, such as 0:4,1000:8,2000:32.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    lr_schedule: Annotated[str | None, typer.Option(help="cosine, linear or constant.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of linear warm-up.")] = None,
    min_lr: Annotated[float | None, typer.Option(help="Rate at the last step.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Of all but biases and norms.")] = None,
    beta1: Annotated[float | None, typer.Option(help="AdamW's first beta.")] = None,
    beta2: Annotated[float | None, typer.Option(help="AdamW's second beta.")] = None,
    adam_eps: Annotated[float | None, typer.Option(help="AdamW's epsilon.")] = None,
    clip_grad: Annotated[float | None, typer.Option(help="Largest gradient norm, 0: no clipping.")] = None,
    split: Annotated[str | None, typer.Option(help="Training, validation and test shares, such as 99,1,0.")] = None,
    eval_interval: Annotated[int | None, typer.Option(help="Steps between validations, 0: never.")] = None,
    save_interval: Annotated[int | None, typer.Option(help="Steps between checkpoints, 0: only the last.")] = None,
    keep_last: Annotated[int | None, typer.Option(help="Checkpoints to keep, 0: all.")] = None,
    exit_duration: Annotated[float | None, typer.Option(help="Save and exit after so many minutes.")] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--gradient-checkpointing/--no-gradient-checkpointing", help="Recompute activations to save memory."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --output.")] = False,
) -> None:
    # What was not given on the command line must not override the YAML file.
    given: dict[str, Any] = {
        name: value
        for name, value in context.params.items()
        if value is not None and name not in ("config", "resume", "data", "more_data")
    }
    if more_data and not data:
        raise typer.BadParameter(f"unexpected argument '{more_data[0]}'")
    if data:  # --data a b c, as an unquoted glob gives it, leaves b and c as arguments
        given["data"] = [*data, *(more_data or [])]

    from dlm_bridge.train.config import load_config

    resolved = load_config(given, config, resume)
    # Checked before the slow imports: a mistyped flag should answer at once.
    import datasets
    import transformers

    from dlm_bridge.train.accelerate_engine import pretrain as run

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    run(resolved, resume)
