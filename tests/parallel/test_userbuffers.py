"""Transformer Engine's userbuffers: which are made, how multicast is left out, and what is refused."""

from __future__ import annotations

import enum
import importlib.util
import os
import sys
import types
from typing import Any

import pytest

from dlm_bridge.errors import LayoutError, MissingExtraError
from tests.refusals import refused

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install 'dlm-bridge[megatron]'",
)
MODULE = "transformer_engine.pytorch.module.base"


class Mode(enum.Enum):
    NONE = "none"
    FP8 = "fp8"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a stand-in for Transformer Engine's module is asked to make; None where it is asked to free."""
    calls: list[Any] = []

    def initialize_ub(shape: list[int], tp_size: int, **others: Any) -> None:
        if calls and calls[-1] is not None:
            raise RuntimeError("UB communicators are already initialized.")
        calls.append({"shape": shape, "tp_size": tp_size, **others, "multicast": os.environ.get("UB_SKIPMC")})

    parts = MODULE.split(".")
    for number in range(1, len(parts)):
        name = ".".join(parts[:number])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    base: Any = types.ModuleType(MODULE)
    base.UserBufferQuantizationMode, base.initialize_ub = Mode, initialize_ub
    base.is_ub_initialized = lambda: bool(calls) and calls[-1] is not None
    base.destroy_ub = lambda: calls.append(None)
    monkeypatch.setitem(sys.modules, MODULE, base)
    monkeypatch.setattr(sys.modules["transformer_engine.pytorch.module"], "base", base, raising=False)
    monkeypatch.setenv("DLM_BRIDGE_PLATFORM", "cpu")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setenv("UB_SKIPMC", "")  # restored when the test ends
    monkeypatch.delenv("UB_SKIPMC")
    return calls


def test_buffers_of_a_micro_batch(made: list[dict[str, Any]]) -> None:
    from dlm_bridge.parallel import groups

    groups.make_userbuffers(8192, 4096, 2, fp8=False, mixed=False, backend="gloo")
    wanted = {"shape": [8192, 4096], "tp_size": 2, "bootstrap_backend": "gloo", "multicast": None}
    assert made == [wanted | {"quantization_modes": [Mode.NONE]}]
    groups.make_userbuffers(8192, 4096, 2, fp8=True, mixed=True, backend="gloo")  # in place of the first
    assert made[1:] == [None, wanted | {"quantization_modes": [Mode.FP8, Mode.NONE]}]
    groups.destroy_userbuffers()
    groups.destroy_userbuffers()
    assert made[3:] == [None]


@pytest.mark.parametrize(("own", "wanted"), [(None, "1"), ("0", "0")])
def test_no_multicast_where_nccl_has_none(
    own: str | None, wanted: str, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlm_bridge.parallel import groups

    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    if own is not None:
        monkeypatch.setenv("UB_SKIPMC", own)
    groups.make_userbuffers(64, 32, 2, fp8=False, mixed=False, backend="gloo")
    assert made[0]["multicast"] == wanted


def test_a_machine_that_cannot(made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    from dlm_bridge.parallel import groups
    from dlm_bridge.parallel.platform import CPU

    with refused(MissingExtraError, "tp_overlap"):
        groups.check_userbuffers(2)
    monkeypatch.setattr(CPU, "uses_transformer_engine", lambda self: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    groups.check_userbuffers(2)
    with refused(LayoutError, "tp", "8"):
        groups.check_userbuffers(8)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no CUDA Multicast\nLaunch app with UB_SKIPMC=1")

    monkeypatch.setattr(sys.modules[MODULE], "initialize_ub", fail)
    with refused(MissingExtraError, "tp_overlap", "UB_SKIPMC=1") as raised:
        groups.make_userbuffers(64, 32, 2, fp8=False, mixed=False, backend="gloo")
    assert "\n" not in str(raised.value)
