"""Fixtures of a small training run, as in tests/train."""

from tests.train.conftest import _cache, _undrawn, corpus, run, seed_folder, tokenizer, values

__all__ = ["_cache", "_undrawn", "corpus", "run", "seed_folder", "tokenizer", "values"]
