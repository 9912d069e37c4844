"""`dlm-bridge adapter`: convert LoRA adapters between PEFT folders and Megatron's layout, or merge them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_bridge.cli import convert
from dlm_bridge.cli.help import App
from dlm_bridge.errors import SettingError, counted, printable

Base = Annotated[
    str, typer.Option(metavar="MODEL", help="The adapter's base: Hub folder, Hub id or Megatron checkpoint.")
]


def register(app: typer.Typer) -> None:
    """Add the group to the app."""
    group = App(
        help="Convert LoRA adapters between PEFT folders and Megatron's layout, or merge them.", no_args_is_help=True
    )
    group.command("import")(import_)
    group.command("export")(export)
    app.add_typer(group, name="adapter")


def import_(
    source: Annotated[Path, typer.Argument(metavar="PEFT", help="Folder with adapter_config.json.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The Megatron adapter checkpoint to write.")],
    base: Base,
    tp: convert.Tp = 1,
    pp: convert.Pp = 1,
    vp: convert.Vp = 1,
    pipeline_split: convert.Split = None,
    style: Annotated[
        str,
        typer.Option(
            help="canonical (separate adapters for q, k, v, gate and up), fused (shared A), or auto: fused if exact."
        ),
    ] = "auto",
    family: convert.Family = None,
    overwrite: convert.Overwrite = False,
    accept_changed_tensors: convert.AcceptChanged = False,
    as_json: convert.Json = False,
) -> None:
    """Convert a PEFT LoRA adapter to Megatron adapter weights, with Megatron Bridge's keys.

    Example: dlm-bridge adapter import my-lora lora-megatron --base Qwen/Qwen3-8B --tp 2
    """
    from dlm_bridge.convert.checkpoints import open_checkpoint
    from dlm_bridge.convert.lora.megatron import write_megatron_adapter
    from dlm_bridge.convert.lora.peft import PeftAdapter
    from dlm_bridge.convert.settings import LayoutSettings

    opened = open_checkpoint(base, family=family)
    report = write_megatron_adapter(
        PeftAdapter(source, opened),
        opened,
        output,
        LayoutSettings(tp, pp, vp, pipeline_split=pipeline_split).layout,
        style,
        overwrite,
        accept_changed_tensors,
    )
    _show(report.as_dict(), as_json)


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="ADAPTER", help="PEFT folder, training run of an adapter, or Megatron adapter checkpoint."
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The PEFT folder or merged model to write.")],
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The adapter's base. Default: the base that the PEFT folder names."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge the adapter into the base and write a Hub checkpoint.")
    ] = False,
    dtype: convert.Dtype = "keep",
    family: convert.Family = None,
    workers: convert.Workers = None,
    overwrite: convert.Overwrite = False,
    accept_changed_tensors: convert.AcceptChanged = False,
    as_json: convert.Json = False,
) -> None:
    """Convert Megatron adapter weights to a PEFT folder, or merge an adapter into its base.

    Example: dlm-bridge adapter export lora-megatron my-lora --base Qwen/Qwen3-8B

    Example: dlm-bridge adapter export my-lora merged --base Qwen/Qwen3-8B --merge

    Example: dlm-bridge adapter export run merged --merge
    """
    from dlm_bridge.convert.checkpoints import open_checkpoint
    from dlm_bridge.convert.lora import MergedCheckpoint, export_adapter, named_base, open_adapter
    from dlm_bridge.convert.settings import HubSettings
    from dlm_bridge.convert.transfer import write_hub
    from dlm_bridge.hub import checkpoint_folder

    if not merge and dtype != "keep":
        raise SettingError("dtype", "casts merged weights: it needs `merge`")
    source = checkpoint_folder(source)
    opened = open_checkpoint(base or named_base(source), family=family)
    adapter = open_adapter(source, opened)
    if not merge:
        _show(export_adapter(adapter, opened, output, overwrite, accept_changed_tensors).as_dict(), as_json)
        return
    with convert.progress_bar("merging") as progress:
        settings = HubSettings(
            dtype=dtype,
            workers=workers,
            overwrite=overwrite,
            progress=progress,
            accept_changed_tensors=accept_changed_tensors,
        )
        report = write_hub(MergedCheckpoint(opened, adapter), output, settings)
    convert.show_report(report.as_dict(), as_json)


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        convert.print_json(report)
        return
    where = printable(f"{report['source']} -> {report['output']}: {report['style']} LoRA of {report['base']}")
    typer.echo(
        f"{where}, rank {report['rank']}, alpha {report['alpha']:g}, {counted(report['parameters'], 'parameter')} "
        f"({report['dtype']})"
    )
