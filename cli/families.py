"""`dlm-bridge families`: what is supported, by Hub architecture, and what is known not to be, with the reason."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    app.command("families")(families)


def families(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """List the supported model families by their Hub architectures.

    Example: dlm-bridge families --json
    """
    from dlm_bridge.models import FAMILIES, UNSUPPORTED

    rows: list[dict[str, Any]] = [
        {
            "family": spec.name,
            "title": spec.title,
            "architectures": list(spec.architectures),
            "hub_ids": list(spec.hub_ids),
            "kind": spec.kind,
            "topology": spec.topology,
            "shift": spec.shift,
            "load": True,
            "convert": ["huggingface", "torch_dist"],
            "train": list(spec.training),
            "sample": True,
            "checked_against": spec.checked_against,
        }
        for spec in FAMILIES
    ]
    if as_json:
        typer.echo(json.dumps({"families": rows, "unsupported": UNSUPPORTED}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Supported families")
    for column in ("family", "models", "architectures", "attention", "convert", "train", "checked against"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(
            row["family"],
            "\n".join(row["hub_ids"]),
            "\n".join(row["architectures"]),
            row["topology"] + (", shifted" if row["shift"] else ""),
            ", ".join(row["convert"]),
            ", ".join(row["train"]),
            row["checked_against"],
        )
    console.print(table)
    table = Table(title="Known, not supported")
    table.add_column("architecture", overflow="fold")
    table.add_column("reason", overflow="fold")
    for architecture, reason in UNSUPPORTED.items():
        table.add_row(architecture, reason)
    console.print(table)
