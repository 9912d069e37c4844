"""LLaDA-8B's case."""

from __future__ import annotations

from tests.checkpoints import llada_config, llada_tensors
from tests.families.case import FamilyCase
from tests.reference import llada_reference

TOKENIZER = {
    "added_tokens_decoder": {},
    "bos_token": "<|startoftext|>",
    "clean_up_tokenization_spaces": False,
    "cls_token": "[CLS]",
    "eos_token": "<|endoftext|>",
    "gmask_token": "[gMASK]",
    "model_max_length": 1000000000000000019884624838656,
    "pad_token": "<|endoftext|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "trust_remote_code": True,
}

CASES = [
    FamilyCase(
        "llada",
        llada_config(n_kv_heads=2),
        llada_tensors,
        llada_reference,
        mask_token_id=127,
        tokenizer=TOKENIZER,
    ),
    FamilyCase(
        "llada",
        llada_config(n_kv_heads=2, weight_tying=True, embedding_size=160),
        llada_tensors,
        llada_reference,
        mask_token_id=127,
        label="tied",
    ),
]
