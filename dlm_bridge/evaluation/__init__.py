"""Evaluation: likelihood bounds, perplexity, lm-evaluation-harness, comparison of logits."""
