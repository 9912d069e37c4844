"""A model whose layers lie on several devices: what comes out of it is where the canvas is.

On a machine with one device the second one is "meta", among tensors that have no values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch._subclasses.fake_tensor import FakeTensorMode

from dlm_bridge.generation import kv_cache
from dlm_bridge.generation.runtime.runner import CanvasView, ModelRunner
from tests.families import nemotron_labs_diffusion, sdar, wedlm
from tests.families.case import FamilyCase

CASES = [sdar.CASES[0], wedlm.CASES[0], nemotron_labs_diffusion.CASES[0]]
FIRST, LAST = torch.device("cpu"), torch.device("meta")


def spread(case: FamilyCase) -> Any:
    """The model as accelerate leaves it where a device map puts half of it elsewhere."""
    model = case.spec.load("model_class")(case.spec.load("config_class")(**case.config)).eval()
    count = len(model.model.layers)
    places = {"model.embed_tokens": FIRST, "model.rotary_emb": FIRST, "model.norm": LAST, "lm_head": LAST}
    places |= {f"model.layers.{layer}": LAST if 2 * layer >= count else FIRST for layer in range(count)}
    for name, place in places.items():
        part = model.get_submodule(name)
        for module in part.modules():
            for key, value in module._parameters.items():
                if value is not None:
                    there = torch.empty(value.shape, dtype=value.dtype, device=place)
                    module._parameters[key] = torch.nn.Parameter(there, requires_grad=False)
            for key, value in module._buffers.items():
                if value is not None:
                    module._buffers[key] = torch.empty(value.shape, dtype=value.dtype, device=place)
        add_hook_to_module(part, AlignDevicesHook(execution_device=place))
    add_hook_to_module(model, AlignDevicesHook(execution_device=FIRST, io_same_device=True))
    model.hf_device_map = places
    return model


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_hidden_states_and_logits_come_back_to_the_canvas(case: FamilyCase, monkeypatch: pytest.MonkeyPatch) -> None:
    # "meta" is no offloaded layer here.
    monkeypatch.setattr(kv_cache, "_device", lambda layer: next(layer.parameters()).device)
    with FakeTensorMode(), torch.no_grad():
        model = spread(case)
        tokens = torch.zeros(2, 8, dtype=torch.long, device=FIRST)
        with ModelRunner.open(model, None, kv_cache.BlockKVCache(), rows=2, width=32, mask_token_id=0) as runner:
            hidden = runner.hidden(CanvasView(tokens, None, None, 0, 8))
            assert hidden.device == FIRST
            assert runner.head(hidden, slice(None)).device == FIRST
            assert runner.logits(CanvasView(tokens, None, None, 8, 16), slice(8, 12)).device == FIRST
            keys = [layer.kv_keys.device for layer in kv_cache.attention_layers(model)]
        assert keys[0] == FIRST
        assert keys[-1] == LAST


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.id)
def test_given_positions_of_the_models_own_forward(case: FamilyCase) -> None:
    with FakeTensorMode(), torch.no_grad():
        model = spread(case)
        tokens = torch.zeros(2, 8, dtype=torch.long, device=FIRST)
        with ModelRunner.open(model, None, kv_cache.KVCache(), rows=2, width=32, mask_token_id=0) as runner:
            indices = torch.zeros(2, 3, dtype=torch.long, device=FIRST)
            assert runner.logits_at(CanvasView(tokens, None, None), indices).device == FIRST
            assert runner.logits(CanvasView(tokens, None, None), slice(2, 4)).device == FIRST
