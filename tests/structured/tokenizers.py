"""Tiny tokenizers of each kind: byte-level, SentencePiece with byte fallback, and word-level."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dlm_bridge.structured.automaton import TokenAutomaton
from dlm_bridge.structured.compile import compile_constraint
from dlm_bridge.structured.constraint import Constraint

PAD, EOS, MASK = 0, 1, 2
SPECIAL = ["<pad>", "<eos>", "<mask>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", mask_token="<mask>"
    )


def byte_level(*pieces: str) -> PreTrainedTokenizerFast:
    """Pieces in the byte-level alphabet, in which a space is written Ġ."""
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate([*SPECIAL, *pieces])}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return fast(tokenizer)


def sentencepiece(*pieces: str) -> PreTrainedTokenizerFast:
    """Pieces in which a space is written ▁, and bytes are written <0x0A>."""
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate([*SPECIAL, *pieces])}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(tokenizer)


def word_level(*words: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *words])}, unk_token="<mask>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return fast(tokenizer)


def compiled(
    constraint: Constraint, tokenizer: PreTrainedTokenizerFast, extra: int = 2, **limits: float
) -> TokenAutomaton:
    """Automaton for a model whose vocabulary has `extra` ids more than the tokenizer."""
    return compile_constraint(
        constraint,
        tokenizer,
        vocabulary_size=len(tokenizer) + extra,
        mask_token_id=MASK,
        eos_token_ids=[EOS],
        pad_token_id=PAD,
        **limits,  # type: ignore[arg-type]
    )
