"""What GitHub, container builders and citation tools read. None of them runs here: the files are read as they would."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from qsample import cli

ROOT = Path(__file__).resolve().parent.parent
yaml: Any = pytest.importorskip("yaml")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, with their arguments on one line."""
    lines = [
        line
        for line in (ROOT / "Dockerfile").read_text("utf-8").splitlines()
        if not line.startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (name, rest.strip())
        for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def test_the_container_installs_extras_that_exist_and_serves_as_a_user() -> None:
    given = instructions()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    assert set(
        dict(rest.split("=", 1) for name, rest in given if name == "ARG")["EXTRAS"].split(",")
    ) <= set(extras)
    final = given[max(index for index, (name, _) in enumerate(given) if name == "FROM") :]
    settings = dict(final)
    assert settings["USER"] not in ("", "root", "0")
    assert settings["VOLUME"] == "/cache"
    assert [name for name, _ in final].index("USER") > [name for name, _ in final].index("COPY")
    command = json.loads(
        settings["ENTRYPOINT"]
    )  # a list: no shell stands between it and the signals
    context = cli.commands()["serve"].make_context("serve", command[2:])
    assert (command[:2], context.params["host"]) == (["qsample", "serve"], "0.0.0.0")
    assert f":{context.params['port']}/health" in settings["HEALTHCHECK"]
    assert settings["EXPOSE"] == str(context.params["port"])
    assert "localhost" in context.params["allowed_hosts"]


def test_the_container_gets_what_a_wheel_is_made_of() -> None:
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert {"LICENSE", "README.md", "pyproject.toml", "qsample", "scripts"} == kept


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_few_rights_and_runs_what_exists(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text("utf-8"))
    assert workflow["permissions"] in ({}, {"contents": "read"})
    assert "pull_request_target" not in workflow[True]  # YAML 1.1 reads `on` so
    allowed = {
        "attest": {"id-token", "attestations"},
        "pypi": {"id-token"},
        "npm": {"id-token"},
        "site": {"contents"},
    }
    for name, job in workflow["jobs"].items():
        assert set(job.get("permissions", {})) == allowed.get(name, set())
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"[\w/.-]+@v\d+(\.\d+)*", step.get("uses", "a@v1"))
            assert "${{" not in step.get("run", "")  # a title of a pull request would be a command
            for word in shlex.split(step.get("run", ""), comments=True):
                assert not word.startswith(("scripts/", ".ci/")) or (ROOT / word).is_file(), word


def test_the_forms_and_the_citation_can_be_read() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    forms = [
        path
        for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
        if path.name != "config.yml"
    ]
    assert len(forms) == 2
    for form in forms:
        read = yaml.safe_load(form.read_text("utf-8"))
        assert {"name", "description", "body"} <= set(read)


@pytest.mark.ci
def test_a_release_checks_before_it_works(tmp_path: Path) -> None:
    """In a clone with another npm version: it ends before it builds."""
    if not (ROOT / ".git").exists():
        pytest.skip("scripts/release works in a clone")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(clone)], check=True)
    package = clone / "js" / "package.json"
    package.write_text(
        re.sub(r'"version": "[^"]*"', '"version": "9.9.9"', package.read_text("utf-8"))
    )
    run = ["bash", "scripts/release", "--no-check"]
    dirty = subprocess.run(run, cwd=clone, capture_output=True, text=True, check=False)
    assert (dirty.returncode, "git status" in dirty.stderr) == (1, True), dirty.stderr
    subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x", "commit", "-qam", "x"],
        cwd=clone,
        check=True,
    )
    wrong = subprocess.run(run, cwd=clone, capture_output=True, text=True, check=False)
    assert (wrong.returncode, "js/package.json 9.9.9" in wrong.stderr) == (1, True), wrong.stderr
    assert not (clone / "dist").exists()
