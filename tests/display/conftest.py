"""Models and the command of the tests of `dlm-bridge generate`."""

from tests.cli.conftest import cli, llada, qwen3  # noqa: F401  fixtures
