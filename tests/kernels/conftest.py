"""The fixtures of the tests of generation."""

from tests.generation.conftest import folder

__all__ = ["folder"]
