"""`dlm-bridge verify`: compare two checkpoints, or one with its manifest or with its original code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlm_bridge.cli.convert import SHOWN, Json, Revision, Workers, print_json, progress_bar, size_text
from dlm_bridge.cli.help import ModelCommand, in_flags
from dlm_bridge.errors import SettingError, counted, printable
from dlm_bridge.registration import load

if TYPE_CHECKING:
    from dlm_bridge.convert.verify import Verdict

ORIGINAL = "With the original code"
ORIGINAL_HELP = (
    "Compare a Hub folder or id with the remote code that its auto_map names: config keys, tensor names, logits, a "
    "greedy sample. The code runs in a separate process, in a virtual environment that the command creates."
)
CONSENT_HELP = (
    "Allow the checkpoint's code to run on this machine, with your rights. A virtual environment is not a sandbox: "
    "read the code first."
)

AGAINST_HELP = (
    "Check a quantised Hub folder A against the checkpoint it was made from: the rounding error of every weight, and "
    "that all other tensors are equal."
)
LOGITS_HELP = (
    "Also compare both models' logits (fp32). megatron-core runs the Megatron side (transformers, if it does not "
    "support the model), transformers the Hub side. A single Megatron checkpoint is run by both."
)


def register(app: typer.Typer) -> None:
    app.command("verify", cls=ModelCommand)(verify)


def verify(
    a: Annotated[str, typer.Argument(metavar="A", help="Checkpoint of any format.")],
    b: Annotated[
        str | None, typer.Argument(metavar="[B]", help="A second checkpoint. Default: A's own manifest.")
    ] = None,
    logits: Annotated[bool, typer.Option("--logits", help=LOGITS_HELP)] = False,
    against: Annotated[str | None, typer.Option(metavar="SOURCE", help=AGAINST_HELP)] = None,
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
            help="Python interpreter that has the code's requirements; no environment is created.",
            rich_help_panel=ORIGINAL,
        ),
    ] = None,
    original_requires: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REQUIREMENT",
            help="Add a requirement to that environment, or change a version: torch==2.5.1. Repeatable.",
            rich_help_panel=ORIGINAL,
        ),
    ] = None,
    revision: Revision = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor, or one checkpoint with its manifest. Exit code 1 if they differ.

    Example: dlm-bridge verify GSAI-ML/LLaDA-8B-Instruct ckpt
    """
    if against_original:
        if b is not None:
            raise SettingError("against_original", f"compares {a} with its own code: remove {b}")
        verdict = load("features", "verify --against-original")(
            a,
            trust_remote_code=trust_remote_code,
            original_python=original_python,
            original_requires=original_requires or (),
            revision=revision,
        )
    elif against is not None:
        if b is not None:
            raise SettingError("against", f"is the checkpoint to compare {a} with: remove {b}")
        verify_quantized = load("features", "verify --against")
        with progress_bar("verifying") as progress:
            verdict = verify_quantized(a, against, logits, workers, progress)
    else:
        if revision is not None:
            raise SettingError("revision", f"{revision} needs `against_original`")
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
    """Print the result of a comparison."""
    if as_json:
        return print_json(verdict)
    from dlm_bridge.convert.manifest import FILE_DIGESTS, MANIFEST

    a, b, found = verdict["a"], verdict["b"], verdict["logits"]
    logits = ""
    for note in verdict["notes"]:
        typer.echo(f"note: {in_flags(note)}")
    if found is not None:
        sides = found["a"] if found["a"] == found["b"] else f"{found['a']} and {found['b']}"
        apart = f"differ by at most {found['difference']:.1e}" if found["difference"] else "are identical"
        logits = f"; logits from {sides} {apart} ({counted(found['positions'], 'position')})"
        for note in found["notes"]:
            typer.echo(printable(f"note: {note}"))
    compared = f"{counted(verdict['tensors'], 'tensor')}, {size_text(verdict['bytes'])}"
    if verdict["equal"]:
        if verdict["summary"]:
            return typer.echo(printable(verdict["summary"]))
        equal = f"{a} is intact: it matches {b}" if b in (MANIFEST, FILE_DIGESTS) else f"{a} and {b} are equal"
        typer.echo(printable(f"{equal} ({compared}){logits}"))
        return None
    from rich.console import Console
    from rich.table import Table

    table = Table(title=printable(f"{a} and {b} differ ({compared} compared){logits}"))
    for column in ("name", "what", "detail"):
        table.add_column(column, overflow="fold")
    for item in verdict["differences"][:SHOWN]:
        table.add_row(*(printable(item[column]) for column in ("name", "kind", "detail")))
    more = len(verdict["differences"]) - SHOWN
    if more > 0:
        table.add_row(f"and {more} more", "", "--json lists all")
    Console(markup=False).print(table)
    return None
