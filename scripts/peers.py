"""The newest releases of the software in docs/peers.md, beside the versions that the documentation was checked with.

    python scripts/peers.py

prints a line per package, with its newest release for each Python version: a final release with a wheel for Linux on
x86-64 that is not yanked, or a pre-release if the package has nothing else. The index is `PIP_INDEX_URL` or PyPI. Exit
code 1 if the table is older for a package, 2 if the index does not answer. Repositories without a package are listed
without a comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

PAGE = Path(__file__).resolve().parents[1] / "docs" / "peers.md"
PYTHONS = ("3.11", "3.12", "3.13")
INDEX = "https://pypi.org/simple"
JSON = "application/vnd.pypi.simple.v1+json"
GLIBC = 39  # Ubuntu 24.04's; older systems may not get the newest release
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)),
    *(f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")),
    "linux_x86_64",
]


@dataclass(frozen=True)
class Peer:
    """A row of the page: a package, or a repository without releases in use."""

    name: str
    package: str | None
    checked: str
    measured: tuple[str, ...] = ()


def read_table(page: str) -> list[Peer]:
    """The rows of both tables."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ]
    peers = []
    for name, package, checked, *measured in rows:
        if found := re.fullmatch(r"`([\w.-]+)`", package):
            versions = tuple(version for version in re.split(r",\s*", measured[0]) if version)
            peers.append(Peer(name, found[1], checked, versions))
        elif "](" in package:
            peers.append(Peer(name, None, checked))
    return peers


def newest(files: Iterable[dict[str, Any]], python: str) -> Version | None:
    """The newest release for a Python version.

    Args:
        files: the field `files` of the index's answer (PEP 691).
    """
    wanted = _tags(python)
    found = set()
    for file in files:
        try:
            _, version, _, tags = parse_wheel_filename(file["filename"])
            allowed = SpecifierSet(file.get("requires-python") or "").contains(f"{python}.99")
        except (InvalidWheelFilename, InvalidSpecifier):  # a source distribution, or an old file's
            continue
        if allowed and not file.get("yanked") and not wanted.isdisjoint(tags):
            found.add(version)
    return max({version for version in found if not version.is_prerelease} or found, default=None)


def _tags(python: str) -> frozenset[Tag]:
    """The tags of wheels that pip takes on Linux."""
    version = [int(number) for number in python.split(".")]
    return frozenset([*cpython_tags(version, platforms=PLATFORMS), *compatible_tags(version, platforms=PLATFORMS)])


def fetch(package: str) -> list[dict[str, Any]]:
    """The files of a package on the index. Raises OSError."""
    index = os.environ.get("PIP_INDEX_URL", INDEX).rstrip("/")
    request = urllib.request.Request(f"{index}/{package}/", headers={"Accept": JSON})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["files"])


def compare(peer: Peer, files: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """The newest release for each Python version, and whether the table is older than one of them."""
    releases = [newest(files, python) for python in PYTHONS]
    older = any(release is not None and release > Version(peer.checked) for release in releases)
    return [str(release or "none") for release in releases], older


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    peers = read_table(PAGE.read_text())
    packages = [peer.package for peer in peers if peer.package is not None]
    try:
        with ThreadPoolExecutor(8) as pool:
            files = dict(zip(packages, pool.map(fetch, packages), strict=True))
    except (OSError, ValueError, KeyError) as error:
        print(f"the index cannot be read: {error}", file=sys.stderr)
        return 2
    lines = [["", "checked", *(f"Python {python}" for python in PYTHONS), "measured"]]
    outdated = []
    for peer in peers:
        cells, older = (["not on an index"], False) if peer.package is None else compare(peer, files[peer.package])
        lines.append([peer.name, peer.checked, *cells, ", ".join(peer.measured)])
        outdated += [peer.name] * older
    for name, *cells in lines:
        print(name.ljust(max(len(line[0]) for line in lines)), *(cell.ljust(12) for cell in cells), sep="  ")
    if outdated:
        print(f"docs/peers.md is older than the newest release of: {', '.join(outdated)}", file=sys.stderr)
    return 1 if outdated else 0


if __name__ == "__main__":
    raise SystemExit(main())
