"""Runs on two nodes of one machine, network namespaces or Slurm's, and their accidents: `python -m tests.nodes`."""
