"""What megatron-core raises of a configuration, as one line each."""

from __future__ import annotations

import pytest

from dlm_bridge.errors import DlmBridgeError, LayoutError, MissingExtraError, SettingError
from dlm_bridge.parallel.core import named_refusals
from tests.refusals import refused


def complain(error: Exception) -> None:
    raise error


class Part:
    def __init__(self, error: Exception) -> None:
        raise error


class Whole:
    def __init__(self, error: Exception) -> None:
        from megatron.core.transformer.spec_utils import ModuleSpec, build_module

        build_module(ModuleSpec(Part), error)


def test_other_kinds_pass() -> None:
    with pytest.raises(KeyError), named_refusals(AssertionError):
        complain(KeyError("x"))


@pytest.mark.parametrize(
    ("error", "kind", "field", "named"),
    [
        (AssertionError("two\nlines"), SettingError, "megatron-core", "two lines"),
        (AssertionError(), SettingError, "megatron-core", "raise error"),  # the line that asserts
        (KeyError("x"), SettingError, "megatron-core", "'x'"),
        (ImportError("no fused_permute"), MissingExtraError, "megatron-core", "no fused_permute"),
        (ValueError("Please install TE >= 1.4."), MissingExtraError, "megatron-core", "install TE"),
        (LayoutError("tp", "ours"), LayoutError, "tp", "ours"),
    ],
)
@pytest.mark.parametrize("built", [False, True])
def test_one_line(error: Exception, kind: type[DlmBridgeError], field: str, named: str, built: bool) -> None:
    """Also through megatron-core's `build_module`, which raises the message alone again for every module around."""
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    with refused(kind, field, named) as raised, named_refusals(type(error)):
        build_module(ModuleSpec(Whole), error) if built else complain(error)
    assert "\n" not in str(raised.value)
    assert "instantiating" not in str(raised.value)
