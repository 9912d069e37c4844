"""The live model on four processes, against transformers' model on one: loss, gradients, hand-over."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dlm_bridge import Bridge
from tests.interop.cases import models
from tests.parallel.live_cases import CASES, ROWS, SAMPLES, TERMS, WORLD, Files, noisy_batch
from tests.processes import assert_ok, launch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install 'dlm-bridge[megatron]'",
)

NAMES = [
    "padded_logits_are_never_sampled",
    "half_precision_gives_an_fp32_loss",
    "parameters_are_ready_for_the_optimizer",
    "every_layout_starts_from_the_same_values",
    "what_would_be_ignored_is_refused",
    *(f"hand_over_is_bitwise[{model}]" for model in ("odd_vocabulary", "tied", "llada2_moe")),
    *(f"loss_and_gradients_match[{name}]" for name in CASES),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each check said, on every rank."""
    files = Files(tmp_path_factory.mktemp("live"))
    for model in sorted({case.model for case in CASES.values()}):
        models()[model].write(files.hub(model))
        write_reference(files, model)
    return launch("tests.parallel.live_worker", files.root, WORLD)


def write_reference(files: Files, model: str) -> None:
    """transformers' model, one micro-batch at a time, with the cross-entropy of whole logits."""
    from transformers.core_model_loading import revert_weight_conversion

    bridge = Bridge.from_hf(files.hub(model))
    hf_model = bridge.build_hf_model(torch.float32)
    sums = torch.zeros(TERMS)
    for first in range(0, SAMPLES, ROWS):
        noisy = noisy_batch(model, range(first, first + ROWS))
        logits = hf_model(noisy.input_ids).logits[noisy.mask]
        losses = torch.nn.functional.cross_entropy(logits, noisy.targets, reduction="none") * noisy.weights
        losses.sum().backward()
        sums += torch.stack([losses.detach()[noisy.terms == term].sum() for term in range(TERMS)])
    gradients = {name: parameter.grad for name, parameter in hf_model.named_parameters()}
    torch.save(
        {"sums": sums, "gradients": dict(revert_weight_conversion(hf_model, gradients))}, files.reference(model)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_four_processes(name: str, report: dict[str, list[str]]) -> None:
    assert_ok(name, report, WORLD)


@pytest.mark.slow
def test_every_check_is_looked_at(report: dict[str, list[str]]) -> None:
    assert set(report) <= set(NAMES)
