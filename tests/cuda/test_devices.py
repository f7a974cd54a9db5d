"""A decoder in parts: each on its GPU and captured there; of a step, hidden states and a few integers travel."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample import AutoModelForCausalLM
from qsample.runtime import load
from qsample.runtime.decode.slots import Slots
from tests.cuda.test_capture import PARAMS, PROMPTS, check_tokens
from tests.cuda.trace import Trace

ROWS, CONTEXT, GPUS = 4, 64, 2


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        pytest.param(
            "llama", {"weights": "int4", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow
        ),
        pytest.param("olmo_hybrid", {}, marks=pytest.mark.slow),
    ],
)
def test_two_gpus(
    portable: Callable[[str], Path],
    tmp_path: Path,
    trace: Trace,
    family: str,
    options: dict[str, Any],
) -> None:
    source = AutoModelForCausalLM.from_pretrained(portable(family))
    fixed = {"provider": "cuda", "dtype": "float16", "ctx_len": CONTEXT, "max_divergence": 100}
    package = source.compile(tmp_path / "cuda", num_devices=GPUS, **fixed, **options).package
    model = load(package.path)
    assert [part.device for part in model.sessions.parts] == ["cuda", "cuda:1"]

    trace.clear()
    slots = Slots(model.sessions, ROWS, CONTEXT)
    caches = {
        (spec.name.split(".")[1], model.sessions.device_of(spec))
        for spec in model.interface.cache_states
    }
    assert caches == {("0", "cuda"), ("1", "cuda:1")}
    parameters = {
        spec.name: np.array(spec.off, spec.dtype)
        for spec in model.interface.parameters
        if len(spec.axes) == 1
    }
    for row in range(ROWS):
        slots.begin(row, np.arange(4, 14), row, parameters)
        slots.prefill(row, np.arange(4, 8), emit=False, wait=False)
        slots.prefill(row, np.arange(8, 11), emit=False, wait=False)
        slots.prefill(row, np.arange(11, 14), emit=True)
    slots.prepare()
    assert trace.captures() == 2 * GPUS  # for each side of the buffers
    begun = trace.calls("BEGIN-CAPTURE")
    assert [sum(call.endswith(f"on {gpu}") for call in begun) for gpu in range(GPUS)] == [2] * GPUS
    assert not trace.captured_reads_of_the_host()

    for _ in range(2):
        slots.decode()
    trace.clear()
    slots.decode()
    assert [call.rpartition(" ")[2] for call in trace.calls("GRAPH-LAUNCH")] == ["0", "1"]
    assert trace.bytes_from_host() == trace.bytes_to_host() == 0
    found = [re.search(r" (\d+) from (\d) to (\d)", call) for call in trace.calls("device->device")]
    copies = [(match[2], match[3], int(match[1])) for match in found if match]
    hidden = {spec.name for part in model.sessions.parts for spec in part.spec.outputs} - {
        *model.interface.decoder.output_names
    }
    sizes = [
        ROWS * int(spec.axes[-1]) * 2
        for spec in model.sessions.parts[0].spec.outputs
        if spec.name in hidden
    ]
    # Lengths; recurrent layers also read the numbers of tokens, and whether a row runs.
    states = [4 * ROWS] * (3 if family == "olmo_hybrid" else 1)
    assert sorted(copies) == sorted(
        [("0", "1", size) for size in sizes] + [("1", "0", size) for size in [*states, 8 * ROWS]]
    )
    if family == "llama":
        assert sizes == [ROWS * model.config["hidden_size"] * 2] * 2
    assert not trace.problems()

    check_tokens(model, PROMPTS, PARAMS)
    whole = load(source.compile(tmp_path / "whole", **fixed, **options).package.path)
    assert model.generate(PROMPTS, PARAMS).token_ids == whole.generate(PROMPTS, PARAMS).token_ids
