"""A real vision-language model (M-RoPE, deepstack) beside transformers: its tokens, alone and with everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.runtime import CausalLM, Engine, SamplingParams, load
from tests.helpers.adapters import random_adapter
from tests.helpers.sessions import with_prompt_calls
from tests.helpers.tiny_vlms import IMAGE_TEXT, picture, reference_generate, reference_inputs

pytestmark = pytest.mark.ci

TYPE = "qwen3_vl"
IMAGE = IMAGE_TEXT[TYPE]
WIDE, TALL, OTHER = picture(40, 24), picture(24, 56, seed=1), picture(40, 24, seed=2)
TEXTS = [
    f"Is {IMAGE} new?",
    f"{IMAGE}Look at {IMAGE}",
    "Only a text.",
    f"The first {IMAGE}",
    f"The first {IMAGE}",
]
IMAGES: list[list[Any]] = [[WIDE], [TALL, OTHER], [], [WIDE], [OTHER]]
GREEDY = SamplingParams(temperature=0, max_new_tokens=8, eos_token_id=())


@pytest.fixture(scope="module")
def model(image_package: Callable[..., Path]) -> CausalLM:
    """It reads prompts in pieces of 8 tokens, which end inside images."""
    features: dict[str, Any] = {"max_loras": 2, "max_lora_rank": 4, "filters": ["typical_p"]}
    flags = dict.fromkeys(("allowed_tokens", "logit_bias", "logprobs"), True)
    plain = load(image_package(TYPE, **features, **flags), ctx_len=128)
    return CausalLM(plain.package, with_prompt_calls(plain.sessions, piece_size=8), 128)


@pytest.fixture(scope="module")
def folder(image_checkpoint: Callable[[str], Path]) -> Path:
    return image_checkpoint(TYPE)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    tokens = reference_generate(folder, TEXTS, IMAGES, 8)
    assert len({tuple(one) for one in tokens}) == len(TEXTS), "the images make a difference"
    return tokens


@pytest.mark.parametrize("chunk", [None, 8])
def test_greedy_tokens_are_those_of_transformers(
    chunk: int | None, model: CausalLM, folder: Path, wanted: list[list[int]]
) -> None:
    together = model.generate(TEXTS, GREEDY, images=IMAGES, prefill_chunk_size=chunk)
    assert together.token_ids == wanted
    for row, (text, images) in enumerate(zip(TEXTS, IMAGES, strict=True)):
        ids = reference_inputs(folder, text, images)["input_ids"]
        alone = model.generate(ids, GREEDY, images=images, prefill_chunk_size=chunk)
        assert alone.token_ids == [wanted[row]]
        assert alone.sequences[0].tolist()[: ids.shape[1]] == ids[0].tolist() == together.sequences[row].tolist()[
            together.sequences.shape[1] - 8 - ids.shape[1] : -8
        ]  # fmt: skip


def test_placeholders_are_penalized(model: CausalLM, folder: Path) -> None:
    wanted = reference_generate(folder, TEXTS[:2], IMAGES[:2], 8, repetition_penalty=1.5)
    assert (
        model.generate(
            TEXTS[:2], replace(GREEDY, repetition_penalty=1.5), images=IMAGES[:2]
        ).token_ids
        == wanted
    )


def test_behind_beginnings_in_slots_and_in_files(
    model: CausalLM, wanted: list[list[int]], tmp_path: Path
) -> None:
    saved = tmp_path / "a.prefix"
    assert model.save_prefix(TEXTS[3], saved, images=IMAGES[3]) == 24
    engines: list[tuple[dict[str, Any], int]] = [({"slots": 1}, 24), ({"slots": 3}, 50)]
    for options, cached in [*engines, ({"slots": 2, "prefixes": [saved]}, 90)]:
        with Engine(model, **options) as engine:
            for row in (3, 4, 3, 0, 3, 4, 1, 2):
                got = engine.add_request(TEXTS[row], GREEDY, images=IMAGES[row]).result(60)
                assert got.token_ids == wanted[row], (options, row)
            assert engine.stats().prefixes.cached_tokens >= cached


def test_with_adapters_masks_biases_and_filters_at_once(model: CausalLM, tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        model.load_adapter(name, random_adapter(tmp_path / name, model.interface, seed))
    sampled = SamplingParams(
        temperature=1.0, top_k=0, typical_p=0.9, max_new_tokens=8, eos_token_id=()
    )
    biased = replace(sampled, logit_bias={100: 4.0, 101: -float("inf")})
    params = [
        replace(biased, adapter="one"),
        replace(biased, adapter="two"),
        sampled,
        biased,
        replace(biased),
    ]
    mask = np.full(model.interface.sizes["W"], -1, np.int32)
    mask[1] = 0  # tokens 32 to 63
    options: dict[str, Any] = {"allowed_tokens": mask}
    together = model.generate(TEXTS, params, images=IMAGES, seed=[5] * 5, **options)
    for row, (text, own) in enumerate(zip(TEXTS, params, strict=True)):
        alone = model.generate(text, own, images=IMAGES[row], seed=5, **options)
        assert alone.token_ids == [together.token_ids[row]]
        assert not {*together.token_ids[row]} & {*range(32, 64)}
    without = model.generate(TEXTS[:2], biased, images=IMAGES[:2], seed=[5] * 2, **options)
    assert all(
        with_it != plain
        for with_it, plain in zip(together.token_ids[:2], without.token_ids, strict=True)
    )
    with Engine(model, slots=2) as engine:
        requests = [
            engine.add_request(text, replace(own, seed=5), images=images, **options)
            for text, own, images in zip(TEXTS, params, IMAGES, strict=True)
        ]
        assert [request.result(60).token_ids for request in requests] == together.token_ids
