#!/usr/bin/env python3
"""Counts the marks of translated English in documents, docstrings, comments and messages, and of unclear names in code.

    python scripts/prose.py                  README, CONTRIBUTING, CHANGELOG, docs and qsample
    python scripts/prose.py docs/bake.md     other files or folders, with the lines to look at

The marks of English are counted per 1,000 words. A count is a hint, and its limit is for a whole room: "where" is right
for a place, "one" for a number, "its own" for a contrast. Native texts of the same kind have a fifth of most limits.

The marks of code are shares in percent:

    continued     comments that only continue the name in front of them: `_MAX: Final = 64  # grammars`. A unit such as
                  `# bytes` is no mark, and neither is a sentence.
    preposition   descriptions of a parameter or field that begin with a preposition: "layers: of the decoder".
    participle    constants named by a participle or adjective alone: `_KEPT`.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "qsample"]
# name → pattern, most per 1,000 words: about five times the rate of httpx, litgpt and mobius; None = no limit
MARKS: dict[str, tuple[str, float | None]] = {
    "where": (r"\bwhere\b", 1.0),
    "what": (r"\bwhat\b(?! to\b)(?!\?)", 1.0),
    "one(s)": (r"\bones?\b", 3.0),
    "is told": (r"\b(?:is|are|was|were|be) told\b", None),
    "is no X": (r"\bis no (?!longer\b)\w", None),
    "behind": (r"\bbehind\b", None),
    "beside": (r"\bbeside\b", None),
    ", which": (r", which\b", 2.0),
    "that of": (r"\b(?:that|those) of\b", 0.5),
    "its own": (r"\b(?:of )?(?:its|their) own\b", 0.5),
    "others": (r"\bothers\b", 0.5),
    "nobody": (r"\b(?:nobody|somebody|whoever|whatever)\b", 0.5),
    "those who": (r"\bthose (?:that|who)\b", 0.3),
    "so many": (r"\b(?:so|as) many\b", 0.3),
    "None =": (r"\bNone = ", 0.5),
}
PREPOSITIONS: Final = frozenset(
    {
        "about",
        "above",
        "after",
        "as",
        "at",
        "before",
        "behind",
        "below",
        "beside",
        "between",
        "by",
        "during",
        "for",
        "from",
        "in",
        "into",
        "of",
        "off",
        "on",
        "onto",
        "over",
        "per",
        "since",
        "through",
        "to",
        "under",
        "until",
        "with",
        "within",
        "without",
    }
)
PARTICIPLE: Final = re.compile(
    r"_?(?:(?!(?:NEED|FEED|SEED|SPEED|EMBED)\b)[A-Z]+ED|ASIDE|ALONE|BEGUN|BUILT|DRAWN|FED|FOUND|GIVEN|HELD|HIDDEN|KEPT|KNOWN|LEFT|LOST|MADE|MEANT|PUT|READ"
    r"|SEEN|SENT|SET|SHOWN|SPLIT|TAKEN|TOGETHER|TOLD|TORN|WRITTEN)"
)
# The percentage of each mark of code that a whole room may have.
LIMITS: Final = {"continued": 2.0, "preposition": 2.0, "participle": 1.0}
_DESCRIPTION: Final = re.compile(
    r"(?:^|(?<=[.:] ))\s*((?:`?\w+`?)(?:, `?\w+`?)*): (\w+)", re.MULTILINE
)
# The verbs that a short comment usually has if it is a sentence.
_VERB: Final = re.compile(
    r"\b(?:is|are|was|were|has|have|had|does|do|can|cannot|could|may|must|should|will|would|needs?|takes?|gets?|keeps?"
    r"|costs?|makes?|gives?|reads?|writes?|holds?|stays?|goes|go|comes?|lacks?|knows?|uses?|runs?)\b"
)
_CONSTANT: Final = re.compile(r"_{0,2}[A-Z][A-Z0-9_]+")


@dataclass
class Share:
    """How many of all places have a mark, and the lines of these places."""

    places: int = 0
    marked: list[str] = field(default_factory=list)

    @property
    def percent(self) -> float:
        return 100 * len(self.marked) / max(self.places, 1)

    def add(self, other: Share) -> None:
        self.places += other.places
        self.marked += other.marked


def continued_comments(source: str) -> Share:
    """Comments at the end of an assignment that are neither a sentence nor a unit, among all comments."""
    share = Share()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#:", "#!")):
            continue
        share.places += 1
        text = token.string[1:].strip()
        code = token.line[: token.start[1]].strip()
        is_assignment = re.match(r"[\w.]+(?:: [^=]+)? = ", code) is not None
        if is_assignment and _continues(text):
            share.marked.append(f"{code}  {token.string}")
    return share


def _continues(text: str) -> bool:
    """Whether a comment is a part of a sentence; a unit has a single word."""
    if re.match(r"(?:noqa|type|pragma|fmt|mypy)\b", text):
        return False
    return " " in text and text[0].islower() and _VERB.search(text) is None


def prepositional_descriptions(source: str) -> Share:
    """Descriptions in docstrings, `name: text`, that begin with a preposition, among all descriptions."""
    share = Share()
    for docstring in _docstrings(source):
        for names, word in _DESCRIPTION.findall(docstring):
            if names.endswith("Error"):  # It describes when an exception is raised.
                continue
            share.places += 1
            if word.lower() in PREPOSITIONS:
                share.marked.append(f"{names}: {word} …")
    return share


def _docstrings(source: str) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented):
            yield ast.get_docstring(node) or ""


def participle_constants(source: str) -> Share:
    """Constants of modules and classes that are named by a participle, among all constants."""
    share = Share()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef):
            for name in _assigned(node.body):
                if _CONSTANT.fullmatch(name):
                    share.places += 1
                    if PARTICIPLE.fullmatch(name):
                        share.marked.append(name)
    return share


def _assigned(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id


CODE_MARKS: Final[dict[str, Callable[[str], Share]]] = {
    "continued": continued_comments,
    "preposition": prepositional_descriptions,
    "participle": participle_constants,
}


def words_of_python(source: str) -> str:
    """Docstrings, messages and comments: the string constants that have a space, and what follows a #."""
    constants = (
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)
    )
    texts = [value for value in constants if isinstance(value, str) and " " in value]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [token.string[1:] for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join(texts)


def words_of_markdown(source: str) -> str:
    without_code = re.sub(r"^```.*?^```", "", source, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", without_code)


def read(path: Path) -> str:
    source = path.read_text("utf-8")
    text = words_of_markdown(source) if path.suffix == ".md" else words_of_python(source)
    return re.sub(r"`[^`\n]*`", "", text)


def files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in (".md", ".py"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="files and folders; none = the whole project")
    paths = parser.parse_args().paths
    columns = [*MARKS, *CODE_MARKS]
    print(f"{'':44}{'words':>7}" + "".join(f"{name:>12}" for name in columns))
    for name in paths or DEFAULT:
        files = files_of(Path(name) if paths else ROOT / name)
        texts = {file: read(file) for file in files}
        shares = code_shares(files)
        print(row(name, texts, shares))
        if paths:
            show(texts)
            show_code(shares)


def code_shares(files: list[Path]) -> dict[str, Share]:
    """The share of each mark of code in the Python files among `files`."""
    shares = {name: Share() for name in CODE_MARKS}
    for file in files:
        if file.suffix == ".py":
            source = file.read_text("utf-8")
            for name, count in CODE_MARKS.items():
                shares[name].add(count(source))
    return shares


def row(name: str, texts: dict[Path, str], shares: dict[str, Share]) -> str:
    """A line of the table; an exclamation mark follows each figure above its limit."""
    words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in texts.values())
    cells = f"{name[-43:]:44}{words:7}"
    for pattern, limit in MARKS.values():
        found = sum(len(re.findall(pattern, text, re.IGNORECASE)) for text in texts.values())
        rate = 1000 * found / max(words, 1)
        cells += f"{rate:11.2f}" + ("!" if limit is not None and rate >= limit else " ")
    for mark, share in shares.items():
        cells += f"{share.percent:10.1f}%" + ("!" if share.percent > LIMITS[mark] else " ")
    return cells


def show(texts: dict[Path, str]) -> None:
    """Print the lines that have a mark with a limit."""
    patterns = [pattern for pattern, limit in MARKS.values() if limit is not None]
    limited = re.compile("|".join(patterns), re.IGNORECASE)
    for file, text in texts.items():
        for line in text.splitlines():
            if limited.search(line):
                print(f"  {file}: {line.strip()}")


def show_code(shares: dict[str, Share]) -> None:
    """Print the places that have a mark of code."""
    for name, share in shares.items():
        for line in share.marked:
            print(f"  {name}: {line}")


if __name__ == "__main__":
    main()
