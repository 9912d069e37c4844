"""`dlm-bridge families`: supported model families by Hub architecture, and known unsupported ones with the reason."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dlm_bridge.models.families import FamilySpec


def register(app: typer.Typer) -> None:
    app.command("families")(families)


def _row(spec: FamilySpec) -> dict[str, Any]:
    from dlm_bridge.models.derived import BODIES, forms_of

    own = spec.kind == "diffusion"
    hub_only = spec.mapping.hub_only
    return {
        "family": spec.name,
        "title": spec.title,
        "architectures": list(spec.architectures),
        "hub_ids": list(spec.hub_ids),
        "kind": spec.kind,
        "topology": spec.attention_pattern,
        "shift": spec.shift,
        "mask_token_id": spec.mask_token_id,
        "load": list(spec.auto_classes) if own else ["transformers"],
        "convert": ["huggingface"] if hub_only else ["huggingface", "torch_dist", "torch"],
        "why_not_megatron": hub_only,
        "why_not_megatron_engine": spec.mapping.engine_lacks,
        "train": list(spec.training),
        "objective": spec.objective,
        "sample": spec.sampler.get("algorithm", "transformers"),
        "checked_against": spec.checked_against,
        "derived_from": spec.derived_from or None,
        "becomes": forms_of(spec) if spec in BODIES else {},  # targets of convert-to-dlm, the default first
    }


def families(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """List the supported model families by their Hub architectures.

    Example: dlm-bridge families --json
    """
    from dlm_bridge.models import families as registry

    rows = [_row(spec) for spec in registry.families()]
    if as_json:
        typer.echo(json.dumps({"families": rows, "unsupported": registry.UNSUPPORTED}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Supported families", show_lines=True)
    table.add_column("family, Hub architectures", no_wrap=True)
    table.add_column("attention", no_wrap=True)
    table.add_column("load, convert, train, sample")
    table.add_column("checked against", overflow="fold")
    for row in rows:
        if row["derived_from"]:
            continue
        abilities = ["Auto classes" if row["load"] else "its own class"]
        abilities += ["Megatron formats"] if "torch_dist" in row["convert"] else []
        table.add_row(
            "\n".join([f"[bold]{row['family']}[/]", *row["architectures"]]),
            row["topology"].replace("_", "-") + ("\nshifted" if row["shift"] else ""),
            ", ".join([*abilities, *row["train"], f"sampler {row['sample']}"]),
            row["checked_against"],
        )
    console.print(table)
    table = Table(title="Diffusion forms of autoregressive families (convert-to-dlm)")
    for column in ("family", "--to", "result, Hub architecture"):
        table.add_column(column, no_wrap=True)
    for row in rows:
        for number, (form, name) in enumerate(row["becomes"].items()):
            architecture = registry.family_by_name(name).stored_architecture
            table.add_row("" if number else row["family"], form, f"{name}\n  {architecture}")
    console.print(table)
    console.print("Each form was checked against its family's reference with a causal mask.")
    for row in rows:
        if row["why_not_megatron"] and not row["derived_from"]:
            console.print(f"{row['family']}: {row['why_not_megatron']}", highlight=False)
        if row["why_not_megatron_engine"]:
            console.print(f"{row['family']}: {row['why_not_megatron_engine']}", highlight=False)
    table = Table(title="Not supported")
    table.add_column("architecture", overflow="fold")
    table.add_column("reason", overflow="fold")
    for architecture, reason in registry.UNSUPPORTED.items():
        table.add_row(architecture, reason)
    console.print(table)
