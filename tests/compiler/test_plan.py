"""The plan: what options become for a package, and what does not fit it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qsample import CompileOptions
from qsample.compiler.plan import make_plan
from qsample.compiler.quantize.methods import WeightQuantization
from qsample.compiler.targets.cpu import TARGET
from qsample.contract.interface import (
    Features,
    ImageShape,
    Interface,
    KeyValueShape,
    RecurrentShape,
)
from qsample.errors import CompileError
from qsample.package.manifest import Compilation
from qsample.package.package import Package
from tests.helpers.small_packages import INTERFACE, manifest


def package(**changes: Any) -> Package:
    """A float32 package of no files; changes: of its manifest."""
    values = {"interface": replace(INTERFACE, dtype="float32"), **changes}
    return Package(Path("/nowhere"), manifest(**values))


def test_defaults_come_from_the_package() -> None:
    plan = make_plan(package(), CompileOptions())
    assert (plan.ctx_len, plan.dtype, plan.batch_size, plan.pad_token_id) == (
        4096,
        "float32",
        None,
        4,
    )
    assert (plan.weights, plan.kv_cache_dtype, plan.calibrated) == (None, None, False)
    assert not plan.quantized
    assert plan.interface == plan.source.interface
    assert make_plan(package(max_position_embeddings=512), CompileOptions()).ctx_len == 512
    assert make_plan(package(max_position_embeddings=9999), CompileOptions()).ctx_len == 4096
    assert (
        make_plan(package(max_position_embeddings=9999), CompileOptions(ctx_len=9999)).ctx_len
        == 9999
    )


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (
            {"weights": "int4", "block_size": 16, "preset": "speed", "calibration_text": "text"},
            "weights",
        ),
        (
            {"weights": {"lm_head": "float"}, "preset": "balanced", "calibration_text": "text"},
            "weights",
        ),
        ({"weights": "int8"}, "weights"),
        ({"weights": "float16"}, "store_float16"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
    ],
)
def test_what_changes_the_numbers_is_quantized(options: dict[str, Any], what: str) -> None:
    plan = make_plan(package(), CompileOptions(**options))
    assert plan.quantized
    assert [
        name for name in ("weights", "store_float16", "kv_cache_dtype") if getattr(plan, name)
    ] == [what]
    if plan.weights is not None:
        expected = {"int4": (4, 16, "gptq"), "int8": (8, 32, "rtn")}
        found = (plan.weights.bits, plan.weights.block_size, plan.weights.method)
        assert found == expected.get(str(options["weights"]), (4, 64, "gptq"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"weights": "int4", "preset": "speed"}, (4, 32)),  # they are not fitted
        ({"weights": "int2", "preset": "speed", "block_size": 128}, (4, 128)),
        ({"weights": "int8", "block_size": 64}, (8, 64)),
    ],
)
def test_experts_are_rounded_in_blocks_that_bear_it(
    options: dict[str, Any], expected: tuple[int, int]
) -> None:
    experts = make_plan(package(), CompileOptions(**options)).expert_weights
    assert experts is not None
    assert (experts.bits, experts.block_size) == expected


@pytest.mark.parametrize(
    "options", [{"weights": "float32"}, {"kv_cache_dtype": "float32"}, {"dtype": "float32"}]
)
def test_the_packages_own_dtype_changes_nothing(options: dict[str, Any]) -> None:
    assert not make_plan(package(), CompileOptions(**options)).quantized


def test_weights_that_came_quantized_count() -> None:
    plan = make_plan(package(packed_weights={"matrices": 3}), CompileOptions())
    assert plan.packed_weights
    assert plan.quantized


def test_another_cache_dtype_is_that_of_the_compiled_model() -> None:
    plan = make_plan(package(), CompileOptions(dtype="bfloat16", kv_cache_dtype="bfloat16"))
    assert (plan.dtype, plan.kv_cache_dtype) == ("bfloat16", None)


RECURRENT = replace(
    INTERFACE, dtype="float32", recurrent=(RecurrentShape(0, "conv_state", 0, (4,), "float32"),)
)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"max_position_embeddings": 64},
            {"ctx_len": 65},
            "ctx_len is 65; it must be 2 to 64, the model's max_pos",
        ),
        (
            {},
            {"weights": "bfloat16"},
            "weights is 'bfloat16' and the package holds float32; choose one of int2, int4",
        ),
        (
            {},
            {"kv_cache_dtype": "float16"},
            "kv_cache_dtype is 'float16' and the package holds float32",
        ),
        (
            {"parity": {"plain_attention_layers": 2}},
            {"kv_cache_dtype": "int8"},
            "2 layers of this model attend",
        ),
        (
            {"interface": RECURRENT},
            {"kv_cache_dtype": "int8"},
            "1 of its states are no keys or values",
        ),
        (
            {
                "interface": replace(
                    INTERFACE, key_values=(KeyValueShape(2, 8), KeyValueShape(1, 7))
                )
            },
            {"kv_cache_dtype": "int4"},
            "'int4', two numbers in a byte, and this model has heads of 7 numbers; take 'int8'",
        ),
        (
            {"interface": replace(INTERFACE, image=ImageShape(4, blockwise=True))},
            {"kv_cache_dtype": "int4"},
            "this model reads images whose tokens see each other; take 'int8'",
        ),
        (
            {"kind": "device", "compilation": Compilation("cpu", (), None, 8, {}, {})},
            {},
            "/nowhere is already compiled; compile the portable package",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CompileError, match=message):
        make_plan(package(**changes), CompileOptions(**options))


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        (
            RECURRENT,
            "=3: this model has 1 states of a fixed size, which cannot return to the token before a wrong guess",
        ),
        (
            replace(INTERFACE, dtype="float32", features=Features(max_loras=2, max_lora_rank=8)),
            r"takes adapters \(max_loras=2\), whose float products round one token otherwise",
        ),
        (
            replace(INTERFACE, dtype="float32", features=Features(sampler=False)),
            "this one returns logits, and samples on",
        ),
        (
            replace(INTERFACE, dtype="float32", features=Features(probs=True)),
            r"the distributions of single tokens \(probs",
        ),
    ],
)
def test_what_cannot_guess_is_refused(interface: Interface, message: str) -> None:
    options = CompileOptions(
        num_speculative_tokens=3, kv_cache_dtype=None if interface.recurrent else "int8"
    )
    with pytest.raises(CompileError, match=message):
        TARGET.check(make_plan(package(interface=interface), options))


def test_what_follows_from_a_plan() -> None:
    options = CompileOptions(num_speculative_tokens=3, kv_cache_dtype="int8", batch_size=2)
    plan = make_plan(package(), options)
    assert plan.interface == replace(
        plan.source.interface, features=replace(INTERFACE.features, num_speculative_tokens=3)
    )
    assert (plan.batch_size, plan.decoder) == (2, Path("/nowhere/decoder.onnx"))
    assert plan.needs_new_attention
    plain = make_plan(package(), CompileOptions(weights="int4", preset="balanced"))
    assert (plain.needs_new_attention, plain.calibrated, plain.expert_weights) == (
        False,
        True,
        WeightQuantization(4, 32, "gptq", zero_points=False),
    )
    assert plain.weights == WeightQuantization(4, 64, "gptq", zero_points=True)
    slides = replace(plain.interface, key_values=(KeyValueShape(1, 8, capacity=16),))
    assert replace(plain, interface=slides).needs_new_attention
    half = make_plan(package(interface=INTERFACE), CompileOptions(weights="float16"))
    assert (half.dtype, half.store_float16, half.quantized) == ("float16", False, False)
