"""Every kind of decode graph: all that computes is on CUDA, and the step is captured and replayed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.runtime import load
from qsample.runtime.decode.slots import Slots
from tests.cuda.conftest import CUDA, compiled, started
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
# The optional inputs and outputs of the sampler.
FEATURES: dict[str, Any] = {"logit_bias": True, "allowed_tokens": True, "logprobs": True, "top_logprobs": 3}
FEATURES["return_pdfs"] = True


def cases() -> list[Any]:
    """Every combination that there is; those outside SHORT are slow."""
    every = product(FAMILIES, ("float16", "bfloat16"), QUANTIZATIONS, ROWS)
    possible = [case for case in every if case[0] not in RECURRENT or case[2] != "int8 cache"]
    assert SHORT.issubset(possible)
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=() if case in SHORT else pytest.mark.slow)
        for case in possible
    ]


def check_captured(package: Path, rows: int, trace: Trace, **given: Any) -> int:
    """The kernels of a step, which is captured for each side of the buffers; replays follow, and another prompt."""
    model = load(package)
    trace.clear()
    slots = Slots(model.sessions, rows, model.capacity(64))
    assert not slots.prepared
    started(slots, model.interface, rows, **given)
    for _ in range(8):
        slots.decode(wait=False)
    slots.decode()
    started(slots, model.interface, 1, **given)
    assert trace.captures() == 2
    assert not trace.problems()
    assert not trace.captured_reads_of_the_host()
    return trace.captured_kernels() // 2


@pytest.mark.parametrize(("family", "dtype", "quantization", "rows"), cases())
def test_captured(
    portable: Callable[..., Path],
    tmp_path: Path,
    family: str,
    dtype: str,
    quantization: str,
    rows: int | None,
    trace: Trace,
) -> None:
    options = {"dtype": dtype, "batch_size": rows, **QUANTIZATIONS[quantization]}
    package = compiled(portable(family), tmp_path / "cuda", **options)
    compilation = package.manifest.compilation
    assert compilation is not None
    operators = [name for placed in compilation.placement.values() for name in placed]
    assert not [name for name in operators if name.startswith("Memcpy")]
    if "weights" in QUANTIZATIONS[quantization]:
        assert compilation.quantization is not None
        assert compilation.quantization["matrices"] > 0
        assert compilation.placement[CUDA]["MatMulNBits"] > 0
    assert check_captured(package.path, min(rows or 4, 4), trace) > 50


def test_every_feature_is_captured(portable: Callable[..., Path], tmp_path: Path, trace: Trace) -> None:
    package = compiled(portable("llama", **FEATURES), tmp_path / "cuda")
    compilation = package.manifest.compilation
    assert compilation is not None
    assert not any(name.startswith("Memcpy") for placed in compilation.placement.values() for name in placed)
    check_captured(package.path, 3, trace)


def test_kernels_of_a_search_are_launched_if_rows_are_listed(
    portable: Callable[..., Path], tmp_path: Path, trace: Trace
) -> None:
    """docs/devices.md gives this count; over empty tensors CUDA would refuse a launch."""
    package = compiled(portable(), tmp_path / "cuda").path
    plain = check_captured(package, 2, trace, temperature=3.0)
    searched = check_captured(package, 2, trace, temperature=3.0, top_p=0.95)
    assert 140 < searched - plain < 180


def test_saved_recurrent_states_stay_on_the_device(portable: Callable[..., Path], tmp_path: Path, trace: Trace) -> None:
    model = load(compiled(portable("olmo_hybrid"), tmp_path / "cuda").path)
    slots = Slots(model.sessions, 2, 64, saved_states=2)
    trace.clear()
    slots.saved.save(0, 1)
    slots.saved.restore(1, 1)
    assert (trace.bytes_from_host(), trace.bytes_to_host()) == (0, 0)


def test_only_new_state_crosses_the_bus(portable: Callable[..., Path], tmp_path: Path, trace: Trace) -> None:
    """Of an admitted row its own state, of a step nothing, of a read the new tokens."""
    rows, context, prompt = 16, 64, np.arange(4, 9)
    model = load(compiled(portable(), tmp_path / "cuda", ctx_len=context).path)
    slots = started(Slots(model.sessions, rows, context), model.interface, rows)
    specs = {spec.name: spec for spec in model.interface.parameters}
    parameters = {name: np.array(spec.off, spec.dtype) for name, spec in specs.items() if len(spec.axes) == 1}
    parameters["stop_ids"] = np.array([1, 2], np.int32)
    for _ in range(4):  # all of their graphs are bound, on both sides
        slots.decode()
    slots.read(newest=4)

    trace.clear()
    slots.stop(3)
    slots.begin(3, prompt, 99, parameters)
    own = 4 * (2 * context + 1)  # noise, tokens, length
    # Off, then the given values; status.
    own += sum(np.asarray(values).nbytes for values in parameters.values()) * 2 + 4
    assert own <= trace.bytes_from_host() <= own + 32
    assert trace.bytes_to_host() == 0
    trace.clear()
    slots.prefill(3, prompt, emit=True)
    assert trace.bytes_from_host() <= 8 * len(prompt) + 64  # the tokens' ids, how many, and shapes
    assert trace.bytes_to_host() <= 64

    trace.clear()
    for _ in range(3):
        slots.decode(wait=False)
    slots.decode()
    assert (trace.bytes_from_host(), trace.bytes_to_host()) == (0, 0)
    slots.read(newest=4)
    assert trace.bytes_from_host() == 0
    assert trace.bytes_to_host() == 4 * rows * (2 + 4)  # status, length, four tokens
