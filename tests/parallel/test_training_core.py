"""megatron-core trains on CPU: two processes against one with torch's AdamW, and against themselves after a resume."""

from __future__ import annotations

import pytest
import torch

from dlm_bridge import Bridge
from tests.interop.cases import Model
from tests.parallel.training_cases import ADAM, CLIP, MODELS, STEPS, Files, batch, plan
from tests.processes import assert_ok, launch

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", list(plan()))
def test_two_processes(name: str, report: dict[str, list[str]]) -> None:
    assert_ok(name, report)


@pytest.fixture(scope="module")
def report(files: Files) -> dict[str, list[str]]:
    """What each check said, on both ranks."""
    return launch("tests.parallel.training_worker", files.root)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Checkpoints, and what torch's AdamW makes of them."""
    files = Files(tmp_path_factory.mktemp("training"))
    for name, model in MODELS.items():
        model.write(files.hub(name))
        _write_reference(files, name, model)
    return files


def _write_reference(files: Files, name: str, model: Model) -> None:
    """A few steps of transformers' model on the whole batch, in one process."""
    from transformers.core_model_loading import revert_weight_conversion

    bridge = Bridge.from_hf(files.hub(name))
    hf_model = bridge.family.load("model_class").from_pretrained(str(files.hub(name)), dtype=torch.float32)
    parameters = list(hf_model.parameters())
    decay = [parameter for parameter in parameters if parameter.ndim > 1]
    rest = [parameter for parameter in parameters if parameter.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], **ADAM)
    losses, norms = [], []
    for step in range(STEPS):
        tokens_BL, targets_BLV = batch(step, model.vocab)
        loss = (hf_model(tokens_BL).logits - targets_BLV).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    state = dict(revert_weight_conversion(hf_model, hf_model.state_dict()))
    weights = {name: state[name] for name in bridge.hub_names()}
    torch.save({"losses": losses, "norms": norms, "weights": weights}, files.reference(name))
