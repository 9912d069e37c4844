"""The Typer app. Commands are in one module per group; `main` prints errors on one line and sets the exit code."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from dlm_bridge import job, processes, terminal
from dlm_bridge.cli import (
    adapter,
    convert,
    env,
    eval,
    families,
    generate,
    new_models,
    preprocess,
    push,
    train,
    verify,
)
from dlm_bridge.cli.help import App, UsageError, in_flags, message
from dlm_bridge.errors import DlmBridgeError, printable, shortened
from dlm_bridge.registration import absent, load, named_failures, registered

ANY_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


class _InterruptedError(Exception):
    """Replaces KeyboardInterrupt, whose message Typer would drop."""


class _Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise _InterruptedError(in_flags(str(interrupt)) or "interrupted") from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            error.message = f"{error.message.rstrip('.')}{absent()}"  # type: ignore[attr-defined]
            raise


app = App(
    name="dlm-bridge",
    cls=_Commands,
    help="Train, convert and sample diffusion and autoregressive language models, on the Hub and on Megatron.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from dlm_bridge import __version__

        typer.echo(f"dlm-bridge {__version__}")
        raise typer.Exit


def _unavailable(error: DlmBridgeError) -> Callable[[], None]:
    """Stand-in for a command that cannot be imported."""

    def command() -> None:
        raise error

    return command


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for group in (convert, verify, new_models, preprocess, train, generate, eval, families, env, adapter, push):
    group.register(app)
for name, extension in registered("commands").items():
    try:
        with named_failures(extension, name):
            load("commands", name)(app)
    except DlmBridgeError as error:  # raised when the command is called
        app.command(name, hidden=True, context_settings=ANY_WORDS)(_unavailable(error))


_AS_PYTHON_PRINTS = warnings.formatwarning
STDOUT_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_PACKAGE = os.path.dirname(processes.__file__) + os.sep


def main() -> None:
    """Entry point. Exit codes: 0 success, 1 a check failed, 2 usage or input error, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may be invalid Unicode
    warnings.formatwarning = _warning
    logging.setLogRecordFactory(_PrintableRecord)
    terminal.set_verbosity("normal")
    try:
        code = app(args=sys.argv[1:] or ["--help"], prog_name="dlm-bridge", standalone_mode=False)
        sys.stdout.flush()  # an error at exit would print a traceback
    except DlmBridgeError as error:
        _fail(message(error))
    except UsageError as error:
        _fail(_usage(error))
    except _InterruptedError as interrupt:
        _fail(str(interrupt), code=130)
    except typer.Abort:
        _fail("interrupted", code=130)
    except BrokenPipeError:  # the reader of stdout has ended
        _discard_stdout()
        raise SystemExit(0) from None
    except OSError as error:
        if error.filename is None and error.errno in STDOUT_FULL:
            _discard_stdout()
            _fail(f"stdout cannot be written: {error.strerror}: make room there")
        if error.filename is None:
            raise
        _fail(shortened(f"{error.filename}: {error.strerror}"))
    if code == 130:  # interrupted before the command began
        _fail("interrupted", code)
    raise SystemExit(code if isinstance(code, int) else 0)


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null, so that Python's flush at exit raises no second error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _warning(message: Warning | str, category: type[Warning], filename: str, *args: Any, **kwargs: Any) -> str:
    """Format a warning like Python, with control characters escaped, since it may quote a file."""
    text = _AS_PYTHON_PRINTS(message, category, filename, *args, **kwargs)
    return shortened(text) if filename.startswith(_PACKAGE) else printable(text)


class _PrintableRecord(logging.LogRecord):
    """Log record whose message has control characters escaped, since it may quote a file. On several hosts it begins
    with rank and host."""

    def getMessage(self) -> str:  # noqa: N802
        text = super().getMessage()
        text = shortened(in_flags(text)) if self.name.split(".")[0] == "dlm_bridge" else printable(text)
        return f"{job.prefix()}{text}"


def _usage(error: Any) -> str:
    """Message of a usage error, with the command that prints help."""
    command = error.ctx.command_path if error.ctx is not None else "dlm-bridge"
    return f"{error.format_message().rstrip('.')} (see {command} --help)"


def _fail(message: str, code: int = 2) -> NoReturn:
    processes.report(message)
    raise SystemExit(code)
