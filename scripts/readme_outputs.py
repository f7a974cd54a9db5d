"""Rewrites the `text` blocks of README.md with the outputs of the `bash` or `python` blocks above them.

    python scripts/readme_outputs.py

Run it, with qsample installed, after a change of the bundled model or of the commands' output. The blocks run in
sequence in a temporary folder; the installation at the beginning of a command is skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(bash|python)\n((?:(?!```).)*)```\n\n```text\n((?:(?!```).)*)```\n", re.DOTALL | re.MULTILINE)
INSTALL = re.compile(r"^python3 -m venv .* && \.venv/bin/(?=qsample )")
SHELL = (
    'set -e; qsample() { "$PYTHON" -c "from qsample.cli import main; main()" "$@"; }; python() { "$PYTHON" "$@"; }; '
)


def main() -> None:
    """Rewrite README.md."""
    page = ROOT / "README.md"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("qsample", "examples"):
            (Path(folder) / name).symlink_to(ROOT / name)
        page.write_text(BLOCK.sub(lambda block: shown(block, Path(folder)), page.read_text("utf-8")), "utf-8")


def shown(block: re.Match[str], folder: Path) -> str:
    """The two blocks, the second with the output of the first."""
    language, code = block[1], block[2]
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-c", SHELL + INSTALL.sub("", code)]
    variables = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"failed with status {done.returncode}:\n{code}")
    output = "".join(f"{line.rstrip()}\n" for line in done.stdout.strip("\n").splitlines())
    return f"```{language}\n{code}```\n\n```text\n{output.replace(folder.as_posix() + '/', '')}```\n"


if __name__ == "__main__":
    main()
