"""Seeing a sampler at work: a film of how tokens settle, live in a terminal or as a page."""
