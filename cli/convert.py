"""The conversion commands: import, export, reshard, inspect."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_bridge.cli.help import (
    LAYOUT,
    OUTPUT,
    RUNNING,
    SOURCE,
    ModelCommand,
    cast_dtypes,
    completes,
    family_names,
    format_names,
    key_styles,
)
from dlm_bridge.errors import printable

if TYPE_CHECKING:
    from dlm_bridge.mapping.layout import Layout

SPLIT_HELP = (
    "Uneven pipeline: FIRST,LAST layers on the first and last stage (the rest even), or one number per stage, or "
    "megatron-core's layout string such as 'Et*3|t*3|t*2L'."
)
Tp = Annotated[int, typer.Option(help="Tensor parallel size.", rich_help_panel=LAYOUT)]
Pp = Annotated[int, typer.Option(help="Pipeline parallel size.", rich_help_panel=LAYOUT)]
Vp = Annotated[int, typer.Option(help="Virtual pipeline chunks per pipeline rank.", rich_help_panel=LAYOUT)]
Ep = Annotated[int, typer.Option(help="Expert parallel size.", rich_help_panel=LAYOUT)]
Etp = Annotated[
    int | None, typer.Option(help="Expert tensor parallel size. Default: same as --tp.", rich_help_panel=LAYOUT)
]
Split = Annotated[str | None, typer.Option("--pipeline-split", help=SPLIT_HELP, rich_help_panel=LAYOUT)]
Dtype = Annotated[
    str,
    typer.Option(
        help="Cast the weights: keep, bf16, fp16 or fp32.",
        rich_help_panel=OUTPUT,
        autocompletion=completes(cast_dtypes),
    ),
]
Vocab = Annotated[
    int | None, typer.Option(help="Pad the vocabulary with zero rows to a multiple of N.", rich_help_panel=OUTPUT)
]
Workers = Annotated[
    int | None, typer.Option(help="Number of threads. Default: one per core, at most 8.", rich_help_panel=RUNNING)
]
PROCESSES_HELP = (
    "Convert with N processes, each with --workers threads, if one process cannot use all cores or the disk's whole "
    "bandwidth."
)
Processes = Annotated[int, typer.Option(metavar="N", help=PROCESSES_HELP, rich_help_panel=RUNNING)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT once the new one is complete.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue a killed or interrupted run of the same command.")]
AcceptChanged = Annotated[
    bool,
    typer.Option(
        "--accept-changed-tensors",
        help="Accept tensors that differ from the digests recorded when the source was written; the new "
        "dlm_bridge.json lists them.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print the plan; write nothing.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
Family = Annotated[
    str | None,
    typer.Option(
        help="The model family, if config.json does not identify it.",
        rich_help_panel=SOURCE,
        autocompletion=completes(family_names),
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.", rich_help_panel=SOURCE)]
Like = Annotated[
    str | None,
    typer.Option(
        metavar="HF", help="Hub folder or id to copy config, side files and shard map from.", rich_help_panel=SOURCE
    ),
]
HfConfig = Annotated[
    str | None, typer.Option(metavar="FILE", help="A config.json that names the model.", rich_help_panel=SOURCE)
]
Format = Annotated[
    str,
    typer.Option(
        help="The Megatron format to write: torch_dist or torch (legacy).",
        rich_help_panel=OUTPUT,
        autocompletion=completes(format_names),
    ),
]
KeyStyle = Annotated[
    str,
    typer.Option(
        help="Parameter names with --format torch: te (grouped experts), te-sequential or local (no Transformer "
        "Engine).",
        rich_help_panel=OUTPUT,
        autocompletion=completes(key_styles),
    ),
]
WeightsOnly = Annotated[bool, typer.Option("--weights-only", help="Omit the optimizer state.", rich_help_panel=OUTPUT)]
RunConfig = Annotated[
    bool, typer.Option("--run-config", help="Also write Megatron Bridge's run_config.yaml.", rich_help_panel=OUTPUT)
]
SHOWN = 20  # number of differences and files printed; --json lists all


def register(app: typer.Typer) -> None:
    """Add the conversion commands to the app."""
    app.command("import", cls=ModelCommand)(import_)
    app.command("export", cls=ModelCommand)(export)
    app.command("reshard", cls=ModelCommand)(reshard)
    app.command("inspect", cls=ModelCommand)(inspect)


def import_(
    source: Annotated[str, typer.Argument(metavar="HF", help="Hub folder or Hub id.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The Megatron checkpoint to write.")],
    tp: Tp = 1,
    pp: Pp = 1,
    vp: Vp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    pipeline_split: Split = None,
    family: Family = None,
    format: Format = "torch_dist",
    dtype: Dtype = "keep",
    vocab_multiple: Vocab = None,
    key_style: KeyStyle = "te",
    run_config: RunConfig = False,
    revision: Revision = None,
    dequantize_fp8: Annotated[
        bool,
        typer.Option(
            "--dequantize-fp8",
            help="Read block-scaled FP8 weights (DeepSeek-V3) as bfloat16.",
            rich_help_panel=SOURCE,
        ),
    ] = False,
    dequantize_mxfp4: Annotated[
        bool,
        typer.Option(
            "--dequantize-mxfp4", help="Read experts in MXFP4 (gpt-oss) as bfloat16.", rich_help_panel=SOURCE
        ),
    ] = False,
    workers: Workers = None,
    processes: Processes = 1,
    overwrite: Overwrite = False,
    resume: Resume = False,
    accept_changed_tensors: AcceptChanged = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Convert a Hub checkpoint to a Megatron checkpoint.

    Example: dlm-bridge import GSAI-ML/LLaDA-8B-Instruct ckpt --tp 4 --pp 2
    """
    from dlm_bridge.bridge import Bridge

    layout = parse_layout(tp, pp, vp, ep, etp, pipeline_split)
    bridge = Bridge.from_hf(source, revision, family, dequantize_fp8, dequantize_mxfp4)
    with progress_bar("importing") as progress:
        report = bridge.to_megatron(
            output,
            layout,
            dtype,
            vocab_multiple=vocab_multiple,
            format=format,
            key_style=key_style,
            run_config=run_config,
            workers=workers,
            processes=processes,
            overwrite=overwrite,
            resume=resume,
            accept_changed_tensors=accept_changed_tensors,
            dry_run=dry_run,
            progress=progress,
        )
    show_report(report.as_dict(), as_json)


def export(
    source: Annotated[str, typer.Argument(metavar="MEGATRON", help="Megatron checkpoint.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The Hub folder to write.")],
    dtype: Dtype = "keep",
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Largest weight file, such as 5GB. Default: the source's shards.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    ema: Annotated[
        bool,
        typer.Option(
            "--ema", help="Export the moving averages of --ema-decay, not the weights.", rich_help_panel=SOURCE
        ),
    ] = False,
    like: Like = None,
    hf_config: HfConfig = None,
    family: Family = None,
    workers: Workers = None,
    processes: Processes = 1,
    overwrite: Overwrite = False,
    resume: Resume = False,
    accept_changed_tensors: AcceptChanged = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Convert a Megatron checkpoint to a Hub checkpoint.

    Example: dlm-bridge export ckpt LLaDA-tuned
    """
    from dlm_bridge.bridge import Bridge

    bridge = Bridge.from_megatron(source, like, hf_config, family, averaged=ema)
    with progress_bar("exporting") as progress:
        report = bridge.to_hf(
            output,
            dtype,
            shard_size=shard_size,
            workers=workers,
            processes=processes,
            overwrite=overwrite,
            resume=resume,
            accept_changed_tensors=accept_changed_tensors,
            dry_run=dry_run,
            progress=progress,
        )
    show_report(report.as_dict(), as_json)


def reshard(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="MEGATRON", help="Megatron checkpoint.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The Megatron checkpoint to write.")],
    tp: Tp = 1,
    pp: Pp = 1,
    vp: Vp = 1,
    ep: Ep = 1,
    etp: Etp = None,
    pipeline_split: Split = None,
    format: Format = "torch_dist",
    vocab_multiple: Vocab = None,
    key_style: KeyStyle = "te",
    run_config: RunConfig = False,
    weights_only: WeightsOnly = False,
    like: Like = None,
    hf_config: HfConfig = None,
    family: Family = None,
    workers: Workers = None,
    processes: Processes = 1,
    overwrite: Overwrite = False,
    resume: Resume = False,
    accept_changed_tensors: AcceptChanged = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Convert a Megatron checkpoint to another parallel layout.

    Example: dlm-bridge reshard ckpt ckpt-tp8 --tp 8 --pp 1
    """
    from dlm_bridge.bridge import Bridge
    from dlm_bridge.errors import DlmBridgeError

    sources = [context.get_parameter_source(name) for name in ("tp", "pp", "vp", "ep", "etp", "pipeline_split")]
    if all(each is None or each.name == "DEFAULT" for each in sources):
        raise DlmBridgeError(f"reshard {source}: set the new layout, such as --tp 2 --pp 4, or --tp 1 to merge it")
    layout = parse_layout(tp, pp, vp, ep, etp, pipeline_split)
    bridge = Bridge.from_megatron(source, like, hf_config, family)
    with progress_bar("resharding") as progress:
        report = bridge.to_megatron(
            output,
            layout,
            vocab_multiple=vocab_multiple,
            format=format,
            key_style=key_style,
            run_config=run_config,
            weights_only=weights_only,
            workers=workers,
            processes=processes,
            overwrite=overwrite,
            resume=resume,
            accept_changed_tensors=accept_changed_tensors,
            dry_run=dry_run,
            progress=progress,
        )
    show_report(report.as_dict(), as_json)


def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Hub folder, Hub id or Megatron checkpoint.")],
    family: Family = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Show a checkpoint's family, sizes and layout without loading weights.

    Example: dlm-bridge inspect ckpt
    """
    from dlm_bridge.convert.inspect import inspect_checkpoint

    show_facts(inspect_checkpoint(path, revision, family).as_dict(), as_json)


def parse_layout(tp: int, pp: int, vp: int, ep: int, etp: int | None, pipeline_split: str | None) -> Layout:
    """Layout from the command-line options. Raises DlmBridgeError for a split that cannot be parsed."""
    from dlm_bridge.mapping.layout import Layout, parse_pipeline_split

    split = {} if pipeline_split is None else parse_pipeline_split(pipeline_split, pp, vp)
    return Layout(tp=tp, pp=pp, vp=vp, ep=ep, etp=etp, **split)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Progress bar on stderr with bytes, speed and remaining time, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def advance(nbytes: int, total: int) -> None:
            bar.update(task, advance=nbytes, total=total)

        yield advance


def show_report(report: dict[str, Any], as_json: bool) -> None:
    """Print the report of a conversion or of a dry run."""
    if as_json:
        return print_json(report)
    rows = [
        ("family", report["family"]),
        ("format", report["format"]),
        ("tensors", f"{report['tensors']:,} ({report['parameters']:,} parameters, {report['dtype']})"),
        ("size", f"{size_text(report['bytes'])}, largest tensor {size_text(report['largest_tensor'])}"),
        ("layout", _layout_text(report["layout"])),
        ("files", _files(report["files"])),
        ("side files", ", ".join(report["side_files"]) or "none"),
        ("excluded files", ", ".join(report["left_out"]) or "none"),
        *(("note", note) for note in report["notes"]),
    ]
    if report["dry_run"]:
        speed = size_text(report["bytes"] / report["estimated_seconds"]) if report["estimated_seconds"] else "-"
        rows.append(("peak memory", f"{size_text(report['peak_memory'])} with {report['workers']} workers"))
        rows.append(("time", f"about {report['estimated_seconds']:.0f} s (assumes a disk that copies {speed}/s)"))
    if report["seconds"] is not None:
        rate = report["bytes"] / max(report["seconds"], 1e-9)
        rows.append(("time", f"{report['seconds']:.1f} s, {size_text(rate)}/s"))
    title = f"{report['action']}: {report['source']} -> {report['output']}"
    _table(f"{title} (dry run, nothing written)" if report["dry_run"] else title, rows)
    _show_derived(report["derived"])


def show_facts(facts: dict[str, Any], as_json: bool) -> None:
    """Print the facts about a checkpoint."""
    if as_json:
        return print_json(facts)
    sizes = facts["sizes"] or {}
    source = facts["source"] or {}
    revision = f" at {source['revision']}" if source.get("revision") else ""
    rows = [
        ("format", facts["format"]),
        ("family", facts["family"] or "unknown (no dlm_bridge.json)"),
        ("architecture", facts["architecture"] or "unknown"),
        ("sizes", ", ".join(f"{name} {value}" for name, value in sizes.items()) or "unknown"),
        ("parameters", f"{facts['parameters']:,} in {facts['tensors']:,} tensors, {size_text(facts['bytes'])}"),
        ("dtype", ", ".join(f"{name} ({count})" for name, count in facts["dtypes"].items())),
        ("layout", _layout_text(facts["layout"])),
        ("iteration", "-" if facts["iteration"] is None else str(facts["iteration"])),
        ("training state", f"{facts['training_state']:,} items" if facts["training_state"] else "none"),
        ("files", _files(facts["files"])),
        ("side files", ", ".join(facts["side_files"]) or "none"),
        ("excluded files", ", ".join(facts["left_out"]) or "none"),
        ("source", f"{source.get('name', '-')}{revision}"),
        ("written by", facts["tool"] or "-"),
        *(("note", note) for note in facts["notes"]),
    ]
    _table(facts["path"], rows)
    _show_derived(facts["derived"])


def _show_derived(rows: list[dict[str, Any]]) -> None:
    """Print a config.json that was derived from a checkpoint without a Hub model: each value and its origin."""
    if rows:
        lines = [
            (row["key"], f"{row['value']}    {'assumed: ' if row['assumed'] else ''}{row['origin']}") for row in rows
        ]
        _table("config.json was derived; to use another one, set --like or --hf-config", lines)


def _table(title: str, rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(printable(title)), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(printable(value)))
    Console().print(table)


def print_json(value: dict[str, Any]) -> None:
    """Print an object for --json to stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _layout_text(layout: dict[str, Any] | None) -> str:
    if layout is None:
        return "-"
    return ", ".join(f"{name} {value}" for name, value in layout.items() if value is not None)


def _files(files: dict[str, int]) -> str:
    lines = [f"{name}  {size_text(size)}" for name, size in list(files.items())[:SHOWN]]
    more = len(files) - SHOWN
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def size_text(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"
