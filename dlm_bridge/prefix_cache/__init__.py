"""Prompts of block-causal models: keys and values that are reused across requests, and prompts cached in chunks."""

from dlm_bridge.registration import Extension

EXTENSION = Extension("prefix_cache", features={"prefix cache": "dlm_bridge.prefix_cache.prompts:PromptCache"})
