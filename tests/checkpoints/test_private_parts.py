"""The list of private parts of other libraries is complete; a missing part is an error that names the versions."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from qsample import AutoModelForCausalLM
from qsample.checkpoints.private_parts import PARTS, RANGES, check_private_parts
from qsample.errors import QsampleError

ROOT = Path(__file__).resolve().parent.parent.parent
PUBLIC = {
    "transformers",
    "transformers.exporters.onnxruntime_fusions",
    "onnxscript",
    "onnxscript.rewriter",
}


def is_private(module: str) -> bool:
    """torch documents its submodules; transformers and onnxscript promise nothing of theirs."""
    library = module.partition(".")[0]
    return "._" in module if library == "torch" else library in RANGES and module not in PUBLIC


def test_every_import_of_a_part_that_is_not_public_is_in_the_list() -> None:
    used: dict[str, set[str]] = {}
    for path in (ROOT / "qsample").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                used.setdefault(node.module, set()).update(alias.name for alias in node.names)
            elif isinstance(node, ast.Import):
                used.update({alias.name: set() for alias in node.names})
    private = {name: parts for name, parts in used.items() if is_private(name)}
    assert len(private) > 10
    for module, parts in private.items():
        assert parts <= {name.partition(".")[0] for name in PARTS.get(module, "").split()}, (
            f"{module}: list it in PARTS"
        )
        assert module in PARTS


def test_the_ranges_are_those_of_the_installation() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]["export"]
    stated = dict(re.fullmatch(r"([\w-]+)(.*)", line).groups() for line in extra)  # type: ignore[union-attr]
    assert {name: stated[name] for name in RANGES} == RANGES


@pytest.mark.parametrize(
    "part", ["transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS", "torch.onnx.ops.symbolic"]
)
def test_a_part_that_a_version_lacks(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], Path], tmp_path: Path, part: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    monkeypatch.delattr(part)
    library = part.partition(".")[0]
    with pytest.raises(
        QsampleError, match=rf"{library} \d.*{part.rpartition('.')[2]}.*{library}>=.*pip install"
    ) as error:
        model.export(tmp_path / "package")
    assert RANGES[library] in str(error.value)
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize("library", ["transformers", "torch", "onnxscript"])
def test_a_library_that_is_missing_is_no_wrong_version(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=library):
        check_private_parts()
