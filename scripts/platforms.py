"""Resolves every extra to wheels for each system and Python, and writes the table of docs/platforms.md.

    python scripts/platforms.py --uv PATH    some minutes; downloads metadata, no wheels

Nothing is installed: the table tells whether there is a set of wheels that fit each other. uv resolves for any system
(`pip install uv`).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "platforms.md"
BEGIN, END = "<!-- written by scripts/platforms.py -->\n", "<!-- end -->\n"
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
SYSTEMS: Final = {  # heading → uv's name
    "Linux x86-64": "x86_64-manylinux_2_31",
    "Linux Arm": "aarch64-manylinux_2_31",
    "Windows x86-64": "x86_64-pc-windows-msvc",
    "Windows Arm": "aarch64-pc-windows-msvc",
    "macOS 14 Arm": "aarch64-apple-darwin",
}
EXTRAS: Final = (
    "cpu",
    "cpu serve",
    "cpu export",
    "cpu ray",
    "cpu export test",
    "gpu",
    "cpu openvino",
    "cpu webgpu",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--uv", default="uv", help="the program uv")
    uv = parser.parse_args().uv
    cells = list(product(EXTRAS, SYSTEMS.values(), PYTHONS))
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(cells, pool.map(lambda cell: missing(uv, *cell), cells), strict=True))
    lines = ["| extras | " + " | ".join(SYSTEMS) + " |", "| --- " * (len(SYSTEMS) + 1) + "|"]
    for extras in EXTRAS:
        row = [
            shown({python: found[extras, system, python] for python in PYTHONS})
            for system in SYSTEMS.values()
        ]
        lines.append(f"| `{','.join(extras.split())}` | " + " | ".join(row) + " |")
    print(*lines, sep="\n")
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(
        "".join([before, BEGIN, "\n".join(lines), "\n", END, after]), encoding="utf-8", newline="\n"
    )


def missing(uv: str, extras: str, system: str, python: str) -> str:
    """The package of `extras` that has no wheel for `system` and `python`; "" if all have one."""
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--only-binary",
        ":all:",
        "--python-platform",
        system,
    ]
    command += [
        "--python-version",
        python,
        *(f"--extra={name}" for name in extras.split()),
        "pyproject.toml",
    ]
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0", "UV_PYTHON_DOWNLOADS": "never"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    text = " ".join(done.stderr.split())
    # uv explains the conflict; the package without wheels has "no wheels with a matching … tag" or "no usable wheels".
    named = re.search(
        r"([\w.-]+)(?:\[[\w,]+\])?(?:[<>=!~,]+[\w.]+)* ha(?:s|ve) no (?:usable )?wheels", text
    )
    if named is None:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return named[1]


def shown(results: dict[str, str]) -> str:
    """A cell: the Pythons that have every wheel, and what the others lack."""
    have = [python for python, lacks in results.items() if not lacks]
    lacks = {
        name: [python for python in results if results[python] == name]
        for name in results.values()
        if name
    }
    parts = [f"no {name} for {span(pythons)}" for name, pythons in lacks.items()]
    return "; ".join([span(have), *parts] if have else [f"no {name}" for name in lacks])


def span(pythons: list[str]) -> str:
    return pythons[0] if len(pythons) == 1 else f"{pythons[0]} to {pythons[-1]}"


if __name__ == "__main__":
    main()
