"""What mkdocs.yml needs to make a site of the repository; MkDocs calls it (`hooks`).

Pages lie in docs/ and link to files of the repository, so links work there, too. On the site these files are pages:
README.md is `overview`, others stand below `repository/`, programs as they are, folders as lists. A notebook is a page
with its outputs. Diagrams are drawn by the mermaid that mermaidx contains, from the site itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from importlib import import_module
from importlib.resources import files as contents_of
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from qsample.request.sampling_params import HELP, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MERMAID = "assets/mermaid.js"
_LINK = re.compile(r"(\]\()(?!https?://|mailto:|#)([^)#\s]+)")
_REFERENCE = {
    name.rpartition(".")[2]: name
    for name in re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text("utf-8"), re.MULTILINE)
}
_HIDDEN = "---\nsearch:\n  exclude: true\n---\n"  # from the search: these are the same words again
_LANGUAGES = {".cpp": "cpp", ".mjs": "js", ".py": "python", ".toml": "toml", ".ts": "ts"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Show the menu of versions if mike builds: a site without versions has no list of them to ask for."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebook's page, and every file of the repository that a page links to, or such a file."""
    origins: dict[str, Path] = {}  # pages → the files that they are made of
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        uri, path = notebook.src_uri.replace(".ipynb", ".md"), DOCS / notebook.src_uri
        _add(files, config, uri, from_notebook(json.loads(path.read_text("utf-8"))))
        origins[uri] = path
    linked = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for page in files.documentation_pages():
        path = origins.setdefault(page.src_uri, DOCS / page.src_uri)
        linked += _linked(path, page.content_string)
    for path in linked:  # which grows
        if path.is_relative_to(DOCS) or (uri := _uri(path)) in origins:
            continue
        text = _page(path)
        origins[uri] = path / "README.md" if path.is_dir() else path
        _add(files, config, uri, text)
        linked += _linked(origins[uri], text) if path.suffix == ".md" or path.is_dir() else []
    config.extra["origins"] = origins
    mermaid = contents_of("mermaidx") / "assets" / "mermaid.js"
    files.append(File.generated(config, MERMAID, content=mermaid.read_bytes()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Point links that leave docs/, and links of files from elsewhere, to the pages of the site."""
    origin = config.extra["origins"][page.file.src_uri]
    if not origin.is_relative_to(ROOT) or origin.suffix not in (".md", ".ipynb"):
        return markdown
    here = os.path.dirname(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(origin.parent / match[2]))
        return match[1] + os.path.relpath(_uri(target), here or ".")

    return _LINK.sub(moved, markdown)


def on_page_content(html: str, *, page: Page, **_: Any) -> str:
    """Load mermaid on the pages with a diagram; the theme would ask a stranger's server for it."""
    script = f'<script src="{os.path.relpath(MERMAID, page.url or ".")}"></script>'
    drawn = re.sub(
        r'<pre class="mermaid">.*?</pre>', r'<div class="wide">\g<0></div>', html, flags=re.DOTALL
    )
    return html if drawn == html else f"{drawn}\n{script}"


def from_notebook(notebook: dict[str, Any]) -> str:
    """The page of a notebook: its texts, programs and what they print."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join(
            "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
            for output in cell.get("outputs", ())
        )
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _linked(path: Path, text: str) -> list[Path]:
    return [Path(os.path.normpath(path.parent / match[2])) for match in _LINK.finditer(text)]


def _uri(path: Path) -> str:
    """Where a file of the repository stands on the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "overview.md"
    if path.is_dir():
        return f"repository/{name}/README.md"
    return f"repository/{name}" if path.suffix == ".md" else f"repository/{name}.md"


def _page(path: Path) -> str:
    """The text of a page for a file or a folder of the repository."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        if (path / "README.md").is_file():
            return (path / "README.md").read_text("utf-8")
        names = sorted({entry.name for entry in path.iterdir()} - {"dist", "node_modules"})
        return f"{_HIDDEN}# {name}\n\n" + "".join(f"- {entry}\n" for entry in names)
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise PluginError(f"a page links to {name}: {error.strerror}") from error
    if path.suffix == ".md":
        return text
    return f"{_HIDDEN}# {path.name}\n\n`{name}`\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text}````\n"


def _add(files: Files, config: MkDocsConfig, uri: str, text: str) -> None:
    files.append(File.generated(config, uri, content=text))


class HouseStyle(griffe.Extension):
    """Docstrings as this project writes them, for the reference: `a, b:` describes two arguments; examples need no
    heading; a dataclass's field may have its text and limits where it is declared (`qsample.checks`)."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._rewrite(pkg)

    def _rewrite(self, parent: griffe.Object) -> None:
        for member in parent.members.values():
            if isinstance(member, griffe.Alias):
                continue
            if member.docstring is not None:
                member.docstring.value = _in_google_style(member.docstring.value)
            if isinstance(member, griffe.Class) and any(
                _is_checked(entry) for entry in member.attributes.values()
            ):
                _describe_fields(member)
            self._rewrite(member)


def _in_google_style(text: str) -> str:
    """A docstring with an argument a line, examples in fences, and names of the reference as links."""
    text = re.sub(
        r"^ {4}((?:\*{0,2}\w+, )+\*{0,2}\w+): (.*(?:\n {5,}\S.*)*)$",
        lambda match: "\n".join(f"    {name}: {match[2]}" for name in match[1].split(", ")),
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"^( {4}\w+: )>", r"\1\>", text, flags=re.MULTILINE)  # which would be a quotation
    text = re.sub(
        r"^Returns:\n +", "**Returns:** ", text, flags=re.MULTILINE
    )  # whose colons are no types
    text = re.sub(r"`(?:\w+\.)*([A-Z]\w+)(\.\w+)?`", _as_link, text)
    return re.sub(
        r"((?:^>>> .*\n?(?:^\.\.\. .*\n?)*)+)", r"```pycon\n\1\n```\n", text, flags=re.MULTILINE
    )


def _as_link(match: re.Match[str]) -> str:
    name, member = match[1], match[2] or ""
    if name not in _REFERENCE:
        return match[0]
    return f'<autoref optional identifier="{_REFERENCE[name]}{member}"><code>{name}{member}</code></autoref>'


def _is_checked(attribute: griffe.Attribute) -> bool:
    """Whether it is a field of `qsample.checks`."""
    value = attribute.value
    return isinstance(value, griffe.ExprCall) and value.canonical_path.startswith("qsample.checks.")


def _describe_fields(cls: griffe.Class) -> None:
    """Replace what makes a field by its default, and add the fields that the docstring leaves out to its `Args`."""
    assert cls.docstring is not None
    text = re.sub(
        r"The `help` of a field says what it is\..*\n*", "", cls.docstring.value
    )  # it follows here
    lines = ""
    real = getattr(import_module(cls.module.path), cls.name)
    for entry in dataclasses.fields(real):
        default = (
            entry.default
            if entry.default_factory is dataclasses.MISSING
            else entry.default_factory()
        )
        if default is not dataclasses.MISSING:
            cls.attributes[entry.name].value = repr(default)
        limits = entry.metadata.get("limits")
        accepted = (
            limits.accepted if limits else ", ".join(map(str, entry.metadata.get("choices", ())))
        )
        says = entry.metadata.get("help") or (
            HELP.get(entry.name, "") if real is SamplingParams else ""
        )
        says += f" Accepts {accepted}." if accepted else ""
        if says and not re.search(rf"^ {{4}}{entry.name}: ", text, re.MULTILINE):
            lines += f"    {entry.name}: {says.strip()}\n"
    if not re.search(r"^(Args|Attributes):$", text, re.MULTILINE):
        text += "\n\nArgs:\n"
    cls.docstring.value = re.sub(
        r"^((?:Args|Attributes):\n(?: {4}.*(?:\n|$))*)",
        lambda match: f"{match[1].rstrip()}\n{lines}",
        text,
        count=1,
        flags=re.MULTILINE,
    )
