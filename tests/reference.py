"""Our own maths, from the papers: plain-torch forwards straight from Hub tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from dlm_bridge.attention.masks import StreamPattern


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


def yarn(parameters: dict[str, Any]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """YaRN (arXiv 2309.00071): frequencies that turn less than beta_slow times within the original context are divided
    by `factor`, those that turn more than beta_fast times are kept, and a ramp over the pairs lies between."""
    theta, factor = parameters["rope_theta"], parameters["factor"]
    original = parameters["original_max_position_embeddings"]

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    def turn(x_BSHD: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
        size = x_BSHD.shape[-1]

        def pair(turns: float) -> float:
            return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair(parameters["beta_fast"])), 0)
        high = min(math.ceil(pair(parameters["beta_slow"])), size - 1)
        pairs = torch.arange(size // 2, dtype=torch.float64)
        ramp = ((pairs - low) / (high - low if high > low else 0.001)).clamp(0, 1)
        frequencies = theta ** (-2 * pairs / size) * (ramp / factor + (1 - ramp))
        angles = positions_BS[..., None, None].double() * frequencies
        a, b = x_BSHD[..., : size // 2], x_BSHD[..., size // 2 :]
        turned = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)
        return turned * (magnitude(parameters["mscale"]) / magnitude(parameters["mscale_all_dim"]))

    return turn


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    a = x @ gate.T
    return (a * a.sigmoid() * (x @ up.T)) @ down.T


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """[B, S, H * D] from q [B, S, H, D] and k, v [B, S, G, D]: query q attends to key k where `allowed` [B, S, S]."""
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    probabilities = scores.masked_fill(~allowed[:, None], float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v).flatten(2)


# Which experts a token goes to: (hidden [B, S, D], this layer's tensors) -> weights [B, S, E], zero where it does not
Router = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


def softmax_router(top_k: int, renormalise: bool) -> Router:
    """Mixtral's, Qwen3-MoE's (renormalised) and OLMoE's (not) choice."""

    def route(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        scores = (x @ w["mlp.gate.weight"].T).softmax(-1)
        best, chosen = scores.topk(top_k, dim=-1)
        if renormalise:
            best = best / best.sum(-1, keepdim=True)
        return torch.zeros_like(scores).scatter(-1, chosen, best)

    return route


def decoder_logits(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    input_ids: torch.Tensor,
    allowed: torch.Tensor,
    positions: torch.Tensor,
    *,
    root: str = "model.",
    head: str = "lm_head.weight",
    turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    query_scale: Callable[[torch.Tensor], torch.Tensor] | None = None,
    route: Router | None = None,
) -> torch.Tensor:
    """Logits [B, S, V] in float64 of a pre-norm RMSNorm SwiGLU decoder under transformers' Llama-like names.

    Biases, QK norms (per head), experts and shared experts are applied where their tensors are. `turn` is the rotary
    embedding of (x [B, S, H, D], positions), by default the plain one with the config's base; `query_scale` what
    queries are multiplied with, by positions; `route` the router.
    """
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    heads, eps = config["num_attention_heads"], config["rms_norm_eps"]
    groups = config.get("num_key_value_heads") or heads
    turn = turn or (lambda x, at: rotate(x, at, config["rope_theta"]))
    x = tensors[root + "embed_tokens.weight"][input_ids]
    for layer in range(config["num_hidden_layers"]):
        block = f"{root}layers.{layer}."
        w = {name.removeprefix(block): tensor for name, tensor in tensors.items() if name.startswith(block)}

        def project(h: torch.Tensor, name: str, count: int, w: dict[str, torch.Tensor] = w) -> torch.Tensor:
            out = h @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0)
            out = out.unflatten(-1, (count, -1))
            norm = w.get(f"self_attn.{name}_norm.weight")
            return out if norm is None else rms_norm(out, norm, eps)

        h = rms_norm(x, w["input_layernorm.weight"], eps)
        q, k, v = project(h, "q", heads), project(h, "k", groups), project(h, "v", groups)
        if query_scale is not None:
            q = q * query_scale(positions)[..., None, None]
        x = x + attend(turn(q, positions), turn(k, positions), v, allowed) @ w["self_attn.o_proj.weight"].T
        h = rms_norm(x, w["post_attention_layernorm.weight"], eps)
        x = x + (mixture(h, w, route) if route and "mlp.gate.weight" in w else mlp(h, w, "mlp."))
    x = rms_norm(x, tensors[root + "norm.weight"], eps)
    return x @ tensors[head if head in tensors else root + "embed_tokens.weight"].T


def mlp(x: torch.Tensor, w: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    return swiglu(x, *(w[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down")))


def mixture(x: torch.Tensor, w: dict[str, torch.Tensor], route: Router) -> torch.Tensor:
    """Every expert's output by its weight (most are zero), and the shared expert's where there is one."""
    weights = route(x, w)
    out = sum(weights[..., e, None] * mlp(x, w, f"mlp.experts.{e}.") for e in range(weights.shape[-1]))
    return out + (mlp(x, w, "mlp.shared_experts.") if "mlp.shared_experts.gate_proj.weight" in w else 0)


def llada_logits(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    input_ids: torch.Tensor,
    real: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """LLaDA's logits [B, S, V] in float64: every position attends to every real position (`real` is [B, S] bool)."""
    batch, length = input_ids.shape
    if positions is None:
        positions = torch.arange(length).expand(batch, length)
    if real is None:
        real = torch.ones_like(input_ids, dtype=torch.bool)
    return llada_reference(tensors, config, input_ids, real[:, None, :].expand(-1, length, -1), positions)


LLADA_NAMES = {
    "transformer.wte": "embed_tokens",
    "transformer.ln_f": "norm",
    "transformer.blocks": "layers",
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


def llada_reference(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    input_ids: torch.Tensor,
    allowed: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """LLaDA's logits with any attention mask [B, S, S]."""
    renamed = {}
    for name, tensor in tensors.items():
        if name == "model.transformer.ff_out.weight":
            name = "lm_head.weight"
        for theirs, ours in LLADA_NAMES.items():
            name = name.replace(f".{theirs}.", f".{ours}.")
        renamed[name] = tensor
    sizes = {
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": config["n_kv_heads"],
        "num_hidden_layers": config["n_layers"],
    }
    return decoder_logits(renamed, {**config, **sizes}, input_ids, allowed, positions)


def two_stream_mask(
    positions_BL: torch.Tensor,
    block: int,
    real_BS: torch.Tensor | None = None,
    noisy: StreamPattern = "block",
    clean: StreamPattern = "block",
) -> torch.Tensor:
    """[B, 1, S, S] bool, S = 2L, for training on [noisy | clean] (BD3-LM, arXiv 2503.09573).

    A noisy token attends to its own block of the noisy stream, all of it or ("causal") what is before it, and to the
    clean blocks before; a clean token to the clean blocks up to its own, or ("causal") the clean tokens before it; and
    clean never attends to noisy. Only what is real (`real_BS`) is looked at, and padding attends to itself as well.
    """
    blocks_BL = positions_BL // block
    order_L = torch.arange(positions_BL.shape[1], device=positions_BL.device)
    until_BLL = (order_L[:, None] >= order_L[None, :])[None]
    own_BLL = blocks_BL[:, :, None] == blocks_BL[:, None, :]
    before_BLL = blocks_BL[:, :, None] > blocks_BL[:, None, :]
    noisy_BLL = own_BLL & until_BLL if noisy == "causal" else own_BLL
    clean_BLL = until_BLL.expand_as(own_BLL) if clean == "causal" else own_BLL | before_BLL
    noisy_BLS = torch.cat([noisy_BLL, before_BLL], dim=2)
    clean_BLS = torch.cat([torch.zeros_like(own_BLL), clean_BLL], dim=2)
    allowed_BSS = torch.cat([noisy_BLS, clean_BLS], dim=1)
    if real_BS is not None:
        own_SS = torch.eye(allowed_BSS.shape[-1], dtype=torch.bool, device=allowed_BSS.device)
        allowed_BSS = (allowed_BSS & real_BS.bool()[:, None, :]) | own_SS
    return allowed_BSS[:, None]
