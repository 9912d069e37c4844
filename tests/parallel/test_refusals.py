"""What megatron-core raises of a configuration, as one line each."""

from __future__ import annotations

import pytest

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel.core import MissingExtraError, named_refusals


def complain(error: Exception) -> None:
    raise error


def test_other_kinds_pass() -> None:
    with pytest.raises(KeyError), named_refusals(AssertionError):
        complain(KeyError("x"))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (AssertionError("two\nlines"), DlmBridgeError, "refuses this configuration: two lines"),
        (AssertionError(), DlmBridgeError, "refuses this configuration: raise error"),  # the line that asserts
        (KeyError("x"), DlmBridgeError, "refuses this configuration: it does not know 'x'"),
        (ImportError("no fused_permute"), MissingExtraError, "refuses this configuration: no fused_permute"),
        (ValueError("Please install TE >= 1.4."), MissingExtraError, "Please install TE"),
        (DlmBridgeError("ours"), DlmBridgeError, "ours"),
        (DlmBridgeError("ours when instantiating A when instantiating B"), DlmBridgeError, "ours"),
    ],
)
def test_one_line(error: Exception, kind: type[Exception], message: str) -> None:
    with pytest.raises(DlmBridgeError) as raised, named_refusals():
        complain(error)
    assert type(raised.value) is kind
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "instantiating" not in str(raised.value)
