"""The bytes that each token of a tokenizer writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import xxhash

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"


@dataclass(frozen=True, eq=False)
class TokenBytes:
    """Bytes of each token in the middle of a text.

    Args:
        tokens: the bytes of each id; empty for special tokens and ids that write no text.
        strips_space: decoding removes one space at the start of a text, which its first token begins with.
    """

    tokens: list[bytes]
    strips_space: bool

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all tokens."""
        digest = xxhash.xxh3_128(str(self.strips_space).encode())
        digest.update(np.array([len(each) for each in self.tokens], np.int64).tobytes())
        digest.update(b"".join(self.tokens))
        return digest.hexdigest()


def token_bytes(tokenizer: Any, vocabulary_size: int, excluded: Collection[int] = ()) -> TokenBytes:
    """Bytes of the tokens of a byte-level, SentencePiece, WordPiece or word-level tokenizer.

    Special tokens, the ids `excluded` and ids without a token write nothing.
    """
    known = _known.setdefault(tokenizer, {})
    key = (vocabulary_size, len(tokenizer), frozenset(excluded))
    if key not in known:
        known[key] = _token_bytes(tokenizer, vocabulary_size, excluded)
    return known[key]


_known: WeakKeyDictionary[Any, dict[object, TokenBytes]] = WeakKeyDictionary()


def _token_bytes(tokenizer: Any, vocabulary_size: int, excluded: Collection[int]) -> TokenBytes:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(fast.decoder.__getstate__()) if fast is not None and fast.decoder is not None else None
    convert, strips = _converter(decoder, tokenizer, fast)
    special = {*tokenizer.all_special_ids, *excluded}
    special |= {index for index, added in tokenizer.added_tokens_decoder.items() if added.special}
    tokens = [b""] * vocabulary_size
    for piece, index in tokenizer.get_vocab().items():
        if index < vocabulary_size and index not in special:
            tokens[index] = convert(piece)
    return TokenBytes(tokens, strips)


def _converter(decoder: Any, tokenizer: Any, fast: Any) -> tuple[Callable[[str], bytes], bool]:
    """How a token's name becomes bytes, and whether decoding strips a space at the start of a text."""
    kinds = _kinds(decoder)
    if "ByteLevel" in kinds or (fast is None and hasattr(tokenizer, "byte_decoder")):
        return _byte_level, False
    if fast is None and hasattr(tokenizer, "sp_model"):
        return _metaspace, True
    if "Metaspace" in kinds:
        return _metaspace, kinds["Metaspace"].get("prepend_scheme", "always") != "never"
    if "Replace" in kinds or "ByteFallback" in kinds:
        return _metaspace, "Strip" in kinds and kinds["Strip"].get("start", 0) > 0
    if fast is not None and decoder is None:  # tokens are joined with a space
        return lambda piece: f" {piece}".encode(), True
    anchor = "a"
    before = tokenizer.convert_tokens_to_string([anchor])

    def difference(piece: str) -> bytes:
        return tokenizer.convert_tokens_to_string([anchor, piece])[len(before) :].encode()

    return difference, difference("a").startswith(b" ")


def _kinds(decoder: Any) -> dict[str, dict[str, Any]]:
    """A decoder's parts by their type."""
    if not decoder:
        return {}
    if decoder.get("type") == "Sequence":
        return {kind: part for each in decoder["decoders"] for kind, part in _kinds(each).items()}
    return {decoder["type"]: decoder}


def _byte_level(piece: str) -> bytes:
    alphabet = _alphabet()
    try:
        return bytes([alphabet[each] for each in piece])
    except KeyError:  # an added token, whose name is its text
        return piece.encode(errors="ignore")


def _metaspace(piece: str) -> bytes:
    match = _BYTE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace(_METASPACE, " ").encode(errors="ignore")


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """Byte of each character of the byte-level alphabet: printable bytes of Latin-1 stand for themselves, the others
    for the characters from 256 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
