"""The tokenizer class that Dream's tokenizer_config.json names: Qwen2's byte-level BPE, under another name.

The original is a slow Python class with Qwen2's NFC normalisation and pre-tokenisation pattern and no bos by default.
"""

from __future__ import annotations

from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer


class DreamTokenizer(Qwen2Tokenizer):
    """Named as on the Hub, so that `save_pretrained` writes the name that the original code looks for."""
