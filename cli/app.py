"""The Typer app: one module per group of commands, and one place where bad input becomes one line and exit code 2."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import click
import typer

from dlm_bridge.cli import convert, convert_to_dlm, families, train
from dlm_bridge.errors import DlmBridgeError

app = typer.Typer(
    name="dlm-bridge",
    help="Train, convert and sample diffusion and autoregressive language models, on the Hub and on Megatron.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from dlm_bridge import __version__

        typer.echo(f"dlm-bridge {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for group in (convert, convert_to_dlm, train, families):
    group.register(app)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 the check says no, 2 bad usage or bad input, 130 interrupted."""
    try:
        code = app(standalone_mode=False)
    except DlmBridgeError as error:
        _fail(str(error))
    except click.exceptions.Abort:
        _fail("interrupted", code=130)
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        _fail("interrupted", code=130)
    except BrokenPipeError:
        # The reader of our output has gone; Python would complain once more while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = 2) -> None:
    print(f"dlm-bridge: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)
