"""The site builds without a warning, the same each time, and loads nothing from elsewhere; its notebook runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.conftest import made_once
from tests.helpers.browsers import open_browser

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = "pip install -e '.[docs]'"


def build(folder: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="session")
def site(shared_folder: Path) -> Path:
    pytest.importorskip("material", reason=DOCS)
    return made_once(shared_folder / "site", build)


@pytest.mark.slow
def test_two_builds_are_equal_byte_for_byte(site: Path, tmp_path: Path) -> None:
    build(tmp_path)
    first, second = (
        {path.relative_to(at): path.read_bytes() for path in at.rglob("*") if path.is_file()}
        for at in (site, tmp_path)
    )
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_the_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\">\s]+)"
    )
    styles = re.compile(r"(?:url\(|@import )['\"]?((?:https?:)?//\S+)")
    texts = {
        path: path.read_text("utf-8")
        for path in site.rglob("*.*")
        if path.is_file() and path.suffix in (".html", ".css")
    }
    assert len(texts) > 40
    assert {
        path: found
        for path, text in texts.items()
        if (found := loads.findall(text) + styles.findall(text))
    } == {}


def test_a_field_has_its_text_and_a_file_of_the_repository_its_page(site: Path) -> None:
    reference = (site / "reference" / "index.html").read_text("utf-8")
    assert "Keep p &gt;= top_a * p_max ** 2; 0 = off. Accepts a number from 0 to 1" in reference
    assert 'href="../repository/examples/generate.cpp/"' in (
        site / "hosts" / "index.html"
    ).read_text("utf-8")
    assert "onnxruntime_cxx_api" in (
        site / "repository" / "examples" / "generate.cpp" / "index.html"
    ).read_text("utf-8")


def test_diagrams_and_search_work_without_a_network(site: Path) -> None:
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(site))
    )
    Thread(target=server.serve_forever, daemon=True).start()
    address, asked = f"http://127.0.0.1:{server.server_port}/", list[str]()
    with open_browser() as browser:
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}architecture/")
        page.wait_for_selector("div.mermaid")  # <pre> until it is drawn
        page.click("input[name=query]")
        page.keyboard.type("speculation")
        page.wait_for_selector(".md-search-result__item")
    server.shutdown()
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


def test_the_notebook_prints_what_it_shows(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason=DOCS)
    import nbformat

    path = ROOT / "docs" / "tutorial.ipynb"
    shown, notebook = json.loads(path.read_text("utf-8")), nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    for wanted, cell in zip(shown["cells"], notebook.cells, strict=True):
        assert printed(cell) == printed(wanted), "".join(wanted["source"])


def printed(cell: Any) -> str:
    outputs = [output for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
    return "".join(
        "".join(output.get("text") or output["data"]["text/plain"]) for output in outputs
    )
