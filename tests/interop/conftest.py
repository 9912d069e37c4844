"""Prepares checkpoints and references, then launches two processes once for the whole folder."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from dlm_bridge import Bridge
from tests.checkpoints import write_hub_folder
from tests.interop.cases import IMPORTED, REFUSED, SEED, Files, Model, imports, models

TIMEOUT_S = 400


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Hub checkpoints, what `import` makes of them, and the Hub-side models' logits and gradients."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install 'dlm-bridge[megatron]'")
    files = Files(tmp_path_factory.mktemp("interop"))
    for name, model in models().items():
        model.write(files.hub(name))
        if name not in REFUSED:
            _write_reference(files, name, model)
    for name, layout in imports():
        bridge = Bridge.from_hf(files.hub(name), family=models()[name].family)
        bridge.to_megatron(files.imported(name, layout), IMPORTED[layout])
    _write_half_precision(files)
    return files


def _write_half_precision(files: Files) -> None:
    model = models()["gqa"]
    tensors = {name: tensor.bfloat16() for name, tensor in model.tensors().items()}
    write_hub_folder(files.hub("bf16"), model.config, tensors)
    norms = {name: tensor.float() for name, tensor in tensors.items() if tensor.ndim == 1}
    write_hub_folder(files.hub("mixed"), model.config, {**tensors, **norms})
    model = models()["llada2_moe"]  # its router is fp32 in every checkpoint
    write_hub_folder(files.hub("router"), model.config, model.build(model.config, SEED, torch.bfloat16))


def _write_reference(files: Files, name: str, model: Model) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    family = Bridge.from_hf(files.hub(name), family=model.family).family
    hf_model = family.load("model_class").from_pretrained(str(files.hub(name)), dtype=torch.float32)
    logits = hf_model(model.tokens()).logits
    (logits * model.logit_weights()).sum().div(model.batch).backward()
    gradients = {name: parameter.grad for name, parameter in hf_model.named_parameters()}
    torch.save(
        {"logits": logits.detach(), "gradients": dict(revert_weight_conversion(hf_model, gradients))},
        files.reference(name),
    )


@pytest.fixture(scope="session")
def report(files: Files) -> dict[str, list[str]]:
    """What each check said, on both ranks: "ok" or a traceback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DLM_BRIDGE_PLATFORM": "cpu",
    }
    command = [sys.executable, "-m", "tests.interop.worker", str(files.root)]
    logs = [files.root / f"log_{rank}.txt" for rank in range(2)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=Path(__file__).parents[2],
                    env={**environment, "RANK": str(rank)},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
            )
    deadline = time.monotonic() + TIMEOUT_S
    try:
        # When one process fails the other may wait for it for ever; the checks that were not reached say so.
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said: dict[str, list[str]] = {}
    for rank, log in enumerate(logs):
        path = files.report(rank)
        found = json.loads(path.read_text()) if path.exists() else {"start": log.read_text()[-4000:]}
        for name, result in found.items():
            said.setdefault(name, []).append(result)
    return said
