"""Structured output: constraints, their automata, decoding, and the fields of requests."""
