"""Builds the stubs of CUDA's libraries for the onnxruntime-gpu of the Python that runs this.

    python tests/cuda/stubs/build.py --headers HEADERS      # once
    python tests/cuda/stubs/build.py FOLDER HEADERS

Needs gcc and binutils. The first line downloads CUDA's headers, NVIDIA's wheels nvidia-cuda-runtime and nvidia-cuda-crt
(3 MB), into HEADERS.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Libraries that the provider opens when it needs them: soname → prefix of the names that it looks up.
OPENED = {"libcudnn.so.9": "cudnn", "libcufft.so.12": "cufft"}
# What the provider for TensorRT needs, which ONNX Runtime loads to list its kernels; its symbols carry no version.
TENSORRT = {
    "libnvonnxparser.so.10": r"createNvOnnxParser\w*",
    "libnvinfer.so.10": r"createInfer\w+|get(Plugin|Infer)\w+",
}


def text(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def download_headers(folder: Path) -> None:
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-crt"):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            folder,
            f"{name}>=13.0,<13.1",
        ]
        done = subprocess.run([str(part) for part in command], check=False)
        if done.returncode:
            raise SystemExit(f"pip cannot download {name}")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if "/include/" in name])
        wheel.unlink()


def imported_symbols() -> dict[str, set[str]]:
    """soname → the symbols that ONNX Runtime's providers want of it."""
    spec = importlib.util.find_spec(
        "onnxruntime"
    )  # found, not imported: importing may load a plugin
    if spec is None or spec.origin is None:
        raise SystemExit("this Python has no onnxruntime; install onnxruntime-gpu")
    capi = Path(spec.origin).parent / "capi"
    provider = capi / "libonnxruntime_providers_cuda.so"
    if not provider.exists():
        raise SystemExit(
            f"{capi} has no {provider.name}; install onnxruntime-gpu in place of onnxruntime"
        )
    needed = [
        name
        for name in re.findall(r"NEEDED.*\[(.*)\]", text("readelf", "-d", provider))
        if "cu" in name[3:5]
    ]
    symbols: dict[str, set[str]] = {name: set() for name in (*needed, *OPENED, *TENSORRT)}
    for library in (provider, capi / "libonnxruntime_providers_tensorrt.so"):
        for line in text(
            "nm", "-D", "--undefined-only", "--with-symbol-versions", library
        ).splitlines():
            name, _, version = line.split()[-1].partition("@")
            version = version.lstrip("@")
            if version in symbols:
                symbols[version].add(name)
            elif not version and re.match(r"cu[A-Z]", name):
                symbols["libcuda.so.1"].add(name)
            elif not version:
                for soname, pattern in TENSORRT.items():
                    if re.fullmatch(pattern, name):
                        symbols[soname].add(name)
    strings = set(text("strings", "-n", "5", provider).split())
    for soname, prefix in OPENED.items():
        symbols[soname] |= {name for name in strings if re.fullmatch(prefix + r"[A-Z]\w+", name)}
    return symbols


def build(folder: Path, include: Path) -> None:
    source = (HERE / "stubs.c").read_text()
    written = set(re.findall(r"^OUT\([^)]*\) (\w+)\(", source, re.MULTILINE))
    written |= {f"cudnnCreate{what}Descriptor" for what in re.findall(r"CREATE\((\w+)\)", source)}
    for soname, names in imported_symbols().items():
        short = soname[3:].partition(".so")[0]
        # In a file of their own: the headers declare the same names with arguments.
        rest = "".join(
            f'__attribute__((visibility("default"))) long {name}(void) {{ stub_note("{name}"); return 0; }}\n'
            for name in sorted(names - written)
        )
        code, script = folder / f"{short}.c", folder / f"{short}.map"
        code.write_text("void stub_note(const char *);\n" + rest)
        script.write_text(f"{soname} {{ global: *; }};\n")
        command = [
            "gcc",
            "-O1",
            "-w",
            "-fPIC",
            "-shared",
            "-fvisibility=hidden",
            f"-DLIB_{short}",
            f"-I{include}",
        ]
        command += [
            str(HERE / "stubs.c"),
            str(code),
            "-o",
            str(folder / soname),
            f"-Wl,-soname,{soname}",
        ]
        command += ["-lpthread", "-ldl"]
        if short != "cuda" and soname not in TENSORRT:  # whose symbols carry no version
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def main() -> None:
    if sys.argv[1] == "--headers":
        download_headers(Path(sys.argv[2]).resolve())
        return
    folder, headers = (Path(name).resolve() for name in sys.argv[1:])
    folder.mkdir(parents=True, exist_ok=True)
    build(folder, headers / "nvidia" / "cu13" / "include")


if __name__ == "__main__":
    main()
