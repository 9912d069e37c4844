"""Package discovery: every package below dlm_bridge/, and the folders that are installed inside it.

`dlm_bridge/cli` and `dlm_bridge/model_cards` are links to those folders, so that a checkout's `dlm_bridge/` is
complete by itself: Python, mypy and import-linter find there what an installation has. What is installed are the
folders themselves (`package-dir` in pyproject.toml), also where a checkout has lost its links.
"""

from setuptools import find_packages, setup

LINKED = {"dlm_bridge.cli", "dlm_bridge.model_cards"}

setup(packages=sorted({*find_packages(include=["dlm_bridge", "dlm_bridge.*"]), *LINKED}))
