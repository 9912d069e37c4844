"""Our own maths, from the papers: plain-torch forwards straight from Hub tensors."""

from __future__ import annotations

from typing import Any

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x_BSHD: torch.Tensor, positions_BS: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding: the pair (i, i + D/2) turns by position / theta^(2i/D)."""
    half = x_BSHD.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions_BS[..., None, None].double() * frequencies
    cos, sin = angles.cos().to(x_BSHD.dtype), angles.sin().to(x_BSHD.dtype)
    a, b = x_BSHD[..., :half], x_BSHD[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def llada_logits(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    input_ids: torch.Tensor,
    real: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """LLaDA's logits [B, S, V] in float64: every position attends to every real position (`real` is [B, S] bool)."""
    tensors = {name.removeprefix("model.transformer."): tensor.double() for name, tensor in tensors.items()}
    batch, length = input_ids.shape
    heads, groups = config["n_heads"], config["n_kv_heads"]
    if positions is None:
        positions = torch.arange(length).expand(batch, length)
    x = tensors["wte.weight"][input_ids]
    for layer in range(config["n_layers"]):
        block = f"blocks.{layer}."
        w = {name.removeprefix(block): tensor for name, tensor in tensors.items() if name.startswith(block)}
        h = rms_norm(x, w["attn_norm.weight"], config["rms_norm_eps"])
        q = rotate((h @ w["q_proj.weight"].T).view(batch, length, heads, -1), positions, config["rope_theta"])
        k = rotate((h @ w["k_proj.weight"].T).view(batch, length, groups, -1), positions, config["rope_theta"])
        v = (h @ w["v_proj.weight"].T).view(batch, length, groups, -1)
        k, v = (t.repeat_interleave(heads // groups, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        if real is not None:
            scores = scores.masked_fill(~real[:, None, None, :], float("-inf"))
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(batch, length, -1)
        x = x + mixed @ w["attn_out.weight"].T
        h = rms_norm(x, w["ff_norm.weight"], config["rms_norm_eps"])
        gate = h @ w["ff_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ w["up_proj.weight"].T)) @ w["ff_out.weight"].T
    x = rms_norm(x, tensors["ln_f.weight"], config["rms_norm_eps"])
    return x @ tensors["wte.weight" if config["weight_tying"] else "ff_out.weight"].T
