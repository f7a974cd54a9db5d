"""Every kind of decode graph: all that computes is on CUDA, the step is captured and replayed, the tokens are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample import AutoModelForCausalLM, SamplingParams
from qsample.package.package import Package
from qsample.runtime import CausalLM, load
from qsample.runtime.decode.slots import Slots
from tests.cuda import puppet
from tests.cuda.trace import Trace

FAMILIES = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "phi3", "granite"),
    *("mixtral", "gpt_oss", "qwen3_moe", "olmo_hybrid"),
)
RECURRENT = ("olmo_hybrid",)
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "float": {},
    "int4": {"weights": "int4"},
    "int8": {"weights": "int8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
}
ROWS = (None, 1, 4, 32)
# A case of most families, each dtype, quantization and number of rows; the whole product is slow.
SHORT = {
    ("llama", "float16", "float", None),
    ("qwen3", "float16", "int4", 4),
    ("gemma3_text", "bfloat16", "int8", 1),
    ("gpt2", "float16", "int8 cache", 32),
    ("phi3", "bfloat16", "int4", None),
    ("mixtral", "bfloat16", "float", 4),
    ("gpt_oss", "float16", "float", 1),
    ("olmo_hybrid", "float16", "int4", 4),
    ("olmo_hybrid", "bfloat16", "float", None),
    ("qwen3_moe", "float16", "int4", 4),
    ("gemma2", "float16", "float", 4),
}
PROMPTS = [[1, 5, 6, 7, 8], [1, 9, 4], [1, 200, 201, 202, 203, 204, 205, 206], [1, 77]]
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=10),
    SamplingParams(temperature=1.0, max_new_tokens=10, seed=1),
    SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.2, max_new_tokens=10, seed=2
    ),
    SamplingParams(
        temperature=3.0, top_p=0.95, max_new_tokens=10, seed=3
    ),  # beyond the candidates: it is searched
]


def cases() -> list[Any]:
    """Every combination that there is; those outside SHORT are slow."""
    every = product(FAMILIES, ("float16", "bfloat16"), QUANTIZATIONS, ROWS)
    possible = [case for case in every if case[0] not in RECURRENT or case[2] != "int8 cache"]
    assert SHORT.issubset(possible)
    return [
        pytest.param(
            *case, id="-".join(map(str, case)), marks=() if case in SHORT else pytest.mark.slow
        )
        for case in possible
    ]


def compiled(
    portable: Path,
    path: Path,
    dtype: str,
    quantization: str,
    rows: int | None,
    request: pytest.FixtureRequest,
) -> Package:
    if dtype == "bfloat16":
        request.getfixturevalue("without_numbers")
    options = {
        "dtype": dtype,
        "batch_size": rows,
        "ctx_len": 64,
        "max_divergence": 100,
        **QUANTIZATIONS[quantization],
    }
    return (
        AutoModelForCausalLM.from_pretrained(portable)
        .compile(path, provider="cuda", **options)
        .package
    )


def run_slots(model: CausalLM, rows: int) -> None:
    """Prompts in two chunks, the capture of `decode`, replays, another prompt."""
    slots = Slots(model.sessions, rows, model.capacity(64))
    parameters = {
        spec.name: np.array(spec.off, spec.dtype)
        for spec in model.interface.parameters
        if len(spec.axes) == 1
    }
    assert not slots.prepared

    def prompt(row: int) -> None:
        slots.begin(row, np.arange(4, 9), row, parameters)
        slots.prefill(row, np.arange(4, 7), emit=False)
        slots.prefill(row, np.arange(7, 9), emit=True)

    for row in range(rows):
        prompt(row)
    slots.prepare()
    for _ in range(2):
        for _ in range(3):
            slots.decode(wait=False)
        slots.decode()
        prompt(0)


@pytest.mark.parametrize(("family", "dtype", "quantization", "rows"), cases())
def test_captured(
    portable: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    dtype: str,
    quantization: str,
    rows: int | None,
    request: pytest.FixtureRequest,
    trace: Trace,
) -> None:
    package = compiled(portable(family), tmp_path / "cuda", dtype, quantization, rows, request)
    compilation = package.manifest.compilation
    assert compilation is not None
    operators = [name for placed in compilation.placement.values() for name in placed]
    assert not [name for name in operators if name.startswith("Memcpy")]
    if "weights" in QUANTIZATIONS[quantization]:
        assert compilation.quantization is not None
        assert compilation.quantization["matrices"] > 0
        assert compilation.placement[puppet.CUDA]["MatMulNBits"] > 0

    model = load(package.path)
    trace.clear()
    run_slots(model, min(rows or 4, 4))
    assert trace.captures() == 2  # for each side of the buffers
    assert trace.captured_kernels() > 100
    assert not trace.problems()
    assert not trace.captured_reads_of_the_host()
    if dtype == "float16":
        check_tokens(model, PROMPTS[: rows or 4], PARAMS[: rows or 4])


def check_tokens(
    model: CausalLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> None:
    """The same file on the CPU's provider is not captured, and nothing in it is late."""
    before = puppet.COUNTS["replays"]
    got = model.generate(prompts, params)
    assert puppet.COUNTS["replays"] > before
    wanted = load(model.package.path, [puppet.CPU]).generate(prompts, params)
    assert got.token_ids == wanted.token_ids
    assert got.finish_reasons == wanted.finish_reasons
