"""`dlm-bridge verify`: two checkpoints, one and its manifest, one and the original code that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_bridge.cli.convert import SHOWN, Json, Revision, Workers, print_json, progress_bar, size_text
from dlm_bridge.cli.help import ModelCommand
from dlm_bridge.errors import DlmBridgeError, printable
from dlm_bridge.registration import load

if TYPE_CHECKING:
    from dlm_bridge.convert.verify import Verdict

ORIGINAL = "With the original code"
ORIGINAL_HELP = (
    "Compare a Hub folder or id with the remote code that its auto_map names: config keys, tensor names, logits, a "
    "greedy sample. That code runs in a process and a virtual environment of its own, which is made."
)
CONSENT_HELP = (
    "Agree that the checkpoint's code runs on this machine, as you. A virtual environment is no sandbox: read that "
    "code first."
)

LOGITS_HELP = (
    "Compare both models' logits as well (fp32): what is Megatron's computed by megatron-core, where it can, and what "
    "is the Hub's by transformers. With one Megatron checkpoint: the two with each other."
)


def register(app: typer.Typer) -> None:
    app.command("verify", cls=ModelCommand)(verify)


def verify(
    a: Annotated[str, typer.Argument(metavar="A", help="Checkpoint of any format.")],
    b: Annotated[
        str | None, typer.Argument(metavar="[B]", help="A second one; without it, A's own manifest is compared.")
    ] = None,
    logits: Annotated[bool, typer.Option("--logits", help=LOGITS_HELP)] = False,
    against_original: Annotated[
        bool, typer.Option("--against-original", help=ORIGINAL_HELP, rich_help_panel=ORIGINAL)
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help=CONSENT_HELP, rich_help_panel=ORIGINAL)
    ] = False,
    original_python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="An interpreter that has what that code needs; no environment is made.",
            rich_help_panel=ORIGINAL,
        ),
    ] = None,
    original_requires: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REQUIREMENT",
            help="What that environment has besides, or another version, such as torch==2.5.1; repeatable.",
            rich_help_panel=ORIGINAL,
        ),
    ] = None,
    revision: Revision = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor, or one with its manifest. Exit code 1 where they differ.

    Example: dlm-bridge verify GSAI-ML/LLaDA-8B-Instruct ckpt
    """
    if against_original:
        if b is not None:
            raise DlmBridgeError(f"--against-original compares {a} with the code that it names: leave {b} out")
        verdict = load("features", "verify --against-original")(
            a,
            consent=trust_remote_code,
            python=original_python,
            requires=original_requires or (),
            revision=revision,
        )
    else:
        if revision is not None:
            raise DlmBridgeError(f"--revision {revision} is for --against-original")
        verdict = _verify(a, b, logits, workers)
    show_verdict(verdict.as_dict(), as_json)
    if not verdict.equal:
        raise typer.Exit(1)


def _verify(a: str, b: str | None, logits: bool, workers: int | None) -> Verdict:
    from dlm_bridge.convert.verify import verify_manifest, verify_pair

    if logits:
        from dlm_bridge.evaluation.logits import add_logits, check_alone

        if b is None:
            check_alone(a)
    with progress_bar("verifying") as progress:
        verdict = verify_manifest(a, workers, progress) if b is None else verify_pair(a, b, workers, progress)
    if logits:
        add_logits(verdict, a, b)
    return verdict


def show_verdict(verdict: dict[str, Any], as_json: bool) -> None:
    """Whether two checkpoints are equal, and what differs."""
    if as_json:
        return print_json(verdict)
    found = verdict["logits"]
    logits = ""
    for note in verdict["notes"]:
        typer.echo(f"note: {note}")
    if found is not None:
        logits = (
            f", logits by {found['a']} and {found['b']} differ by {found['difference']:.1e} at the most over "
            f"{found['positions']} positions"
        )
        for note in found["notes"]:
            typer.echo(printable(f"note: {note}"))
    counted = f"{verdict['tensors']:,} tensors, {size_text(verdict['bytes'])}{logits}"
    if verdict["equal"]:
        typer.echo(printable(f"equal: {verdict['a']} and {verdict['b']} ({counted})"))
        return None
    from rich.console import Console
    from rich.table import Table

    table = Table(title=printable(f"not equal: {verdict['a']} and {verdict['b']} ({counted} compared)"))
    for column in ("name", "what", "detail"):
        table.add_column(column, overflow="fold")
    for item in verdict["differences"][:SHOWN]:
        table.add_row(*(printable(item[column]) for column in ("name", "kind", "detail")))
    more = len(verdict["differences"]) - SHOWN
    if more > 0:
        table.add_row(f"and {more} more", "", "--json lists all")
    Console(markup=False).print(table)
    return None
