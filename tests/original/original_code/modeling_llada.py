"""LLaDA as a checkpoint's own code would define it; of our own making, from the model card's facts.

Plain attention and a rotary embedding by complex numbers, in float32: other operations than those of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_llada import LLaDAConfig


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.square().mean(-1, keepdim=True).add(self.eps).sqrt() * self.weight


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, ffn = config.d_model, config.mlp_hidden_size
        self.heads, self.groups, self.theta = config.n_heads, config.n_kv_heads, config.rope_theta
        rows = hidden // self.heads * self.groups
        self.attn_norm, self.ff_norm = Norm(hidden, config.rms_norm_eps), Norm(hidden, config.rms_norm_eps)
        self.q_proj, self.attn_out = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(hidden, rows, bias=False) for _ in range(2))
        self.ff_proj, self.up_proj = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.ff_out = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        x_BSH = x_BSH + self.attn_out(self.attention(self.attn_norm(x_BSH)))
        y_BSH = self.ff_norm(x_BSH)
        return x_BSH + self.ff_out(silu(self.ff_proj(y_BSH)) * self.up_proj(y_BSH))

    def attention(self, x_BSH: torch.Tensor) -> torch.Tensor:
        q = self.rotated(self.q_proj(x_BSH).unflatten(-1, (self.heads, -1)))
        k = self.rotated(self.k_proj(x_BSH).unflatten(-1, (self.groups, -1)))
        v = self.v_proj(x_BSH).unflatten(-1, (self.groups, -1))
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=2) for t in (k, v))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2)

    def rotated(self, x_BSND: torch.Tensor) -> torch.Tensor:
        half = x_BSND.shape[-1] // 2
        angles = torch.outer(
            torch.arange(x_BSND.shape[1]).double(), self.theta ** -(torch.arange(half).double() / half)
        )
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        pairs = torch.complex(x_BSND[..., :half].double(), x_BSND[..., half:].double()) * turn
        return torch.cat([pairs.real, pairs.imag], dim=-1).float()


class LLaDAModelLM(PreTrainedModel):
    config_class = LLaDAConfig
    base_model_prefix = "model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Module()
        self.model.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.d_model),
                "blocks": nn.ModuleList(Block(config) for _ in range(config.n_layers)),
                "ln_f": Norm(config.d_model, config.rms_norm_eps),
                "ff_out": nn.Linear(config.d_model, config.vocab_size, bias=False),
            }
        )
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
        parts = self.model.transformer
        x_BSH = parts["wte"](input_ids)
        for block in parts["blocks"]:
            x_BSH = block(x_BSH)
        return CausalLMOutput(logits=parts["ff_out"](parts["ln_f"](x_BSH)))
