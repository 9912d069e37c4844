"""Package discovery: every package below dlm_bridge/, and the folders that are installed inside it."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["dlm_bridge", "dlm_bridge.*"]), "dlm_bridge.cli", "dlm_bridge.model_cards"])
