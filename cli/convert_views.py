"""How the conversion commands show their results: a JSON object for machines, rich tables for people."""

from __future__ import annotations

import json
from typing import Any

import typer

SHOWN = 20  # differences and files; --json lists them all


def show_report(report: dict[str, Any], as_json: bool) -> None:
    """What a conversion wrote, or would write."""
    if as_json:
        return _json(report)
    rows = [
        ("family", report["family"]),
        ("format", report["format"]),
        ("tensors", f"{report['tensors']:,} ({report['parameters']:,} parameters, {report['dtype']})"),
        ("size", f"{_size(report['bytes'])}, largest tensor {_size(report['largest_tensor'])}"),
        ("layout", _layout(report["layout"])),
        ("files", _files(report["files"])),
        ("side files", ", ".join(report["side_files"]) or "none"),
        ("left out", ", ".join(report["left_out"]) or "nothing"),
        *(("note", note) for note in report["notes"]),
    ]
    if report["dry_run"]:
        speed = _size(report["bytes"] / report["estimated_seconds"]) if report["estimated_seconds"] else "-"
        rows.append(("peak memory", f"{_size(report['peak_memory'])} with {report['workers']} workers"))
        rows.append(("time", f"about {report['estimated_seconds']:.0f} s where the disk copies {speed}/s (assumed)"))
    if report["seconds"] is not None:
        rate = report["bytes"] / max(report["seconds"], 1e-9)
        rows.append(("time", f"{report['seconds']:.1f} s, {_size(rate)}/s"))
    title = f"{report['action']}: {report['source']} -> {report['output']}"
    _table(f"{title} (dry run, nothing written)" if report["dry_run"] else title, rows)
    _show_derived(report["derived"])


def show_facts(facts: dict[str, Any], as_json: bool) -> None:
    """What a checkpoint is."""
    if as_json:
        return _json(facts)
    sizes = facts["sizes"] or {}
    source = facts["source"] or {}
    revision = f" at {source['revision']}" if source.get("revision") else ""
    rows = [
        ("format", facts["format"]),
        ("family", facts["family"] or "not known (no dlm_bridge.json)"),
        ("architecture", facts["architecture"] or "not known"),
        ("sizes", ", ".join(f"{name} {value}" for name, value in sizes.items()) or "not known"),
        ("parameters", f"{facts['parameters']:,} in {facts['tensors']:,} tensors, {_size(facts['bytes'])}"),
        ("dtype", ", ".join(f"{name} ({count})" for name, count in facts["dtypes"].items())),
        ("layout", _layout(facts["layout"])),
        ("iteration", "-" if facts["iteration"] is None else str(facts["iteration"])),
        ("training state", f"{facts['training_state']:,} items" if facts["training_state"] else "none"),
        ("files", _files(facts["files"])),
        ("side files", ", ".join(facts["side_files"]) or "none"),
        ("left out", ", ".join(facts["left_out"]) or "nothing"),
        ("source", f"{source.get('name', '-')}{revision}"),
        ("written by", facts["tool"] or "-"),
        *(("note", note) for note in facts["notes"]),
    ]
    _table(facts["path"], rows)
    _show_derived(facts["derived"])


def show_verdict(verdict: dict[str, Any], as_json: bool) -> None:
    """Whether two checkpoints are equal, and what differs."""
    if as_json:
        return _json(verdict)
    found = verdict["logits"]
    logits = ""
    if found is not None:
        logits = (
            f", logits by {found['a']} and {found['b']} differ by {found['difference']:.1e} at the most over "
            f"{found['positions']} positions"
        )
        for note in found["notes"]:
            typer.echo(f"note: {note}")
    counted = f"{verdict['tensors']:,} tensors, {_size(verdict['bytes'])}{logits}"
    if verdict["equal"]:
        typer.echo(f"equal: {verdict['a']} and {verdict['b']} ({counted})")
        return None
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"not equal: {verdict['a']} and {verdict['b']} ({counted} compared)")
    for column in ("name", "what", "detail"):
        table.add_column(column, overflow="fold")
    for item in verdict["differences"][:SHOWN]:
        table.add_row(item["name"], item["kind"], item["detail"])
    more = len(verdict["differences"]) - SHOWN
    if more > 0:
        table.add_row(f"and {more} more", "", "--json lists all")
    Console().print(table)
    return None


def _show_derived(rows: list[dict[str, Any]]) -> None:
    """The config of a checkpoint that names no Hub model: what it says, and what that follows from."""
    if rows:
        lines = [
            (row["key"], f"{row['value']}    {'assumed: ' if row['assumed'] else ''}{row['origin']}") for row in rows
        ]
        _table("config.json was derived; --like or --hf-config names another", lines)


def _table(title: str, rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    Console().print(table)


def _json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _layout(layout: dict[str, Any] | None) -> str:
    if layout is None:
        return "-"
    return ", ".join(f"{name} {value}" for name, value in layout.items() if value is not None)


def _files(files: dict[str, int]) -> str:
    lines = [f"{name}  {_size(size)}" for name, size in list(files.items())[:SHOWN]]
    more = len(files) - SHOWN
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"
