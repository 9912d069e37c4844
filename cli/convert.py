"""The conversion commands: import, export, reshard, inspect."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_bridge import terminal
from dlm_bridge.cli.help import (
    ModelCommand,
    declared_parameters,
    in_flags,
    option_annotation,
    values_of,
    with_parameters,
)
from dlm_bridge.convert.settings import (
    ExportSettings,
    HubSettings,
    HubSourceSettings,
    LayoutSettings,
    MegatronSettings,
    MegatronSourceSettings,
)
from dlm_bridge.errors import SettingError, counted, printable
from dlm_bridge.registration import load
from dlm_bridge.settings import options_of

Parameters = dict[str, tuple[Any, Any]]


def _flag(settings: type, name: str) -> Any:
    """Typer's declaration of a setting, for commands that have single settings of a conversion."""
    return option_annotation(options_of(settings)[name]).__metadata__[0]


Tp = Annotated[int, _flag(LayoutSettings, "tp")]
Pp = Annotated[int, _flag(LayoutSettings, "pp")]
Vp = Annotated[int, _flag(LayoutSettings, "vp")]
Split = Annotated[str | None, _flag(LayoutSettings, "pipeline_split")]
Dtype = Annotated[str, _flag(HubSettings, "dtype")]
Workers = Annotated[int | None, _flag(HubSettings, "workers")]
Overwrite = Annotated[bool, _flag(HubSettings, "overwrite")]
AcceptChanged = Annotated[bool, _flag(HubSettings, "accept_changed_tensors")]
Family = Annotated[str | None, _flag(HubSourceSettings, "family")]
Revision = Annotated[str | None, _flag(HubSourceSettings, "revision")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
SHOWN = 20  # number of differences and files printed; --json lists all


def register(app: typer.Typer) -> None:
    """Add the conversion commands to the app."""
    megatron = {"source": argument("MEGATRON", "Megatron checkpoint.")}
    to_megatron = {"output": argument("OUT", "The Megatron checkpoint to write.", Path)}
    add_command(
        app,
        "import",
        import_,
        {"source": argument("HF", "Hub folder or Hub id.")} | to_megatron,
        declared_parameters(LayoutSettings, HubSourceSettings, MegatronSettings, without=("weights_only",)),
    )
    to_hub = {"output": argument("OUT", "The Hub folder or GGUF file to write.", Path)}
    source = {
        "source": argument(
            "SOURCE", "Megatron checkpoint; with --quantize or --to gguf also a run, Hub folder or Hub id."
        )
    }
    add_command(app, "export", export, source | to_hub, declared_parameters(MegatronSourceSettings, ExportSettings))
    add_command(
        app,
        "reshard",
        reshard,
        {"context": (typer.Context, Parameter.empty)} | megatron | to_megatron,
        declared_parameters(LayoutSettings, MegatronSourceSettings, MegatronSettings, without=("dtype", "ema")),
    )
    app.command("inspect", cls=ModelCommand)(inspect)


def add_command(
    app: typer.Typer, name: str, command: Callable[..., None], arguments: Parameters, options: Parameters
) -> None:
    """Add a command with these arguments and options, and --json."""
    parameters = arguments | options | {"as_json": (Json, False)}
    app.command(name, cls=ModelCommand)(with_parameters(command, parameters))


def argument(metavar: str, help: str, kind: type = str) -> tuple[Any, Any]:
    """Annotation and default of a positional argument."""
    return Annotated[kind, typer.Argument(metavar=metavar, help=help)], Parameter.empty


def import_(source: str, output: Path, as_json: bool, **values: Any) -> None:
    """Convert a Hub checkpoint to a Megatron checkpoint.

    Example: dlm-bridge import GSAI-ML/LLaDA-8B-Instruct ckpt --tp 4 --pp 2
    """
    from dlm_bridge.bridge import Bridge

    layout = LayoutSettings(**values_of(LayoutSettings, values)).layout
    bridge = Bridge.from_hf(source, **values_of(HubSourceSettings, values))
    with progress_bar("importing") as progress:
        report = bridge.to_megatron(output, layout, **values_of(MegatronSettings, values), progress=progress)
    show_report(report.as_dict(), as_json)


def export(source: str, output: Path, as_json: bool, **values: Any) -> None:
    """Convert a Megatron checkpoint to a Hub checkpoint, or any checkpoint to quantised weights or to GGUF.

    Example: dlm-bridge export ckpt LLaDA-tuned

    Example: dlm-bridge export GSAI-ML/LLaDA-8B-Instruct llada.gguf --to gguf --quantize q8_0
    """
    from dlm_bridge.bridge import Bridge
    from dlm_bridge.hub import CONFIG_FILE, checkpoint_folder

    chosen = values_of(ExportSettings, values)
    feature = ExportSettings(**chosen).feature
    if feature is not None:
        load("features", feature)  # refused before anything is read
        folder = checkpoint_folder(source)
    if feature is not None and (not folder.is_dir() or (folder / CONFIG_FILE).is_file()):
        bridge = Bridge.from_hf(folder, family=values["family"])
    else:
        bridge = Bridge.from_megatron(source, **values_of(MegatronSourceSettings, values))
    with progress_bar("exporting") as progress:
        report = bridge.to_hf(output, **chosen, progress=progress)
    show_report(report.as_dict(), as_json)


def reshard(context: typer.Context, source: str, output: Path, as_json: bool, **values: Any) -> None:
    """Convert a Megatron checkpoint to another parallel layout.

    Example: dlm-bridge reshard ckpt ckpt-tp8 --tp 8 --pp 1
    """
    from dlm_bridge.bridge import Bridge

    chosen = values_of(LayoutSettings, values)
    origins = [context.get_parameter_source(name) for name in chosen]
    if all(each is None or each.name == "DEFAULT" for each in origins):
        raise SettingError(
            "tp", "the new layout is missing: set `tp` and `pp`, such as `tp=2`; `tp=1` merges the ranks"
        )
    layout = LayoutSettings(**chosen).layout
    bridge = Bridge.from_megatron(source, **values_of(MegatronSourceSettings, values))
    with progress_bar("resharding") as progress:
        report = bridge.to_megatron(output, layout, **values_of(MegatronSettings, values), progress=progress)
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


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Progress bar on stderr with bytes, speed and remaining time, if stderr is a terminal."""
    if not sys.stderr.isatty() or terminal.is_quiet():
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
        ("tensors", f"{report['tensors']:,} ({counted(report['parameters'], 'parameter')}, {report['dtype']})"),
        ("size", f"{size_text(report['bytes'])}, largest tensor {size_text(report['largest_tensor'])}"),
        ("layout", _layout_text(report["layout"])),
        ("files", _files(report["files"])),
        ("side files", ", ".join(report["side_files"]) or "none"),
        ("excluded files", ", ".join(report["left_out"]) or "none"),
        *(("note", in_flags(note)) for note in report["notes"]),
    ]
    if report["dry_run"]:
        speed = size_text(report["bytes"] / report["estimated_seconds"]) if report["estimated_seconds"] else "-"
        rows.append(("peak memory", f"{size_text(report['peak_memory'])} with {counted(report['workers'], 'worker')}"))
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
        (
            "parameters",
            f"{facts['parameters']:,} in {counted(facts['tensors'], 'tensor')}, {size_text(facts['bytes'])}",
        ),
        ("dtype", ", ".join(f"{name} ({count})" for name, count in facts["dtypes"].items())),
        ("layout", _layout_text(facts["layout"])),
        ("iteration", "-" if facts["iteration"] is None else str(facts["iteration"])),
        ("training state", f"{counted(facts['training_state'], 'item')}" if facts["training_state"] else "none"),
        ("files", _files(facts["files"])),
        ("side files", ", ".join(facts["side_files"]) or "none"),
        ("excluded files", ", ".join(facts["left_out"]) or "none"),
        ("source", f"{source.get('name', '-')}{revision}"),
        ("written by", facts["tool"] or "-"),
        *(("note", in_flags(note)) for note in facts["notes"]),
    ]
    _table(facts["path"], rows)
    _show_derived(facts["derived"])


def _show_derived(rows: list[dict[str, Any]]) -> None:
    """Print a config.json that was derived from a checkpoint without a Hub model: each value and its origin."""
    if rows:
        lines = [
            (row["key"], f"{row['value']}    {'assumed: ' if row['assumed'] else ''}{in_flags(row['origin'])}")
            for row in rows
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
