#!/usr/bin/env python3
"""Counts the marks of translated English in documents, docstrings, comments and messages, per 1,000 words.

    python scripts/prose.py                  README, CONTRIBUTING, CHANGELOG, docs and qsample
    python scripts/prose.py docs/bake.md     other files or folders, with the sentences to look at

A count is a hint, and its limit is for a whole room: "where" is right for a place, "one" for a number, "its own" for a
contrast. Native texts of the same kind have a fifth of most limits.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from pathlib import Path

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
    return re.sub(
        r"\]\([^)]*\)", "]", re.sub(r"^```.*?^```", "", source, flags=re.DOTALL | re.MULTILINE)
    )


def read(path: Path) -> str:
    source = path.read_text("utf-8")
    text = words_of_markdown(source) if path.suffix == ".md" else words_of_python(source)
    return re.sub(r"`[^`\n]*`", "", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", help="files and folders; none = the whole project")
    paths = parser.parse_args().paths
    print(f"{'':44}{'words':>7}" + "".join(f"{name:>10}" for name in MARKS))
    for name in paths or DEFAULT:
        path = Path(name) if paths else ROOT / name
        files = (
            sorted(file for file in path.rglob("*") if file.suffix in (".md", ".py"))
            if path.is_dir()
            else [path]
        )
        texts = {file: read(file) for file in files}
        words = sum(len(re.findall(r"[A-Za-z']+", text)) for text in texts.values())
        row = f"{name[-43:]:44}{words:7}"
        for pattern, limit in MARKS.values():
            found = sum(len(re.findall(pattern, text, re.IGNORECASE)) for text in texts.values())
            share = 1000 * found / max(words, 1)
            row += f"{share:9.2f}" + ("!" if limit is not None and share >= limit else " ")
        print(row)
        if paths:
            show(texts)


def show(texts: dict[Path, str]) -> None:
    """Print the lines that have a mark with a limit."""
    limited = re.compile(
        "|".join(pattern for pattern, limit in MARKS.values() if limit is not None), re.IGNORECASE
    )
    for file, text in texts.items():
        for line in text.splitlines():
            if limited.search(line):
                print(f"  {file}: {line.strip()}")


if __name__ == "__main__":
    main()
