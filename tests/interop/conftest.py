"""Prepares checkpoints and references, then launches two processes once for the whole folder."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dlm_bridge import Bridge
from tests.checkpoints import write_hub_folder
from tests.interop.cases import IMPORTED, SEED, Files, Model, imports, models, other_plan, plan, referenced
from tests.processes import launch


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Hub checkpoints, their imports, and the logits and gradients of the Hub-side models."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: pip install 'dlm-bridge[megatron]'")
    files = Files(tmp_path_factory.mktemp("interop"))
    for name, model in models().items():
        model.write(files.hub(name))
    _write_references(files, referenced(plan()))
    _import(files, imports())
    _write_half_precision(files)
    return files


def _import(files: Files, wanted: list[tuple[str, str]]) -> None:
    for name, layout in wanted:
        bridge = Bridge.from_hf(files.hub(name), family=models()[name].family)
        bridge.to_megatron(files.imported(name, layout), IMPORTED[layout])


def _write_half_precision(files: Files) -> None:
    model = models()["gqa"]
    tensors = {name: tensor.bfloat16() for name, tensor in model.tensors().items()}
    write_hub_folder(files.hub("bf16"), model.config, tensors)
    norms = {name: tensor.float() for name, tensor in tensors.items() if tensor.ndim == 1}
    write_hub_folder(files.hub("mixed"), model.config, {**tensors, **norms})
    model = models()["llada2_moe"]  # its router is fp32 in every checkpoint
    write_hub_folder(files.hub("router"), model.config, model.build(model.config, SEED, torch.bfloat16))


def _write_references(files: Files, names: set[str]) -> None:
    for name in sorted(names):
        if not files.reference(name).exists():
            _write_reference(files, name, models()[name])


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
    """Results of each check on both ranks: "ok" or a traceback."""
    return launch("tests.interop.worker", files.root)


@pytest.fixture(scope="session")
def other_report(files: Files) -> dict[str, list[str]]:
    """Results of the checks that are left to `make test-slow`."""
    _write_references(files, referenced(other_plan()))
    _import(files, imports(every=True))
    return launch("tests.interop.families_worker", files.root)
