"""CompileOptions: what it refuses by itself, and how fields replace others."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

import qsample
from qsample import CompileOptions
from qsample.errors import CompileError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provider": None}, "provider is None; give the name of a compile target"),
        ({"batch_size": 0}, "batch_size is 0; give 1 to 2147483647, or None"),
        ({"batch_size": 2**31}, "batch_size is 2147483648; give 1 to 2147483647, or None"),
        ({"batch_size": "4"}, "batch_size is '4'; give 1 to"),
        ({"batch_size": True}, "batch_size is True"),
        ({"ctx_len": 1}, "ctx_len is 1; give 2 to the model's max_position_embeddings"),
        ({"ctx_len": 2.5}, "ctx_len is 2.5"),
        ({"ctx_len": 2**63}, "ctx_len is 9223372036854775808"),
        (
            {"dtype": "float64"},
            "dtype is 'float64'; choose one of float32, float16, bfloat16, or None",
        ),
        (
            {"weights": "int3"},
            "weights is 'int3'; give int2, int4, int8, float32, .*a table, such as .*JSON file",
        ),
        ({"weights": {}}, "weights is {}; give int2"),
        (
            {"weights": {"lm_head": "int3"}},
            r"weights\['lm_head'\] is 'int3'; give int2, int4, int8 .* or float",
        ),
        ({"weights": {"lm_head": "int4:33"}}, r"weights\['lm_head'\] is 'int4:33'; give"),
        ({"weights": {"lm_head": 4}}, r"weights\['lm_head'\] is 4; give"),
        ({"weights": "missing.json"}, "weights: cannot read the table missing.json"),
        (
            {"weights": "int2", "block_size": 256},
            "block_size is 256, and the kernels of 2 bits take blocks of 32, 64 or 128",
        ),
        (
            {"weights": "int2", "block_size": 16},
            "block_size is 16, and the kernels of 2 bits take blocks of 32, 64",
        ),
        ({"block_size": 33}, "block_size is 33; choose one of 16, 32, 64, 128, 256"),
        ({"block_size": "32"}, "block_size is '32'; choose one of 16"),
        ({"preset": "gptq"}, "preset is 'gptq'; choose one of quick, balanced, speed"),
        (
            {"kv_cache_dtype": "int2"},
            "kv_cache_dtype is 'int2'; choose one of .*int8, int4, or None",
        ),
        (
            {"max_divergence": -0.1},
            "max_divergence is -0.1; give a number of nats a token, at least 0",
        ),
        ({"max_divergence": math.nan}, "max_divergence is nan"),
        ({"max_divergence": "1"}, "max_divergence is '1'"),
        ({"block_size": 64}, "block_size is 64, which is only read if weights are quantized"),
        ({"weights": "float16", "preset": "speed"}, "preset is 'speed', which is only read if"),
        (
            {"weights": "int4", "calibration_text": "text"},
            "read with .* and preset='balanced' or 'speed'; leave",
        ),
        ({"preset": "speed", "calibration_text": "text"}, "calibration_text is only read with"),
        (
            {"num_speculative_tokens": 65},
            "num_speculative_tokens is 65; give the most tokens .* 64",
        ),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"num_devices": 0}, "num_devices is 0; give the number of devices"),
        ({"sliding_window_cache": 1}, "sliding_window_cache is 1"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        CompileOptions(**options)
    with pytest.raises(CompileError, match=message):
        CompileOptions().override(**options)


def test_fields_replace_those_that_were_given() -> None:
    options = CompileOptions(provider="cuda", dtype="bfloat16")
    assert options.override(ctx_len=64) == CompileOptions(
        provider="cuda", dtype="bfloat16", ctx_len=64
    )
    assert options.override() == options


@pytest.mark.parametrize(
    ("name", "hint"),
    [("batchsize", "did you mean 'batch_size'?"), ("quux", "choose from provider, batch_size")],
)
def test_an_unknown_field(name: str, hint: str) -> None:
    with pytest.raises(
        TypeError, match=f"compile has no option '{name}'; {hint}".replace("?", r"\?")
    ):
        CompileOptions().override(**{name: 1})


def test_they_are_public_and_need_nothing_of_the_export_side() -> None:
    heavy = ["torch", "transformers", "onnx", "onnxscript", "onnx_ir", "onnxruntime"]
    code = f"import sys; from qsample import CompileOptions; print([name for name in {heavy} if name in sys.modules])"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert printed == "[]\n"
    assert "CompileOptions" in qsample.__all__


@pytest.mark.parametrize("block_size", [None, 32, 64, 128])
def test_blocks_of_two_bits(block_size: int | None) -> None:
    assert CompileOptions(weights="int2", block_size=block_size).block_size == block_size


DEFAULTS = {
    **dict.fromkeys(("batch_size", "ctx_len", "dtype", "weights", "block_size")),
    **dict.fromkeys(("calibration_text", "kv_cache_dtype", "debug_dump")),
    "provider": "cpu",
    "preset": "quick",
    "sliding_window_cache": True,
    "num_speculative_tokens": 0,
    "num_devices": 1,
    "max_divergence": 0.7,
}


def test_defaults_say_nothing() -> None:
    options = CompileOptions()
    assert {entry.name: getattr(options, entry.name) for entry in fields(options)} == DEFAULTS
    assert options.described() == {}
    assert [entry.name for entry in fields(options) if not entry.metadata.get("help")] == []


@pytest.mark.parametrize(
    "options",
    [
        *({"batch_size": size} for size in (1, 2**31 - 1)),
        *({"ctx_len": length} for length in (2, 2**31 - 1)),
        *({"num_speculative_tokens": count} for count in (1, 64)),
        {"num_devices": 2**31 - 1, "sliding_window_cache": False},
        *({"max_divergence": most} for most in (0.0, math.inf)),
        {"weights": "int4", "preset": "balanced", "block_size": 256, "kv_cache_dtype": "int4"},
    ],
)
def test_all_but_defaults_is_described(options: dict[str, Any]) -> None:
    """Up to the limits, for a manifest."""
    assert CompileOptions(**options, debug_dump="dump").described() == options


@pytest.mark.parametrize(
    ("options", "quantizes", "bits", "calibrated"),
    [
        ({}, False, 4, False),
        ({"weights": "float16"}, False, 4, False),
        ({"weights": "int8"}, True, 8, False),
        ({"weights": "int2", "preset": "speed"}, True, 2, True),
        ({"weights": {"lm_head": "float"}, "preset": "balanced"}, True, 4, True),
    ],
)
def test_what_becomes_of_weights(
    options: dict[str, Any], quantizes: bool, bits: int, calibrated: bool
) -> None:
    made = CompileOptions(**options)
    assert (made.quantizes, made.bits, made.calibrated) == (quantizes, bits, calibrated)
