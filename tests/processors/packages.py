"""The packages of `tests/processors/workload.py`: small random models in every kind of product that compile writes.

    python -m tests.processors.packages FOLDER

A package is made once, on the processor at hand, and runs on all of them: as packages travel.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from qsample import AutoModelForCausalLM
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.package.package import read_package
from tests.conftest import made_once
from tests.helpers.tiny_models import save_checkpoint

# Multiples of 128, so that every size of block divides them.
_SIZES: Final[dict[str, Any]] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
_MIXTURE: Final = {
    **_SIZES,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
_INT4: Final = {"weights": "int4"}
# Name → model type, sizes, options of compile.
PACKAGES: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "float32": ("llama", _SIZES, {}),
    "int8": ("llama", _SIZES, {"weights": "int8"}),
    "int8-128": ("llama", _SIZES, {"weights": "int8", "block_size": 128}),
    "int4": ("llama", _SIZES, _INT4),
    "int4-128": ("llama", _SIZES, {**_INT4, "block_size": 128}),
    "int4-guesses": (
        "llama",
        _SIZES,
        {**_INT4, "kv_cache_dtype": "int8", "num_speculative_tokens": 4},
    ),
    "int4-experts": ("qwen3_moe", _MIXTURE, _INT4),
}
CTX_LEN: Final = 160
_ANY: Final = 1e6  # nats: what 4 bits do to random weights is no matter


def make_packages(folder: Path, *names: str) -> list[Path]:
    """The packages `names`, or all, in `folder`; those that are there already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or PACKAGES:
        model_type, sizes, options = PACKAGES[name]
        given = CompileOptions(ctx_len=CTX_LEN, max_divergence=_ANY, **options)

        def export(path: Path, model_type: str = model_type, sizes: dict[str, Any] = sizes) -> None:
            checkpoint = save_checkpoint(folder / f"{model_type}-checkpoint", model_type, **sizes)
            # A log-probability shows a last bit that a token hides.
            AutoModelForCausalLM.from_pretrained(checkpoint, logprobs=True, logit_bias=True).export(
                path
            )

        def build(path: Path, model_type: str = model_type, given: CompileOptions = given) -> None:
            portable = made_once(folder / f"{model_type}-portable", export)
            compile_package(read_package(portable), path, given)

        made_once(folder / name, build)
    return [folder / name for name in names or PACKAGES]


if __name__ == "__main__":
    make_packages(Path(sys.argv[1]))
