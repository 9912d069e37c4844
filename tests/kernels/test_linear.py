"""Fused linear layers: the same tokens, the same parameters."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dlm_bridge.generation import release
from dlm_bridge.generation.runtime.graphs import GraphedBody
from dlm_bridge.kernels import linear
from tests.generation.conftest import load, prompts
from tests.generation.test_caches import load_case
from tests.generation.test_families import DIFFUSION


@pytest.fixture
def fresh(folder: Path) -> Any:
    return load(folder)


def one_storage(model: Any) -> bool:
    attention = model.model.layers[0].self_attn
    return len({getattr(attention, name).weight.untyped_storage().data_ptr() for name in linear.FUSED_LAYERS[0]}) == 1


@pytest.mark.parametrize("name", ["llada", "sdar", "fast_dllm_v2", "llada2_moe"])
def test_the_same_logits(name: str, tmp_path: Path) -> None:
    """Bodies with and without biases, and one with a single QKV layer."""
    model, _ = load_case(next(case for case in DIFFUSION if case.spec.name == name), tmp_path)
    tokens = torch.randint(4, 60, (2, 16), generator=torch.Generator().manual_seed(5))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    expected = model(tokens).logits
    places = linear.fuse_linear_layers(model)
    assert name == "llada2_moe" or len(places) == 2 * len(model.model.layers)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    with linear.fused_layers_installed(places):
        torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(model(tokens).logits, expected)
    assert [place.names for place in linear.fuse_linear_layers(model)] == [
        place.names for place in places
    ]  # found as it is
    linear.separate_weights(places)
    assert name == "llada2_moe" or not one_storage(model)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_generate_and_what_happens_to_the_weights(fresh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # as quick as that on a CPU
    tokens, settings = prompts(2, 9), {"gen_length": 16, "block_length": 8, "eos_token_id": None}
    expected = fresh.generate(tokens, **settings, execution="eager")
    assert torch.equal(fresh.generate(tokens, **settings, execution="compiled"), expected)
    assert one_storage(fresh)

    with torch.no_grad():  # what an optimizer does to a parameter is seen
        fresh.model.layers[1].self_attn.k_proj.weight.mul_(-3)
        fresh.model.layers[0].mlp.up_proj.weight.neg_()
    changed = fresh.generate(tokens, **settings, execution="eager")
    assert not torch.equal(changed, expected)
    assert torch.equal(fresh.generate(tokens, **settings, execution="compiled"), changed)

    weight = fresh.model.layers[1].self_attn.k_proj.weight
    weight.data = weight.data.clone() / -3  # and so is a weight that has moved
    fresh.model.layers[0].mlp.up_proj.weight.data.neg_()
    assert torch.equal(fresh.generate(tokens, **settings, execution="compiled"), expected)

    fresh.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(one, fresh.state_dict()[name]) for name, one in again.state_dict().items())
    assert one_storage(fresh)
    release(fresh)
    assert not one_storage(fresh)


def test_weights_are_still_trained(fresh: Any) -> None:
    with torch.inference_mode():
        places = linear.fuse_linear_layers(fresh)
    assert places
    assert one_storage(fresh)
    fresh(prompts(2, 9)).logits.float().logsumexp(-1).mean().backward()
    weight = fresh.model.layers[0].self_attn.k_proj.weight
    before = weight.detach().clone()
    torch.optim.SGD(fresh.parameters(), lr=1.0).step()
    assert not torch.equal(weight, before)
    product = places[0].outputs[1].product
    assert torch.equal(product.weight.split(product.sizes)[1], weight)


def test_what_is_left_alone(fresh: Any) -> None:
    attention, mlp = fresh.model.layers[0].self_attn, fresh.model.layers[1].mlp
    fresh.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: None)
    fresh.model.layers[1].self_attn.v_proj = copy.deepcopy(attention.v_proj)
    fresh.model.layers[1].self_attn.v_proj.__class__ = type("Quantised", (nn.Linear,), {})
    attention.q_proj.weight = fresh.model.layers[1].self_attn.q_proj.weight
    mlp.up_proj.bias = nn.Parameter(torch.zeros(mlp.up_proj.out_features))
    assert linear.fuse_linear_layers(fresh) == []


def test_one_compiled_layer_serves_all(fresh: Any) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    body = GraphedBody(fresh, True, rows=2, width=0)
    body._compiled = [torch.compile(layer._call_impl, backend=backend) for layer in fresh.model.layers]
    body.begin()
    with body.prepared(fresh), torch.no_grad():
        fresh(prompts(2, 9))
    assert len(graphs) == 1
    products_of_weights = [node for node in graphs[0].graph.nodes if "linear" in str(node.target)]
    assert len(products_of_weights) == 4  # queries, keys and values; what they bring about; gate and up; down
