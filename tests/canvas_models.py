"""A tiny DiffusionGemma with random weights: canvases of 8 tokens, a sliding and a full layer, 4 experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dlm_bridge.generation.token_sampling import Noise, invert
from dlm_bridge.objectives.noise import random_tokens
from tests.checkpoints import write_tokenizer

CANVAS, EOS, IMAGE, VOCABULARY, CONTEXT = 8, 258, 259, 272, 512
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.role }}: {{ m.content }}\n{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
has_class = pytest.mark.skipif(
    not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"), reason="transformers has no DiffusionGemma yet"
)


def canvas_model(seed: int = 0, **text: Any) -> Any:
    """The model, with weights that are large enough for its answers to differ."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "max_position_embeddings": CONTEXT,
        "use_bidirectional_attention": "vision",
        "pad_token_id": EOS,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 16,
    }
    torch.manual_seed(seed)
    config = DiffusionGemmaConfig(
        text_config={**sizes, "initializer_range": 0.2, **text},
        vision_config=vision,
        canvas_length=CANVAS,
        image_token_id=IMAGE,
        boi_token_id=IMAGE + 1,
        eoi_token_id=IMAGE + 2,
        initializer_range=0.2,
    )
    return DiffusionGemmaForBlockDiffusion(config).eval()


def write_canvas_model(folder: Path, seed: int = 0) -> Path:
    """The model with a tokenizer that has a chat template."""
    from transformers import AutoTokenizer

    canvas_model(seed).save_pretrained(folder)
    write_tokenizer(
        folder,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<eos>",
            "mask_token": "<mask>",
            "image_token": "<image>",
            "clean_up_tokenization_spaces": False,
        },
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def keyed_draws(seed: int) -> Iterator[None]:
    """transformers' loop for one row draws the numbers that a row with this seed draws here."""
    noise = Noise([seed], torch.device("cpu"))

    def uniform(count: int) -> torch.Tensor:
        return noise.uniform([0], torch.arange(count)[None])

    def randint(low: int = 0, high: int = 0, size: Any = (), **_: Any) -> torch.Tensor:
        assert (low, len(size), size[0]) == (0, 2, 1)
        return random_tokens(uniform(size[1]), high, -1)

    def multinomial(probabilities_QV: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1
        return invert(probabilities_QV[None].double(), uniform(len(probabilities_QV))).T

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", randint)
        patch.setattr(torch, "multinomial", multinomial)
        yield
