"""Runs of several processes under random faults, and their resume: `python -m tests.faults`."""
