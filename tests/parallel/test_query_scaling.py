"""Queries that grow with their position: the live model against transformers' Ministral-3 body, packed."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dlm_bridge import Bridge, Layout
from dlm_bridge.errors import SettingError
from dlm_bridge.models.nemotron_labs_diffusion import MAPPING
from dlm_bridge.objectives.noise import Uniforms
from dlm_bridge.objectives.single_stream import MaskedDiffusion
from tests.families.nemotron_labs_diffusion import CASES, CONFIG, SHORT
from tests.refusals import refused

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: pip install 'dlm-bridge[megatron]'",
)


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Bridge:
    """Of a model whose original context is 8 positions, in one process."""
    return Bridge.from_hf(CASES[1].write(tmp_path_factory.mktemp("nemotron") / "hub", torch_dtype="float32"))


def test_packed_documents_count_their_own_positions(bridge: Bridge) -> None:
    """Loss and gradients of rows of several documents: each begins at position 0, as on the Hub side."""
    from dlm_bridge.parallel.batch import micro_batch
    from dlm_bridge.parallel.gpt import model_inputs

    ids = torch.randint(0, 99, (2, 48), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 20 + [1] * 28, [0] * 11 + [1] * 30 + [2] * 7])
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, 41:] = False
    uniforms = Uniforms.keyed(0, 1, range(2), 48)
    noisy = MaskedDiffusion(mask_token_id=100).noise(ids, uniforms, attention_mask=real, documents=documents)
    hub = bridge.build_hf_model(torch.float32)
    losses = torch.nn.functional.cross_entropy(noisy.logits(hub), noisy.targets, reduction="none")
    wanted = (losses * noisy.weights).sum()
    wanted.backward()
    (live,) = bridge.build_megatron_model(Layout())
    found, _ = live(**model_inputs(micro_batch(noisy, "bidirectional", absolute=True)))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    found.backward()
    of_live = live.embedding.word_embeddings.weight.grad
    of_hub = hub.get_input_embeddings().weight.grad
    torch.testing.assert_close(of_live, of_hub, atol=1e-4 * float(of_hub.abs().max()), rtol=0)
    one_row = micro_batch(noisy, "bidirectional")  # as a model goes by that looks at distances only
    assert abs(float((live(**model_inputs(one_row))[0] / wanted).detach()) - 1) > 1e-4


def test_positions_of_variable_length_kernels() -> None:
    from dlm_bridge.parallel.self_attention import packed_positions

    found = packed_positions(torch.tensor([0, 3, 4, 9], dtype=torch.int32), 9)
    assert found.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]


def test_the_factor_is_transformers_own() -> None:
    """Far out, at the published original context."""
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    from dlm_bridge.parallel.config import model_config
    from dlm_bridge.parallel.self_attention import with_query_scale

    config = model_config(MAPPING, CONFIG, MAPPING.dims(CONFIG), Layout(), torch.float32).transformer
    positions = torch.tensor([[0, 16383, 16384, 100_000, 262_143]])
    found = with_query_scale(torch.zeros(5, 1, 1, 24), positions, config)
    torch.testing.assert_close(found[:, 0, 0, -1], get_llama_4_attn_scale(positions, 0.1, 16384)[0, 0, :, 0])
    assert not found[..., :-1].any()


def test_a_kernel_that_knows_no_factor_is_refused() -> None:
    from dlm_bridge.parallel.config import model_config

    with refused(SettingError, "fused_single_qkv_rope"):
        model_config(MAPPING, SHORT, MAPPING.dims(SHORT), Layout(), torch.float32, fused_single_qkv_rope=True)
