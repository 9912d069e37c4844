"""`dlm-bridge families`: supported model families by Hub architecture, and known unsupported ones with the reason."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_bridge.errors import SettingError
from dlm_bridge.settings import nearest

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


def families(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Show all about a family, a Hub architecture or a Hub id.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List the supported model families; with a NAME, all about one of them.

    Example: dlm-bridge families

    Example: dlm-bridge families llada2_moe
    """
    from dlm_bridge.models import families as registry

    if name is not None:
        _show_family(name, as_json)
        return
    specs = registry.families()
    if as_json:
        rows = [_row(spec) for spec in specs]
        typer.echo(json.dumps({"families": rows, "unsupported": registry.UNSUPPORTED}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for kind, becomes in (("diffusion", ""), ("autoregressive", "; convert-to-dlm makes diffusion models of them")):
        listed = [spec for spec in specs if spec.kind == kind and not spec.derived_from]
        console.print(f"[bold]{len(listed)} {kind} families[/]{becomes}")
        table = Table.grid(padding=(0, 2, 0, 0))
        for spec in listed:
            attention = spec.attention_pattern.replace("_", "-") if kind == "diffusion" else ""
            title = textwrap.shorten(spec.title, max(16, console.width - 40), placeholder=" ...")
            table.add_row(f"[bold cyan]{spec.name}[/]", title, attention)
        console.print(table)
        console.print()
    console.print(f"[bold]Not supported[/]: {', '.join(registry.UNSUPPORTED)}")
    console.print()
    console.print("dlm-bridge families NAME shows all about one: a family, an architecture or a Hub id.")


def _show_family(name: str, as_json: bool) -> None:
    """Print the families that `name` names, or why it is not supported. Raises SettingError for an unknown name."""
    from dlm_bridge.models import families as registry

    by_name: dict[str, list[FamilySpec]] = {}
    for spec in registry.families():
        for word in _names(spec):
            by_name.setdefault(word.lower(), []).append(spec)
    reasons = {architecture.lower(): architecture for architecture in registry.UNSUPPORTED}
    specs, reason = by_name.get(name.lower(), []), reasons.get(name.lower())
    if not specs and reason is None:
        words = [word for spec in registry.families() for word in _names(spec)] + list(registry.UNSUPPORTED)
        spelled = {word.lower(): word for word in words}
        hint = nearest(name.lower(), spelled, "there is no similar name", cutoff=0.5, shown=spelled)
        raise SettingError("name", f"{name!r} is unknown: {hint}; without a name all are listed")
    rows = [_row(spec) for spec in specs]
    if as_json:
        unsupported = {} if reason is None else {reason: registry.UNSUPPORTED[reason]}
        typer.echo(json.dumps({"families": rows, "unsupported": unsupported}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for row in rows:
        table = Table(title=f"[bold]{row['family']}[/]: {row['title']}", title_justify="left", title_style="",
                      box=None, show_header=False, padding=(0, 2, 0, 0))  # fmt: skip
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in _facts(row).items():
            if text:
                table.add_row(label, Text(text))
        console.print(table)
    if reason is not None:
        console.print(Text(f"{reason} is not supported: {registry.UNSUPPORTED[reason]}"))


def _names(spec: FamilySpec) -> list[str]:
    """Name, Hub architectures and Hub ids of a family."""
    return list(dict.fromkeys((spec.name, *_architectures(spec), *spec.hub_ids)))


def _architectures(spec: FamilySpec) -> tuple[str, ...]:
    """Class names in a config.json of the family; none if it is only chosen by name."""
    return spec.architectures or ((spec.stored_architecture,) if spec.told_from else ())


def _facts(row: dict[str, Any]) -> dict[str, str]:
    """A family's facts as texts, empty where it has none."""
    from dlm_bridge.models.families import family_by_name

    spec = family_by_name(row["family"])
    shift = "logits[i] predicts token i + 1" if row["shift"] else "logits[i] predicts token i"
    becomes = [f"{form}: family {name}" for form, name in row["becomes"].items()]
    checked = row["checked_against"]
    if row["derived_from"]:
        checked = f"the reference of {row['derived_from']}, with a causal mask"
    return {
        "architecture": ", ".join(_architectures(spec)) or f"none: pass --family {spec.name}",
        "Hub ids": "\n".join(row["hub_ids"]),
        "attention": row["topology"].replace("_", "-"),
        "shift": shift if row["kind"] == "diffusion" else "",
        "mask token": "" if row["mask_token_id"] is None else f"{row['mask_token_id']} where the config has none",
        "load": ", ".join(row["load"]) or f"its class {spec.model_class.replace(':', '.')}",
        "convert": ", ".join(row["convert"]),
        "no Megatron": row["why_not_megatron"] or row["why_not_megatron_engine"],
        "train": ", ".join(row["train"]),
        "objective": row["objective"],
        "sampler": row["sample"],
        "convert-to-dlm": "\n".join(f"--to {text}" for text in becomes),
        "checked against": checked,
    }
