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
from tests.checkpoints import llada_config, llada_tensors, write_hub_folder
from tests.interop.cases import BATCH, IMPORTED, MODELS, Files, logit_weights, tokens

TIMEOUT_S = 400


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Hub checkpoints, what `import` makes of them, and the Hub-side models' logits and gradients."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install 'dlm-bridge[megatron]'")
    files = Files(tmp_path_factory.mktemp("interop"))
    for model, overrides in MODELS.items():
        config = llada_config(torch_dtype="float32", **overrides)
        write_hub_folder(files.hub(model), config, llada_tensors(config, seed=1))
        _write_reference(files, model)
        for layout, written_for in IMPORTED.items():
            Bridge.from_hf(files.hub(model)).to_megatron(files.imported(model, layout), written_for)
    _write_half_precision(files)
    return files


def _write_half_precision(files: Files) -> None:
    config = llada_config(**MODELS["gqa"])
    tensors = {name: tensor.bfloat16() for name, tensor in llada_tensors(config, seed=1).items()}
    write_hub_folder(files.hub("bf16"), config, tensors)
    norms = {name: tensor.float() for name, tensor in tensors.items() if tensor.ndim == 1}
    write_hub_folder(files.hub("mixed"), config, {**tensors, **norms})


def _write_reference(files: Files, model: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    hf_model = AutoModelForCausalLM.from_pretrained(str(files.hub(model)), dtype=torch.float32)
    vocab = hf_model.config.vocab_size
    logits = hf_model(tokens(vocab)).logits
    (logits * logit_weights(vocab)).sum().div(BATCH).backward()
    gradients = {name: parameter.grad for name, parameter in hf_model.named_parameters()}
    torch.save(
        {"logits": logits.detach(), "gradients": dict(revert_weight_conversion(hf_model, gradients))},
        files.reference(model),
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
