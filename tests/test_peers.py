"""scripts/peers.py with answers that PyPI gave (November 2026), and the versions that the documentation names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import peers

ROOT = Path(__file__).parents[1]
TABLE = peers.read_table(peers.PAGE.read_text())
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("performance", "serving", "diffusion_gemma", "generation_speed")),
    *(ROOT / "docs" / f"{name}.md" for name in ("training_speed", "adaptation", "fine_tuning")),
]
VERSION = r"\d+\.\d+(?:\.\d+)*(?:(?:a|b|rc|\.post|\.dev)\d+)?"
CORE_TAGS = "manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
# Some files of each answer's field `files`: name, requires-python, yanked.
ANSWERS: dict[str, list[tuple[str, str | None, bool | str]]] = {
    "megatron-core": [
        (f"megatron_core-0.16.1-cp311-cp311-{CORE_TAGS}", ">=3.10", False),
        (f"megatron_core-0.16.1-cp312-cp312-{CORE_TAGS}", ">=3.10", False),
        (f"megatron_core-0.16.1-cp313-cp313-{CORE_TAGS}", ">=3.10", False),
        (f"megatron_core-0.19.2-cp311-cp311-{CORE_TAGS}", ">=3.12", False),  # which Python 3.11 may not install
        (f"megatron_core-0.19.2-cp312-cp312-{CORE_TAGS}", ">=3.12", False),
        (f"megatron_core-0.19.2-cp313-cp313-{CORE_TAGS}", ">=3.12", False),
        ("megatron_core-0.19.2.tar.gz", ">=3.12", False),
    ],
    "megatron-bridge": [
        ("megatron_bridge-0.3.1-py3-none-any.whl", ">=3.10", False),
        ("megatron_bridge-0.6.0-py3-none-any.whl", "<3.13,>=3.12", False),
        ("megatron_bridge-0.6.1-py3-none-any.whl", "<3.13,>=3.12", "wrong version "),
    ],
    "nvidia-resiliency-ext": [
        ("nvidia_resiliency_ext-0.6.0-cp311-cp311-manylinux_2_39_x86_64.whl", ">=3.10", False),
        ("nvidia_resiliency_ext-0.6.0-cp312-cp312-manylinux_2_39_x86_64.whl", ">=3.10", False),
        ("nvidia_resiliency_ext-0.7.0-cp312-cp312-manylinux_2_39_aarch64.whl", "<4.0,>=3.10", False),
        ("nvidia_resiliency_ext-0.7.0-cp312-cp312-manylinux_2_39_x86_64.whl", "<4.0,>=3.10", False),
        ("nvidia_resiliency_ext-0.7.0-cp314-cp314-manylinux_2_39_x86_64.whl", "<4.0,>=3.10", False),
    ],
    "flash-attn-4": [
        ("flash_attn_4-4.0.0b9-py3-none-any.whl", ">=3.10", False),
        ("flash_attn_4-4.0.0b36-py3-none-any.whl", ">=3.10", False),
    ],
    "lm-eval": [
        ("lm_eval-0.4.13-py3-none-any.whl", ">=3.10", False),
        ("lm_eval-0.5.0.dev1-py3-none-any.whl", ">=3.10", False),
    ],
    "bitsandbytes": [
        ("bitsandbytes-0.50.2-py3-none-macosx_14_0_arm64.whl", ">=3.10", False),
        ("bitsandbytes-0.50.1-py3-none-manylinux_2_24_x86_64.whl", None, False),
    ],
}


def files(package: str) -> list[dict[str, Any]]:
    return [{"filename": name, "requires-python": python, "yanked": why} for name, python, why in ANSWERS[package]]


@pytest.mark.parametrize(
    ("package", "releases"),
    [
        ("megatron-core", ["0.16.1", "0.19.2", "0.19.2"]),
        ("megatron-bridge", ["0.3.1", "0.6.0", "0.3.1"]),
        ("nvidia-resiliency-ext", ["0.6.0", "0.7.0", "none"]),
        ("flash-attn-4", ["4.0.0b36"] * 3),
        ("lm-eval", ["0.4.13"] * 3),
        ("bitsandbytes", ["0.50.1"] * 3),
    ],
)
def test_the_newest_release_for_each_python(package: str, releases: list[str]) -> None:
    found, older = peers.compare(peers.Peer("a name", package, "0.16.1"), files(package))
    assert found == releases
    assert older == any(release != "none" and Version(release) > Version("0.16.1") for release in releases)


@pytest.mark.parametrize(("checked", "code"), [("0.19.2", 0), ("0.19.0", 1)])
def test_a_table_that_is_older_than_a_release_is_named(
    checked: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "peers.md"
    page.write_text(
        "| name | package | checked | measured |\n|---|---|---|---|\n"
        f"| megatron-core | `megatron-core` | {checked} | 0.16.1, 0.15.0 |\n| lm-eval | `lm-eval` | 0.4.13 | |\n\n"
        "| name | repository | checked |\n|---|---|---|\n| dLLM | [ZHZisZZ/dllm](https://example.com) | ca17675 |\n"
    )
    monkeypatch.setattr(peers, "PAGE", page)
    monkeypatch.setattr(peers, "fetch", files)
    monkeypatch.setattr(sys, "argv", ["peers.py"])
    assert peers.main() == code
    said = capsys.readouterr()
    lines = [re.split(r"\s{2,}", line.strip()) for line in said.out.splitlines()]
    assert ["megatron-core", checked, "0.16.1", "0.19.2", "0.19.2", "0.16.1, 0.15.0"] in lines
    assert ["dLLM", "ca17675", "not on an index"] in lines
    assert ("megatron-core" in said.err) == bool(code)
    assert "lm-eval" not in said.err


def test_an_index_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(sys, "argv", ["peers.py"])
    assert peers.main() == 2
    assert "the index cannot be read" in capsys.readouterr().err


def test_the_documentation_names_versions_of_the_table() -> None:
    """Every version after a package's name is one that was checked or measured, and each of these is named."""
    wrong, named = [], set()
    text = {page.name: page.read_text() for page in PAGES}
    for peer in TABLE:
        if peer.package is None:
            continue
        names = "|".join(re.escape(name) for name in {peer.name, peer.package})
        pattern = re.compile(rf"\b(?:{names})(?:'s)?[ (]+v?({VERSION})\b", re.IGNORECASE)
        for page, version in [(name, found) for name, body in text.items() for found in pattern.findall(body)]:
            known = [one for one in (peer.checked, *peer.measured) if f"{one}.".startswith(f"{version}.")]
            named.update((peer.name, one) for one in known)
            wrong += [] if known else [f"{page}: {peer.name} {version}"]
    assert not wrong
    assert {(peer.name, version) for peer in TABLE for version in peer.measured} <= named
    described = ("SGLang", "vLLM", "LMDeploy", "Megatron Bridge", "mbridge")
    assert {(peer.name, peer.checked) for peer in TABLE if peer.name in described} <= named
