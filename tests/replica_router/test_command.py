"""`serve --replicas`: what is refused, and command line and environment of a replica."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from dlm_bridge.cli.app import main
from dlm_bridge.errors import SettingError
from dlm_bridge.replica_router.command import replica_environments, replica_words
from dlm_bridge.serving.options import ServeOptions
from tests.refusals import refused


def with_gpus(patch: pytest.MonkeyPatch, count: int, visible: str | None = None) -> None:
    """Let the machine have GPUs."""
    patch.delenv("DLM_BRIDGE_PLATFORM", raising=False)
    patch.setattr(torch.accelerator, "is_available", lambda: True)
    patch.setattr(torch.accelerator, "device_count", lambda: count)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        patch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("gpus", "options", "processes", "field"),
    [
        (1, {"replicas": 2}, 1, "replicas"),
        (4, {"replicas": 3}, 2, "replicas"),
        (4, {"replicas": 2, "device": "cuda:1"}, 1, "device"),
    ],
)
def test_replicas_need_their_own_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, options: dict[str, Any], processes: int, field: str
) -> None:
    with_gpus(monkeypatch, gpus)
    with refused(SettingError, field):
        replica_environments(ServeOptions(**options), processes)


@pytest.mark.parametrize(
    ("gpus", "visible", "options", "processes", "found"),
    [
        (4, None, {"replicas": 2}, 1, ["0", "1"]),
        (4, None, {"replicas": 2}, 2, ["0,1", "2,3"]),
        (3, "3,5,GPU-7", {"replicas": 3}, 1, ["3", "5", "GPU-7"]),
        (5, None, {"replicas": 2, "device_map": "auto"}, 1, ["0,1", "2,3"]),
    ],
)
def test_each_replica_sees_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    visible: str | None,
    options: dict[str, Any],
    processes: int,
    found: list[str],
) -> None:
    with_gpus(monkeypatch, gpus, visible)
    environments = replica_environments(ServeOptions(**options), processes)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == found


def test_a_key_is_on_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"replicas": 2, "api_key": "secret", "batch_size": "auto", "set": ["steps=4", "x=a b"], "port": 80}
    given |= {"allowed_host": ["a.example"], "cors_origin": ["https://a.example"], "device": "cpu", "dtype": "keep"}
    options = ServeOptions(
        **{**given, "batch_size": None, "set": {"steps": 4}, "allowed_host": ["a.example", "localhost"]}
    )
    words = replica_words("model", 2, given, options)
    assert words[:6] == [sys.executable, "-m", "dlm_bridge.replica_router.replica", "serve", "--model", "model"]
    assert sorted(words[6:]) == sorted(
        [
            *("--batch-size=auto", "--set=steps=4", "--set=x=a b", "--device=cpu"),
            *("--allowed-host=a.example", "--port=0", "--queue-size=256", "--nproc-per-node=2"),
        ]
    )
    assert "--allowed-host=*" in replica_words("model", None, {}, ServeOptions(replicas=2))  # as the router itself


@pytest.mark.parametrize(
    ("words", "environment", "named"),
    [
        (["--replicas", "0"], {}, "--replicas"),
        (["--replicas", "100000", "--device", "cpu"], {}, "--replicas"),
        (["--replicas", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "--replicas"),
        (["--replicas", "2", "--device", "cpu", "--api-key", " a"], {}, "--api-key"),
    ],
)
def test_refusals_are_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    environment: dict[str, str],
    named: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["dlm-bridge", "serve", "nowhere", "--port", "0", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line
