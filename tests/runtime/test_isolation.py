"""The runtime in an environment that has onnxruntime, numpy and tokenizers only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import qsample
from qsample.package.package import Package

ROOT = Path(qsample.__file__).parents[1]
ABSENT = (
    "torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "huggingface_hub", "jinja2", "rich",
    "typer", "click", "yaml", "requests", "ml_dtypes",
)  # fmt: skip
BLOCKER = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError("blocked: " + name, name=name)
sys.meta_path.insert(0, Blocker())
sys.path.insert(0, {str(ROOT)!r})
"""


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + program],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    ).stdout


def test_generation_without_everything_else(fake: Callable[..., Package]) -> None:
    for package in (fake(), fake(sampler=False)):
        output = run(
            "import qsample.runtime as r\n"
            f"model = r.load({str(package.path)!r})\n"
            "streamer = r.TextStreamer(model.tokenizer)\n"
            "output = model.generate('hello', r.SamplingParams(max_new_tokens=5), seed=1, streamer=streamer)\n"
            "print(len(output.token_ids[0]))\n"
            "output = model.generate(input_ids=[[5, 6]], attention_mask=[[1, 1]], pad_token_id=0, max_time=1e6,\n"
            "    stopping_criteria=lambda ids, _: ids.size > 4, generation_config={'max_new_tokens': 9})\n"
            "print(len(output.token_ids[0]), model.config.pad_token_id, model.eval().device)\n"
            f"print(sorted(set({ABSENT!r}) & set(sys.modules)))\n"
        )
        assert output.splitlines()[-3:] == ["5", "3 None cpu", "[]"]
        assert output.startswith("hello")


def test_the_blocker_blocks() -> None:
    assert (
        run("try:\n    import torch\nexcept ImportError as error:\n    print(error)").strip()
        == "blocked: torch"
    )


def test_importing_the_runtime_loads_nothing_heavy_and_a_module_of_it_not_the_others() -> None:
    program = (
        f"import sys, qsample.runtime.decode.inputs; print(sorted(set({ABSENT!r}) & set(sys.modules)))\n"
        "print(sorted(name for name in sys.modules if name.startswith('qsample.runtime.')))\n"
        "import qsample.runtime as r; print(set(r.__all__) <= set(dir(r)), all(getattr(r, one) for one in r.__all__))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.splitlines() == [
        "[]",
        "['qsample.runtime.decode', 'qsample.runtime.decode.inputs', 'qsample.runtime.decode.replay_rows']",
        "True True",
    ]
