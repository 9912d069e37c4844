"""Models of other packages' tests."""

from tests.cli.conftest import llada  # noqa: F401  a fixture
from tests.generation.conftest import folder, model  # noqa: F401  fixtures
