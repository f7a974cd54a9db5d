"""Runs a command with an ONNX Runtime that takes the processor at hand for a lesser one, at full speed.

    python -m tests.processors.as_processor FOLDER avx2 python -m pytest tests/runtime

In FOLDER it keeps a copy of the environment's onnxruntime whose CPUID instructions are breakpoints, and a library that
answers these (cpuid.c): ONNX Runtime then takes the kernels of that processor. Needs x86-64 Linux, gcc and binutils. It
can take features away only, and from ONNX Runtime only.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
# Class → the flag that Linux shows on it, and on all those before; the best first. cpuid.c has the same levels.
CLASSES: Final = {
    "avx512-vnni": "avx512_vnni",
    "avx512": "avx512bw",
    "avx2": "avx2",
    "avx": "avx",
    "sse": "sse2",
}
_CPUID: Final = b"\x0f\xa2"
_BREAKPOINT: Final = b"\xcc\x90"  # int3, nop


def class_at_hand() -> str:
    """The class of this processor, or its architecture if that is not x86-64."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return platform.machine()
    known = Path("/proc/cpuinfo")
    flags = known.read_text("utf-8").split() if known.exists() else []
    return next((name for name, flag in CLASSES.items() if flag in flags), platform.machine())


def lesser_classes() -> list[str]:
    """Those that can be shown here; none if the tools are missing."""
    tools = all(shutil.which(tool) for tool in ("gcc", "objdump", "readelf"))
    names = list(CLASSES)
    here = class_at_hand()
    return (
        names[names.index(here) + 1 :]
        if here in names and sys.platform == "linux" and tools
        else []
    )


def environment(folder: Path, name: str) -> dict[str, str]:
    """The variables of a process that takes the processor for one of the class `name`."""
    level = list(reversed(CLASSES)).index(name)
    path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "LD_PRELOAD": str(folder / "cpuid.so"),
        "QSAMPLE_CPUID": str(level),
    }


def build(folder: Path) -> None:
    """Make what `environment` names; the copy of onnxruntime only if its version is another than the environment's."""
    spec = importlib.util.find_spec("onnxruntime")  # found, not imported: the copy is another
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent
    library = next(source.glob("capi/onnxruntime_pybind11_state*.so"))
    stamp = f"{library.stat().st_size} {library.stat().st_mtime_ns}"
    made = folder / "stamp"
    if not made.exists() or made.read_text("utf-8") != stamp:
        shutil.rmtree(folder, ignore_errors=True)
        copy = folder / "site" / "onnxruntime"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        _replace(copy / library.relative_to(source))
        made.write_text(stamp, "utf-8")
    command = [
        "gcc",
        "-O2",
        "-Wall",
        "-Wextra",
        "-shared",
        "-fPIC",
        "-o",
        folder / "cpuid.so",
        HERE / "cpuid.c",
    ]
    subprocess.run(command, check=True)


def _replace(library: Path) -> None:
    """Replace each CPUID in the code of `library`, in place. The same bytes are in addresses and constants, too: only
    the disassembly of all code says which are instructions."""
    sections = _output("readelf", "-SW", library)
    found = re.search(r" \.text +PROGBITS +([0-9a-f]+) +([0-9a-f]+) ", sections)
    assert found is not None, sections
    address, offset = (int(number, 16) for number in found.groups())
    code = bytearray(library.read_bytes())
    places = re.findall(
        r"^ *([0-9a-f]+):\t *cpuid",
        _output("objdump", "-dj.text", "--no-show-raw-insn", library),
        re.M,
    )
    assert places, f"{library} has no CPUID"
    for place in places:
        start = int(place, 16) - address + offset
        assert code[start : start + 2] == _CPUID
        code[start : start + 2] = _BREAKPOINT
    library.write_bytes(code)


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    folder, name, *command = sys.argv[1:]
    build(Path(folder).absolute())
    os.execvpe(command[0], command, environment(Path(folder).absolute(), name))
