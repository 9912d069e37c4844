"""The model, the tokenizer and the run of the training tests."""

from tests.train.conftest import _cache, _undrawn, corpus, run, seed_folder, tokenizer, values  # noqa: F401  fixtures
