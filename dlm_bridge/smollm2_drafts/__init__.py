"""Drafts for SmolLM2-135M-Instruct, as data: an adapter at mask tokens. README.md is its card."""
