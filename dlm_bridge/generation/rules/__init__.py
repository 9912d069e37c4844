"""Commit rules: which of a step's proposals are settled. A new rule is one small class."""
