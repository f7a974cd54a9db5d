"""Runs the programs and commands of README.md and docs/, and compares what they print with the block below.

    python scripts/pages.py      # rewrites these blocks in README.md, which needs no files that a reader has

Run it, with qsample installed, after a change of the bundled model or of the commands' output; all pages are run by
tests/scripts/test_pages.py. The blocks of a page run in sequence in a folder, in which `qsample` and `examples` are
those of the checkout. Installations (pip, npm, python3 -m venv) are skipped. `qsample serve` goes on in the background
until the page ends or serves again, on a free port in place of 8000. Comments may stand above a block:

    <!-- not run: it needs a GPU -->
    <!-- setup: prompt = "In the beginning" -->      what the reader of a program has; `continues` is the block before
    <!-- figures: they depend on the processor -->  its numbers are not compared
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(
    r"(?:<!-- (?P<kind>not run|setup|figures): (?P<note>.*?) -->\n\n?)?"
    r"^```(?P<language>bash|python)\n(?P<code>.*?)^```\n(?:\n```(?P<form>text|json)\n(?P<shown>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
_INSTALL = re.compile(r"(\S*pip (un)?install|npm|python3 -m venv) ")
_WRITES = re.compile(
    r'qsample (?:export|compile|bake) \S+ ([\w-]+)|qsample bundle ([\w-]+)|\.(?:export|compile)\(\s*"([\w-]+)"'
    r'|\bbake\([^,\n]+, "([\w-]+)"'
)
_SHELL = """set -eo pipefail
python() { "$PYTHON" "$@"; }
qsample() {
    [ "$1" = serve ] || { "$PYTHON" -c 'from qsample.cli import main; main()' "$@"; return; }
    while [ -e server ] && kill "$(cat server)" 2>/dev/null; do sleep 0.1; done
    rm -f server.log
    "$PYTHON" -c 'from qsample.cli import main; main()' "$@" --port "$PORT" > server.log 2>&1 &
    echo $! > server
    until grep -qs ^Serving server.log; do kill -0 $! 2>/dev/null || { cat server.log >&2; return 1; }; sleep 0.1; done
}
"""
_NUMBER = re.compile(r"\b(?:[0-9a-f]{32,}|\d[\d.,]*(?:e[+-]?\d+)?)\b")
_SECONDS = 600
_CHANGING = ("id", "created", "request_id")  # of answers of the server


@dataclass(frozen=True, slots=True)
class Block:
    """A program (language: bash or python). form: of the output that the page shows, text or json; None for none. line:
    of the page. reason: why it does not run; "" if it does. figures: whether numbers are compared, too."""

    line: int
    language: str
    code: str
    form: str | None
    shown: str
    reason: str
    figures: bool


def blocks(page: str) -> list[Block]:
    """The blocks of a page, without installations, programs with what the reader has in front."""
    found: list[Block] = []
    before = ""
    for match in _BLOCK.finditer(page):
        code, setup = match["code"], match["note"] if match["kind"] == "setup" else ""
        if match["language"] == "bash":
            code = "".join(
                f"{line}\n" for line in map(_without_installation, code.splitlines()) if line
            )
        elif setup:
            code = f"{before if setup == 'continues' else setup}\n{code}"
        reason = (
            match["note"] if match["kind"] == "not run" else "" if code.strip() else "it installs"
        )
        line = page.count("\n", 0, match.start("language")) + 1
        shown, figures = match["shown"] or "", match["kind"] != "figures"
        found.append(Block(line, match["language"], code, match["form"], shown, reason, figures))
        before = code if match["language"] == "python" else before
    return found


def _without_installation(line: str) -> str:
    parts = [part for part in line.split(" && ") if not _INSTALL.match(part)]
    return " && ".join(parts).replace(".venv/bin/", "")


class Folder:
    """A folder in which the blocks of a page run; use it as a context. given: entries to link into it."""

    def __init__(self, path: Path, given: Path | None = None) -> None:
        self._path = path
        for entry in (
            ROOT / "qsample",
            ROOT / "examples",
            *(given.iterdir() if given is not None else ()),
        ):
            (path / entry.name).symlink_to(entry)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]

    def run(self, block: Block) -> str:
        """What a block prints; RuntimeError if it fails."""
        for names in _WRITES.findall(
            block.code
        ):  # it makes anew what the block before made, or what is given
            written = self._path / next(filter(None, names))
            if written.is_symlink():
                written.unlink()
            else:
                shutil.rmtree(written, ignore_errors=True)
        code = block.code.replace("localhost:8000", f"localhost:{self._port}")
        command = (
            [sys.executable, "-c", code]
            if block.language == "python"
            else ["bash", "-c", _SHELL + code]
        )
        variables = {
            "PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "100",
            "HF_HUB_OFFLINE": "1",
        }
        variables |= {"PORT": str(self._port), "QSAMPLE_CACHE": str(self._path / "cache")}
        done = subprocess.run(
            command,
            cwd=self._path,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        if done.returncode:
            raise RuntimeError(
                f"line {block.line} failed with status {done.returncode}:\n{code}\n{done.stderr[-4000:]}"
            )
        output = "".join(f"{line.rstrip()}\n" for line in done.stdout.strip("\n").splitlines())
        return output.replace(f"{self._path.as_posix()}/", "")

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):
            os.kill(int((self._path / "server").read_text()), signal.SIGTERM)


def is_as_shown(block: Block, output: str) -> bool:
    """Whether a page shows this output; JSON without the fields that change with each answer."""
    if not block.figures:
        return _NUMBER.sub("#", output).split() == _NUMBER.sub("#", block.shown).split()
    if block.form != "json":
        return block.form is None or output == block.shown
    answers = [
        {name: value for name, value in json.loads(text).items() if name not in _CHANGING}
        for text in (output, block.shown)
    ]
    return answers[0] == answers[1]


def main() -> None:
    """Rewrite README.md."""
    page = ROOT / "README.md"
    text = page.read_text("utf-8")
    with tempfile.TemporaryDirectory() as path, Folder(Path(path)) as folder:
        for block in blocks(text):
            if (
                not block.reason
                and (output := folder.run(block))
                and not is_as_shown(block, output)
            ):
                text = text.replace(
                    f"```{block.form}\n{block.shown}```", f"```{block.form}\n{output}```"
                )
    page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
