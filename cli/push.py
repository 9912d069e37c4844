"""`dlm-bridge push`: upload of a checkpoint to the Hub, with a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dlm_bridge.cli import convert
from dlm_bridge.errors import counted, printable


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("push")(push)


def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Hub checkpoint or PEFT adapter.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="owner/name; created if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Create the repository as private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to; created if it does not exist.")] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    overwrite_card: Annotated[
        bool, typer.Option("--overwrite-card", help="Replace the folder's README.md by a generated card.")
    ] = False,
    accept_changed_tensors: convert.AcceptChanged = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show files and card; upload nothing.")
    ] = False,
    as_json: convert.Json = False,
) -> None:
    """Upload a checkpoint to the Hub in one commit. A model card is generated if there is none.

    The token is read from `hf auth login` or HF_TOKEN.

    Example: dlm-bridge push LLaDA-tuned my-name/LLaDA-tuned --private
    """
    from dlm_bridge.convert.push import push as run

    report = run(
        folder,
        repo_id,
        private=private,
        revision=revision,
        message=message,
        overwrite_card=overwrite_card,
        dry_run=dry_run,
        accept_changed_tensors=accept_changed_tensors,
    )
    _show(report.as_dict(), as_json)


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        convert.print_json(report)
        return
    what = "would upload" if report["dry_run"] else "uploaded"
    typer.echo(
        f"{what} {counted(len(report['files']), 'file')}, {counted(report['bytes'], 'byte')}, to {report['repo_id']}"
    )
    for name, size in report["files"].items():
        note = " (generated)" if name == "README.md" and report["card"] == "generated" else ""
        typer.echo(printable(f"  {name}  {size:,}{note}"))
    for name, public in report["renamed"].items():
        typer.echo(printable(f"{name}: local path replaced by {public}"))
    if report["left_out"]:
        typer.echo(printable(f"excluded files: {', '.join(report['left_out'])}"))
    if report["card_text"]:
        typer.echo(printable(report["card_text"]))
    if report["commit"]:
        typer.echo(report["commit"])
