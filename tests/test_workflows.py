"""The workflows, issue forms and the repository's address, checked without running anything on GitHub."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = {file.stem: file for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
ACTION = re.compile(r"[\w-]+/[\w-]+@(?:v\d+|release/v\d+)")
PYTHONS = ["3.11", "3.12", "3.13"]


def load(name: str) -> dict[str, Any]:
    loaded = yaml.safe_load(WORKFLOWS[name].read_text())
    loaded["on"] = loaded.pop(True)  # YAML 1.1 reads `on` as true
    return loaded


def commands(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_has_least_rights_and_names_what_exists(name: str) -> None:
    workflow = load(name)
    assert workflow["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in workflow["jobs"].values():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(workflow["jobs"])
        assert job["timeout-minutes"] <= 360
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert "uses" not in step or ACTION.fullmatch(step["uses"])
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False
        said = commands(job)
        assert set(re.findall(r"\bmake ([\w-]+)", said)) <= targets
        assert all((ROOT / script).is_file() for script in re.findall(r"python (scripts/\S+)", said))
        matrix = job.get("strategy", {}).get("matrix", {})
        axes = {*matrix, *(name for row in matrix.get("include", ()) for name in row)}
        assert set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", yaml.safe_dump(job))) <= axes
        # What an event brings comes into a script by the environment only.
        assert "${{ github" not in said


def test_the_release_builds_once_tests_each_python_and_publishes_without_a_token() -> None:
    workflow = load("release")
    jobs = workflow["jobs"]
    assert workflow["on"]["push"] == {"tags": ["v*"]}
    assert [name for name, job in jobs.items() if "python -m build" in commands(job)] == ["build"]
    assert jobs["smoke-test"]["strategy"]["matrix"]["python"] == PYTHONS
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert all(f"Programming Language :: Python :: {version}" in classifiers for version in PYTHONS)
    assert set(jobs["publish"]["needs"]) == {"smoke-test", "sbom"}
    assert jobs["release"]["needs"] == "publish"
    assert "github.ref_type == 'tag'" in jobs["publish"]["if"]
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "publish": {"id-token": "write"},
        "release": {"contents": "write"},
    }
    assert "secrets." not in WORKFLOWS["release"].read_text()


def test_the_nightly_job_runs_the_long_checks() -> None:
    workflow = load("nightly")
    assert workflow["on"]["schedule"]
    assert "make test-slow" in commands(workflow["jobs"]["test-slow"])


@pytest.mark.parametrize("form", [form for form in FORMS if form.stem != "config"], ids=lambda form: form.stem)
def test_an_issue_form_is_one(form: Path) -> None:
    loaded = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(loaded)
    fields = [field for field in loaded["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_repository_s_address_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.get("repository-code") == project.get("urls", {}).get("Repository")


def test_the_long_description_has_absolute_links_once_the_address_is_known(tmp_path: Path) -> None:
    """By setup.py, of a copy."""
    import runpy

    import setuptools

    (tmp_path / "setup.py").write_text((ROOT / "setup.py").read_text())
    (tmp_path / "README.md").write_text(
        "![picture](docs/a.svg) [page](docs/a.md#b) [here](#c) [site](https://x.org)\n"
    )
    described = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **words: described.update(words))
        for urls in ("", '[project.urls]\nRepository = "https://host/a/b"\n'):
            (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "test"\n{urls}')
            runpy.run_path(str(tmp_path / "setup.py"))
            links = re.findall(r"\]\((\S+)\)", described["long_description"])
            if urls:
                raw, blob = "https://host/a/b/raw/HEAD/", "https://host/a/b/blob/HEAD/"
                assert links == [f"{raw}docs/a.svg", f"{blob}docs/a.md#b", "#c", "https://x.org"]
            else:
                assert links == ["docs/a.svg", "docs/a.md#b", "#c", "https://x.org"]
