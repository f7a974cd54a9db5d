"""A decoder in parts: each on its GPU and captured there; of a step, hidden states and a few integers travel."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from qsample import AutoModelForCausalLM
from qsample.runtime import load
from qsample.runtime.decode.slots import Slots
from tests.cuda.test_capture import PARAMS, PROMPTS, check_tokens
from tests.cuda.trace import Trace

ROWS, CONTEXT = 4, 64


def test_two_gpus(portable: Callable[[str], Path], tmp_path: Path, trace: Trace) -> None:
    source = AutoModelForCausalLM.from_pretrained(portable("llama"))
    options = {"provider": "cuda", "dtype": "float16", "ctx_len": CONTEXT}
    package = source.compile(tmp_path / "cuda", num_devices=2, **options).package
    model = load(package.path)
    assert [part.device for part in model.sessions.parts] == ["cuda", "cuda:1"]
    hidden = model.config["hidden_size"]

    trace.clear()
    slots = Slots(model.sessions, ROWS, CONTEXT)
    parameters = {
        spec.name: np.array(spec.off, spec.dtype) for spec in model.interface.parameters if len(spec.axes) == 1
    }
    for row in range(ROWS):
        slots.begin(row, np.arange(4, 14), row, parameters)
        slots.prefill(row, np.arange(4, 8), emit=False, wait=False)
        slots.prefill(row, np.arange(8, 11), emit=False, wait=False)
        slots.prefill(row, np.arange(11, 14), emit=True)
    slots.prepare()
    assert trace.captures() == 4  # two devices, two sides of the buffers
    assert [sum(f"on {device}" in call for call in trace.calls("BEGIN-CAPTURE")) for device in (0, 1)] == [2, 2]
    assert not trace.captured_reads_of_the_host()

    slots.decode()
    trace.clear()
    slots.decode()
    travelling = [re.search(r"(\d+) from (\d) to (\d)", call) for call in trace.calls("device->device")]
    copies = sorted((match[2], match[3], int(match[1])) for match in travelling if match)
    print(copies, trace.bytes_from_host(), trace.bytes_to_host())
    assert len(trace.calls("GRAPH-LAUNCH")) == 2
    assert not trace.problems()

    check_tokens(model, PROMPTS, PARAMS)
    whole = source.compile(tmp_path / "whole", **options)
    assert model.generate(PROMPTS, PARAMS).token_ids == load(whole.package.path).generate(PROMPTS, PARAMS).token_ids
    assert hidden
