"""megatron-core's complaints about its own configurations, each as one line."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

from dlm_bridge.errors import DlmBridgeError, one_line

BUILDING = re.compile(r"( when instantiating \w+)+$")  # what its build_module adds to any message, ours too


class NotInstalledError(DlmBridgeError):
    """A setting that is refused for what this machine lacks: another one may take it."""


@contextlib.contextmanager
def named(kind: type[Exception] = Exception) -> Iterator[None]:
    """Whatever megatron-core raises while it checks a configuration, or only what is of this `kind`, as a
    DlmBridgeError; where a package is missing as a NotInstalledError."""
    try:
        yield
    except DlmBridgeError as error:
        if not BUILDING.search(str(error)):
            raise
        raise type(error)(BUILDING.sub("", str(error))) from error
    except kind as error:  # it asserts, looks words up and imports as it checks
        missing = isinstance(error, ImportError | RuntimeError) or "install TE" in str(error)
        refusal = NotInstalledError if missing else DlmBridgeError
        raise refusal(f"megatron-core refuses this configuration: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What is wrong; of an assertion without words, the assertion itself."""
    if isinstance(error, KeyError):
        return f"it does not know {one_line(error)}"
    if str(error):
        return one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].line if frames else None) or one_line(error)
