"""Checks of attention in two processes: masks that are applied or refused, scaled rotary embeddings, and families
whose attention megatron-core does not support."""

from __future__ import annotations

from typing import Any

import torch

from dlm_bridge import Bridge, Layout
from dlm_bridge.attention.masks import MaskDescriptor
from dlm_bridge.parallel import groups
from dlm_bridge.parallel.attention import attention_mask
from dlm_bridge.parallel.parallelize import build_megatron_model
from dlm_bridge.parallel.self_attention import rotary_angles
from dlm_bridge.parallel.weights import expert_name
from tests.interop import engine
from tests.interop.cases import REFUSED, Files, models

TOLERANCE = {"atol": 1e-5, "rtol": 0.0}


def a_mask_is_honoured(files: Files) -> None:
    """Causal, block-causal and padding masks on a bidirectional model, against the Hub-side model."""
    groups.destroy()
    bridge = Bridge.from_hf(files.hub("gqa"))
    chunks, hf_model = build_megatron_model(bridge.checkpoint, Layout(tp=2)), bridge.build_hf_model()
    ids, positions = models()["gqa"].tokens(), torch.arange(12)[None]
    real = torch.ones(1, 12, dtype=torch.bool)
    for mask in (attention_mask("causal", positions, real_BS=real), attention_mask("block_causal", positions, 5)):
        pairs = MaskDescriptor(mask).dense()
        with torch.no_grad():
            wanted = hf_model(ids, attention_mask=pairs).logits
        torch.testing.assert_close(engine.run(chunks, ids, 128, mask=mask), wanted, **TOLERANCE)
        torch.testing.assert_close(engine.run(chunks, ids, 128, mask=pairs), wanted, **TOLERANCE)
        assert (wanted - hf_model(ids).logits).abs().max() > 1e-2
    real[:, 9:] = False
    with torch.no_grad():
        wanted = hf_model(ids, attention_mask=real.expand(2, -1)).logits
    found = engine.run(chunks, ids, 128, mask=attention_mask("bidirectional", positions, real_BS=real))
    torch.testing.assert_close(found[:, :9], wanted[:, :9], **TOLERANCE)


def an_ignored_mask_is_refused(files: Files) -> None:
    positions = torch.arange(12)[None]
    mask = attention_mask("block_causal", positions, 4)
    assert mask is not None

    def logits(model: str, given: torch.Tensor | None, **overrides: Any) -> torch.Tensor:
        groups.destroy()
        chunks = build_megatron_model(Bridge.from_hf(files.hub(model)).checkpoint, Layout(), **overrides)
        return engine.run(chunks, models()[model].tokens()[:1, :12], models()[model].vocab, mask=given)

    for model, given, overrides, named in (
        ("sdar", None, {}, ["attention_mask", "block-causal"]),
        ("mistral_window", mask, {}, ["attention_mask", "sliding window"]),
        ("qwen2", None, {"attention_dropout": 0.1}, ["attention_dropout"]),
        ("gqa", mask.float(), {}, ["[1 or 1, 12, 5]", "torch.float32"]),
        ("gqa", mask[:, :11], {}, ["torch.int32 [1, 11, 5]"]),
        ("gqa", mask[..., 0].bool(), {}, ["torch.bool [1, 12]"]),
        ("gqa", None, {"window_size": (4, 0)}, ["window", "bidirectional"]),
        ("mixtral", None, {"moe_grouped_gemm": True}, ["moe_grouped_gemm"]),
    ):
        with engine.refused(*named):
            logits(model, given, **overrides)
    with engine.refused("block"):
        attention_mask("block_causal", positions)
    with engine.refused("prefix"):
        attention_mask("prefix", positions)


def rope_matches_beyond_the_original_context(files: Files) -> None:
    """Compare cosines and sines, because logits would need sequences of tens of thousands of tokens."""
    for model in ("llama3", "qwen3_yarn", "glm4_moe"):
        groups.destroy()
        bridge = Bridge.from_hf(files.hub(model))
        (chunk,) = build_megatron_model(bridge.checkpoint, Layout())
        config = bridge.config
        original = (config["rope_scaling"] or {}).get("original_max_position_embeddings", 8192)
        positions = torch.tensor([0, 1, 7, original - 1, original, original + 1, original + 4097])
        angles, scale = chunk.rotary_pos_emb(int(positions[-1]) + 1), 1.0
        if isinstance(angles, tuple):
            angles, scale = angles
        angles = angles[positions, 0, 0]
        assert torch.equal(rotary_angles(chunk.rotary_pos_emb, positions[None])[:, 0, 0], angles)
        cos, sin = bridge.build_hf_model().model.rotary_emb(torch.zeros(1), positions[None])
        torch.testing.assert_close(angles.cos() * scale, cos[0], **TOLERANCE)
        torch.testing.assert_close(angles.sin() * scale, sin[0], **TOLERANCE)


def what_megatron_core_cannot_hold_is_refused(files: Files) -> None:
    for model in REFUSED:
        groups.destroy()
        with engine.refused("QK norm"):
            build_megatron_model(Bridge.from_hf(files.hub(model)).checkpoint, Layout())


def experts_have_global_names(files: Files) -> None:
    """Names of single experts, and of grouped experts of Transformer Engine, which run only on GPUs."""
    prefix = "mlp.experts."
    assert expert_name(prefix + "local_experts.1.linear_fc1.weight", 4) == prefix + "experts.5.linear_fc1.weight"
    assert expert_name(prefix + "linear_fc2.weight11", 16) == prefix + "experts.27.linear_fc2.weight"
