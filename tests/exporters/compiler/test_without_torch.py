"""A portable package becomes a device package, and a graph a portable package, where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from qsample.runtime import load

ROOT = Path(__file__).resolve().parents[3]
# None in sys.modules makes an import of that name fail, as if it were not installed.
BLOCKED = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'safetensors', 'huggingface_hub']));"


def python(code: str, *arguments: Path) -> None:
    command = [sys.executable, "-c", BLOCKED + code, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_compiling(llama_package: Path, tmp_path: Path) -> None:
    python(
        "from qsample.cli import main; main()",
        *map(Path, ("compile", llama_package, tmp_path / "device", "--ctx-len", "64", "--weights", "int8")),
    )
    portable, device = load(llama_package), load(tmp_path / "device")
    tokens = [model.generate([[1, 2, 3]], max_new_tokens=4, do_sample=False).token_ids for model in (portable, device)]
    assert np.shape(tokens[0]) == np.shape(tokens[1])


def test_writing_a_package(llama_package: Path, tmp_path: Path) -> None:
    """The decode graph up to its logits, as if somebody else had made it, gets its sampler back, token for token."""
    python(
        """
import shutil
from pathlib import Path
import onnx_ir as ir
from qsample import package
from qsample.exporters.graph.join import cut_at_logits
from qsample.exporters.parity import Parity
from qsample.exporters.portable import portable_manifest, write_graphs

given, out = map(Path, sys.argv[1:])
source = package.read_package(given)
model = cut_at_logits(ir.load(given / "decoder.onnx"), source.interface)
with package.write_package(out, overwrite=False, required_bytes=0) as writer:
    write_graphs(model, source.interface, source.manifest.token_ids.pad, writer.directory)
    parity = Parity(**source.manifest.parity)
    made = portable_manifest(
        source.interface, source.manifest.source, source.manifest.token_ids, parity, max_position_embeddings=128
    )
    writer.finish(made)
assert "torch" not in made.versions
""",
        llama_package,
        tmp_path / "made",
    )
    settings = {"max_new_tokens": 8, "do_sample": True, "seed": 3}
    models = (load(llama_package), load(tmp_path / "made"))
    first, second = (model.generate([[1, 2, 3]], **settings).token_ids for model in models)
    assert first == second
