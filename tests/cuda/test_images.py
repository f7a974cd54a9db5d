"""A model that reads images, on CUDA: its steps are captured and replayed, and take nothing of images from the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsample import AutoModelForImageTextToText, SamplingParams
from qsample.runtime import Engine, load
from qsample.runtime.decode.slots import Slots
from tests.cuda import puppet
from tests.cuda.trace import Trace
from tests.helpers.tiny_vlms import IMAGE_TEXT, picture

TYPE = "qwen3_vl"  # M-RoPE and deepstack
IMAGE = IMAGE_TEXT[TYPE]
TEXTS = [f"Is {IMAGE} new?", f"{IMAGE}Look at {IMAGE}", "Only a text.", f"The first {IMAGE}"]
WIDE, TALL = picture(40, 24), picture(24, 56, seed=1)
IMAGES: list[list[Any]] = [[WIDE], [TALL, WIDE], [], [WIDE]]
PARAMS = SamplingParams(temperature=0.9, max_new_tokens=8, eos_token_id=())


@pytest.mark.parametrize("devices", [1, 2])
def test_captured(
    devices: int, image_package: Callable[..., Path], tmp_path: Path, trace: Trace
) -> None:
    source = AutoModelForImageTextToText.from_pretrained(image_package(TYPE))
    options = {"dtype": "float16", "ctx_len": 128, "max_divergence": 100, "num_devices": devices}
    package = source.compile(tmp_path / "cuda", provider="cuda", **options).package
    model = load(package.path)
    trace.clear()
    before = puppet.COUNTS["replays"]
    got = model.generate(TEXTS, PARAMS, images=IMAGES, seed=1)
    assert puppet.COUNTS["replays"] > before
    assert not trace.problems()
    assert not trace.captured_reads_of_the_host()
    wanted = load(package.path, [puppet.CPU])
    for row, (text, images) in enumerate(zip(TEXTS, IMAGES, strict=True)):
        assert wanted.generate(text, PARAMS, images=images, seed=1 + row).token_ids == [
            got.token_ids[row]
        ]
    with Engine(model, slots=2) as engine:
        requests = [
            engine.add_request(text, PARAMS, images=images, seed=1 + row)
            for row, (text, images) in enumerate(zip(TEXTS, IMAGES, strict=True))
        ]
        assert [request.result(60).token_ids for request in requests] == got.token_ids
    (slots,) = model._captured.values()
    assert isinstance(slots, Slots)
    slots.decode()
    trace.clear()
    slots.decode()
    assert trace.bytes_from_host() == 0
