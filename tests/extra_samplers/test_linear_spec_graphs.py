"""Linear self-speculation in CUDA graphs: a GPU's, or on a CPU a stand-in for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from dlm_bridge.generation.runtime import runner
from tests.extra_samplers.test_linear_spec import ARGUMENTS, checkpoint, write_published_adapter
from tests.families.nemotron_labs_diffusion import CASES
from tests.generation.standin import ragged
from tests.generation.test_graphs import DEVICE, EXECUTIONS, check_device, graphs_on_cpu  # noqa: F401  a fixture

pytestmark = pytest.mark.gpu(optional=True)


@pytest.mark.parametrize("cache", ["none", "block"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_linear_spec(execution: str, cache: str, tmp_path: Path) -> None:
    """Drafts and checks have one shape and are recorded apart; rows of one pace and of several."""
    model, _, _ = checkpoint(CASES[1], tmp_path)
    model.to(DEVICE).float()  # which attends in place on a GPU
    _, ids, mask = ragged((3, 9, 1))
    ids, mask = ids.to(DEVICE), mask.to(DEVICE)
    for tokens, real in ((ids, mask), (ids[1:2], mask[1:2])):
        settings = {**ARGUMENTS, "attention_mask": real, "gen_length": 24, "cache": cache}
        expected = model.generate(tokens, **settings, execution="eager").sequences
        for _ in range(3):
            assert torch.equal(model.generate(tokens, **settings, execution=execution).sequences, expected)
    assert len(runner._graphed_bodies[model]._recorded) >= 1 or cache == "none"


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_linear_spec_with_an_adapter_that_drafts(execution: str, tmp_path: Path) -> None:
    """It is on for drafts and off for checks: tokens are the model's own, in other numbers of forward passes."""
    model, _, config = checkpoint(CASES[0], tmp_path)
    write_published_adapter(tmp_path / "linear_spec_lora", config, seed=1)
    _, ids, mask = ragged((5, 5, 2))
    settings = {**ARGUMENTS, "attention_mask": mask.to(DEVICE), "gen_length": 20, "execution": "eager"}
    plain = model.to(DEVICE).generate(ids.to(DEVICE), **settings)
    wrapped = PeftModel.from_pretrained(model, tmp_path, subfolder="linear_spec_lora").to(DEVICE)
    settings["draft_adapter"] = "default"
    expected = wrapped.generate(ids.to(DEVICE), **settings)
    assert torch.equal(expected.sequences, plain.sequences)
    assert expected.forwards != plain.forwards
    for _ in range(3):
        output = wrapped.generate(ids.to(DEVICE), **settings | {"execution": execution})
        assert torch.equal(output.sequences, expected.sequences)
        assert output.forwards == expected.forwards


@pytest.mark.gpu
def test_tokens_on_a_gpu_are_those_on_the_cpu(tmp_path: Path) -> None:
    """In float64, where rounding decides no token."""
    model, _, _ = checkpoint(CASES[1], tmp_path)
    _, tokens, real = ragged((3, 9, 1))
    check_device(model, tokens, real, {**ARGUMENTS, "gen_length": 24, "cache": "block"})
