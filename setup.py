"""The package's folders and long description.

Packages are those below dlm_bridge/, and the folders that are installed inside it. `dlm_bridge/cli` and
`dlm_bridge/model_cards` are links to those folders, so that a checkout's `dlm_bridge/` is complete by itself: Python,
mypy and import-linter find there what an installation has. What is installed are the folders themselves (`package-dir`
in pyproject.toml), also where a checkout has lost its links.
"""

import re
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
LINKED = {"dlm_bridge.cli", "dlm_bridge.model_cards"}


def long_description() -> str:
    """The README, whose links to other files of the repository get its address, for package indexes."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    if "Repository" not in urls:
        return text
    text = re.sub(r"(!\[[^\]]*\])\((?!https?:)", rf"\1({urls['Repository']}/raw/HEAD/", text)
    return re.sub(r"\]\((?!https?:|#)", f"]({urls['Repository']}/blob/HEAD/", text)


setup(
    packages=sorted({*find_packages(include=["dlm_bridge", "dlm_bridge.*"]), *LINKED}),
    long_description=long_description(),
    long_description_content_type="text/markdown",
)
