"""What a plan needs of its target: each capability, bits, caches, devices and dtypes, in a table; no graph is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qsample.compiler.options import CompileOptions
from qsample.compiler.pipeline import Phase
from qsample.compiler.plan import CompilePlan, make_plan
from qsample.compiler.targets import Capability, Target
from qsample.compiler.targets.requirements import check_plan
from qsample.contract.interface import (
    AdapterTarget,
    Features,
    ImageShape,
    Interface,
    KeyValueShape,
    RecurrentShape,
)
from qsample.errors import CompileError
from qsample.package.package import Package
from tests.helpers.small_packages import manifest

PATH = Path("/models/one")
TEXT = Interface(100, (KeyValueShape(2, 8), KeyValueShape(1, 16)))
ADAPTED = replace(
    TEXT,
    features=Features(max_loras=3, max_lora_rank=8),
    adapters=(AdapterTarget("layers.0.self_attn.q_proj", 16, 16),),
)
PICTURES = replace(TEXT, image=ImageShape(64))
BLOCKS = replace(TEXT, image=ImageShape(64, blockwise=True))
GPTQ = {"weights": "int4", "preset": "speed", "calibration_text": "a text"}
INT8_CACHE = {"kv_cache_dtype": "int8"}


class Device(Target):
    """It takes what it is told to take."""

    name = "device"
    execution_providers = ("CPUExecutionProvider",)

    def __init__(self, *lacks: Capability, **attributes: Any) -> None:
        self.capabilities = frozenset(Capability).difference(lacks)
        self.checked: list[object] = []
        for name, value in attributes.items():
            setattr(self, name, value)

    def check(self, plan: CompilePlan) -> None:
        self.checked.append(plan)

    def check_installed(self) -> None:
        self.checked.append("installed")

    def phases(self, plan: CompilePlan) -> Sequence[Phase]:
        return []


def plan_of(interface: Interface = TEXT, **options: Any) -> CompilePlan:
    return make_plan(
        Package(PATH, manifest(interface=interface)),
        CompileOptions(ctx_len=32, **{"provider": "cpu", **options}),
    )


NEEDS = [
    (
        Capability.CALIBRATION,
        TEXT,
        GPTQ,
        "preset='speed' runs the graph that is compiled, on the CPU, and provider is 'cpu'; take 'quick'",
    ),
    (
        Capability.GUESSED_TOKENS,
        TEXT,
        {"num_speculative_tokens": 1, **INT8_CACHE},
        "num_speculative_tokens is 1, and steps of graphs for device are of one token; leave it out, or compile "
        "for cpu",
    ),
    (
        Capability.SEVERAL_DEVICES,
        TEXT,
        {"num_devices": 2},
        "num_devices is 2, and graphs for device are for one device; compile for cpu or cuda",
    ),
    (
        Capability.ADAPTERS,
        ADAPTED,
        {},
        "/models/one takes LoRA adapters (max_loras=3), and the target device has no inputs for them; compile for "
        "cpu, or export the model without max_loras, its adapter merged (--adapter)",
    ),
    (
        Capability.IMAGES,
        PICTURES,
        {},
        "/models/one reads images, and packages for device read text; compile for cpu or cuda, or export only the "
        "text model (--text-only)",
    ),
    (
        Capability.IMAGE_BLOCKS,
        BLOCKS,
        {},
        "/models/one is of a model in which the tokens of an image see each other: a branch of its graph, and graphs "
        "for device have none; compile for cpu, or export only the text model (--text-only)",
    ),
    (
        Capability.FLOAT16_WEIGHTS,
        TEXT,
        {"weights": "float16"},
        "weights is 'float16', which is for the cpu target; give dtype='float16' for device",
    ),
]


@pytest.mark.parametrize(("capability", "interface", "options", "message"), NEEDS)
def test_each_capability(
    capability: Capability, interface: Interface, options: dict[str, Any], message: str
) -> None:
    plan = plan_of(interface, **options)
    target = Device(capability)
    with pytest.raises(CompileError) as caught:
        check_plan(target, plan)
    assert str(caught.value) == message
    assert target.checked == [], "the target's own checks come after these"
    whole = Device()
    check_plan(whole, plan)
    assert whole.checked == [plan, "installed"]


def test_a_plain_plan_needs_nothing() -> None:
    for plan in (
        plan_of(),
        plan_of(weights="int4"),  # rounded, so it needs no text
        plan_of(num_devices=1, num_speculative_tokens=0),
    ):
        check_plan(Device(*Capability), plan)
    check_plan(Device(Capability.IMAGE_BLOCKS), plan_of(PICTURES))


@pytest.mark.parametrize(
    ("attributes", "lacks", "advice"),
    [
        ({"dtypes": ("float32", "float16")}, (), "dtype='float16'"),
        ({"dtypes": ("float32", "bfloat16")}, (), "'int4', 'int8' or 'float32'"),
        (
            {"dtypes": ("float32", "float16")},
            (Capability.DTYPE_CONVERSION,),
            "'int4', 'int8' or 'float32'",
        ),
    ],
)
def test_advice_in_place_of_float16_weights(
    attributes: dict[str, Any], lacks: tuple[Capability, ...], advice: str
) -> None:
    target = Device(Capability.FLOAT16_WEIGHTS, *lacks, **attributes)
    with pytest.raises(CompileError, match=f"for the cpu target; give {advice} for device"):
        check_plan(target, plan_of(weights="float16"))


@pytest.mark.parametrize(
    ("weights", "bits", "fits"),
    [
        ("int8", (8,), True),
        ("int4", (8,), False),
        ("int2", (4, 8), False),
        ("int2", (2, 4, 8), True),
        ({"lm_head": "float", "*": "int8"}, (4, 8), True),  # the rest is in 8 bits, or 4
        ({"lm_head": "int2", "*": "int8"}, (4, 8), False),
        (None, (), True),
    ],
)
def test_bits_of_weights(weights: Any, bits: tuple[int, ...], fits: bool) -> None:
    target = Device(weight_bits=bits)
    plan = plan_of(weights=weights)
    if fits:
        check_plan(target, plan)
        return
    with pytest.raises(CompileError) as caught:
        check_plan(target, plan)
    assert str(caught.value) == (
        f"weights is {weights!r}, and products with 2-bit weights are for cpu; take 'int4' for device"
    )


@pytest.mark.parametrize(
    ("asked", "taken", "advice"),
    [
        ("int8", ("int8",), None),
        ("int4", ("int8", "int4"), None),
        (None, (), None),
        ("float32", (), None),  # that of the model
        ("int8", (), "leave it out"),
        ("int4", ("int8",), "leave it out, or take 'int8'"),
    ],
)
def test_dtypes_of_caches(asked: str | None, taken: tuple[str, ...], advice: str | None) -> None:
    target, plan = Device(kv_cache_dtypes=taken), plan_of(kv_cache_dtype=asked)
    if advice is None:
        check_plan(target, plan)
        return
    with pytest.raises(CompileError) as caught:
        check_plan(target, plan)
    assert str(caught.value) == (
        f"kv_cache_dtype is {asked!r}, which the attention of device does not take; {advice}"
    )


def test_more_devices_than_layers() -> None:
    """A layer counts once, however many states it has."""
    check_plan(Device(), plan_of(num_devices=2))
    message = "num_devices is 3, and the model has 2 layers with states; give at most that"
    with pytest.raises(CompileError, match=message):
        check_plan(Device(), plan_of(num_devices=3))
    recurrent = replace(
        TEXT, recurrent=(RecurrentShape(2, "recurrent_state", 0, (4, 4), "float32"),)
    )
    check_plan(Device(), plan_of(recurrent, num_devices=3))


def test_guesses_between_devices() -> None:
    both = {"num_speculative_tokens": 3, **INT8_CACHE}
    check_plan(Device(), plan_of(num_devices=1, **both))
    with pytest.raises(
        CompileError,
        match=r"num_devices is 2 and num_speculative_tokens 3: between the layers .* leave out either",
    ):
        check_plan(Device(), plan_of(num_devices=2, **both))


@pytest.mark.parametrize(
    ("dtype", "exported", "dtypes", "converts", "message"),
    [
        (None, "float32", ("float32",), False, None),
        ("float16", "float16", ("float16",), False, None),
        ("float16", "float32", ("float16",), True, None),
        (
            None,
            "float32",
            ("float16", "bfloat16"),
            True,
            "dtype is 'float32' and the target device computes in 'float16' or 'bfloat16'; compile with one of these",
        ),
        (
            None,
            "float32",
            ("float16",),
            False,
            "dtype is 'float32' and the target device computes in 'float16'; export the model with one of these",
        ),
        (
            "float16",
            "bfloat16",
            ("float16",),
            True,
            "dtype is 'float16' and the package was exported as bfloat16; export it again as float32, so that it is "
            "rounded only once",
        ),
        (
            "float16",
            "float32",
            ("float16",),
            False,
            "dtype is 'float16' and the package was exported as float32; export it again with that dtype",
        ),
    ],
)
def test_dtypes(
    dtype: str | None, exported: str, dtypes: tuple[str, ...], converts: bool, message: str | None
) -> None:
    lacks = () if converts else (Capability.DTYPE_CONVERSION,)
    plan = plan_of(replace(TEXT, dtype=exported), dtype=dtype)
    if message is None:
        check_plan(Device(*lacks, dtypes=dtypes), plan)
        return
    with pytest.raises(CompileError) as caught:
        check_plan(Device(*lacks, dtypes=dtypes), plan)
    assert str(caught.value) == message
