"""A portable package becomes a device package, and a graph a portable package, where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qsample.package.package import read_package
from qsample.runtime import load
from tests.helpers.foreign import unpack

ROOT = Path(__file__).resolve().parents[2]
# None in sys.modules makes an import of that name fail, as if it were not installed.
BLOCKED = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'safetensors', 'huggingface_hub']));"


def python(code: str, *arguments: Path) -> None:
    command = [sys.executable, "-c", BLOCKED + code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
def test_compiling(llama_package: Path, tmp_path: Path) -> None:
    python(
        "from qsample.cli import main; main()",
        *map(
            Path,
            ("compile", llama_package, tmp_path / "device", "--ctx-len", "64", "--weights", "int8"),
        ),
    )
    compilation = read_package(tmp_path / "device").manifest.compilation
    assert compilation.quantization["dtype"] == "int8"
    assert compilation.quantization["divergence"]["agreement"]["value"] > 0.8
    assert (
        compilation.placement["CPUExecutionProvider"]["SkipSimplifiedLayerNormalization"] == 4
    )  # fused, as always


@pytest.mark.ci
def test_writing_a_package(llama_package: Path, tmp_path: Path) -> None:
    """The decode graph up to its logits, as if somebody else had made it, gets its sampler back, token for token."""
    python(
        """
import shutil
from pathlib import Path
import onnx_ir as ir
from qsample.package import package
from qsample.graph.join import cut_at_logits
from qsample.exporters.portable import write_graphs

given, out = map(Path, sys.argv[1:])
source = package.read_package(given)
model = cut_at_logits(ir.load(given / "decoder.onnx"), source.interface)
with package.write_package(out, overwrite=False, required_bytes=0) as writer:
    write_graphs(model, source.interface, source.manifest.token_ids.pad, writer.directory)
    writer.finish(source.manifest)
""",
        llama_package,
        tmp_path / "made",
    )
    settings = {"max_new_tokens": 8, "do_sample": True, "seed": 3}
    models = (load(llama_package), load(tmp_path / "made"))
    first, second = (model.generate([[1, 2, 3]], **settings).token_ids for model in models)
    assert first == second


@pytest.mark.ci
def test_baking_and_compiling_packed_weights(tmp_path: Path) -> None:
    """The logits have to keep their name through every optimisation: the divergence is measured at them."""
    unpack("genai_cpu_int4", tmp_path / "file")
    command = "from qsample.cli import main; main()"
    python(command, *map(Path, ("bake", tmp_path / "file", tmp_path / "baked")))
    python(
        command, *map(Path, ("compile", tmp_path / "baked", tmp_path / "device", "--ctx-len", "64"))
    )
    settings = {"max_new_tokens": 8, "do_sample": False}
    models = (load(tmp_path / "baked"), load(tmp_path / "device"))
    first, second = (model.generate([[1, 17, 40]], **settings).token_ids for model in models)
    assert first == second
