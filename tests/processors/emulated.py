"""QEMU's user mode: which models of processors it shows here, and the command that runs Python on one.

A folder, FOLDER below, may hold what the system lacks; `scripts/check_processors --fetch` fills it: FOLDER/qemu with
QEMU's programs, FOLDER/arm/system with a Python for Arm, FOLDER/arm/site with its packages.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
# Model → architecture. QEMU has no AVX-512.
MODELS: Final = {
    "Nehalem": "x86_64",
    "SandyBridge": "x86_64",
    "Haswell": "x86_64",
    "EPYC-Milan": "x86_64",
    "cortex-a53": "aarch64",
    "neoverse-n1": "aarch64",
    "max": "aarch64",
}
OLDEST: Final = (8, 1)  # before, ONNX Runtime for Arm crashes when it starts


def qemu(architecture: str, folder: Path) -> str | None:
    """The program for an architecture; None if there is none, or an old one."""
    own = folder / "qemu" / "usr" / "bin" / f"qemu-{architecture}"
    path = str(own) if own.exists() else shutil.which(own.name)
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    numbers = re.search(r"version (\d+)\.(\d+)", done.stdout)
    return path if numbers and tuple(map(int, numbers.groups())) >= OLDEST else None


def python(model: str, folder: Path) -> tuple[list[str], dict[str, str]] | None:
    """The start of the command that runs Python on a model, and its environment; None if something is missing."""
    architecture = MODELS[model]
    program = qemu(architecture, folder)
    if program is None:
        return None
    if architecture == platform.machine():
        return [program, "-cpu", model, sys.executable], {**os.environ, "PYTHONPATH": str(ROOT)}
    system, site = folder / "arm" / "system", folder / "arm" / "site"
    interpreter = next(system.glob("usr/bin/python3.*"), None)
    if architecture != "aarch64" or interpreter is None:
        return None
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    return [program, "-cpu", model, "-L", str(system), str(interpreter)], variables


if __name__ == "__main__":
    missing = [model for model in MODELS if python(model, Path(sys.argv[1])) is None]
    if missing:
        least = ".".join(map(str, OLDEST))
        print(
            f"check_processors: {', '.join(missing)} cannot be shown: there is no QEMU {least} or newer, or no Python "
            "for them; --fetch gets both",
            file=sys.stderr,
        )
    sys.exit(bool(missing))
