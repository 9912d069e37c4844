"""Which platform is chosen, and what is said where it or megatron-core is not there."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from dlm_bridge.errors import DlmBridgeError
from dlm_bridge.parallel import platform


def test_the_variable_chooses_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(platform.VARIABLE, "cpu")
    chosen = platform.current()
    assert (chosen.name, chosen.backend, chosen.device()) == ("cpu", "gloo", torch.device("cpu"))
    monkeypatch.setenv(platform.VARIABLE, "tpu")
    with pytest.raises(DlmBridgeError, match="DLM_BRIDGE_PLATFORM=tpu: unknown platform, known are cuda, cpu"):
        platform.current()


def test_cuda_is_the_default_only_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(platform.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert platform.current().name == "cpu"
    monkeypatch.setenv(platform.VARIABLE, "cuda")
    with pytest.raises(DlmBridgeError, match="torch sees no cuda device"):
        platform.current()
    monkeypatch.delenv(platform.VARIABLE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert platform.current().name == "cuda"


def test_without_megatron_core_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("dlm_bridge.parallel.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(DlmBridgeError, match=r"^this needs megatron-core.*pip install 'dlm-bridge\[megatron\]'$"):
        importlib.import_module("dlm_bridge.parallel.model")
