"""Tasks of lm-evaluation-harness that run offline; package data."""
