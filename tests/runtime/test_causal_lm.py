"""generate(): the right tokens, however they are asked for, and every wrong argument."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.package.manifest import TokenIds
from qsample.package.package import Package
from qsample.runtime import CausalLM, SamplingParams, load
from tests.helpers.fake_package import BOS, MAX_POSITIONS, PAD, POISON, VOCAB, compilation
from tests.helpers.requests import GREEDY, PROMPTS, RANDOM, mixed


@pytest.mark.parametrize("sampler", [True, False])
@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_chunking_changes_nothing(
    chunk: int | None, sampler: bool, fake_model: Callable[..., CausalLM]
) -> None:
    wanted = fake_model().generate(PROMPTS, mixed(), seed=7)
    got = fake_model(sampler=sampler).generate(PROMPTS, mixed(), seed=7, prefill_chunk_size=chunk)
    assert got.token_ids == wanted.token_ids
    assert got.finish_reasons == wanted.finish_reasons


def test_a_row_has_the_same_tokens_alone_and_in_any_place_of_a_batch(model: CausalLM) -> None:
    alone = [
        model.generate([prompt], params, seed=row, prefill_chunk_size=row or None).token_ids[0]
        for row, (prompt, params) in enumerate(zip(PROMPTS, mixed(), strict=True))
    ]
    for order in itertools.permutations(range(len(PROMPTS))):
        output = model.generate(
            [PROMPTS[i] for i in order], [mixed()[i] for i in order], seed=list(order)
        )
        assert output.token_ids == [alone[i] for i in order]


def test_the_same_seed_repeats_and_another_does_not(model: CausalLM) -> None:
    first, again, other = (
        model.generate(PROMPTS, RANDOM, seed=seed).token_ids for seed in (1, 1, 2)
    )
    assert first == again
    assert first[1] == other[0] or first[0] != other[0]
    fresh = [model.generate(PROMPTS[0], RANDOM) for _ in range(2)]
    assert fresh[0].seeds != fresh[1].seeds
    assert model.generate(PROMPTS[0], RANDOM, seed=fresh[0].seeds).token_ids == fresh[0].token_ids


def test_stop_token_length_and_minimum_length(model: CausalLM) -> None:
    free = SamplingParams(temperature=0, max_new_tokens=20, eos_token_id=())
    tokens = model.generate(PROMPTS[0], free).token_ids[0]
    stop = tokens[4]
    first = tokens.index(stop) + 1
    stopped = model.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_new_tokens=20, eos_token_id=(VOCAB - 1, stop))
    )
    assert (stopped.token_ids[0], stopped.finish_reasons) == (tokens[:first], ["stop"])
    later = SamplingParams(
        temperature=0, max_new_tokens=20, eos_token_id=(stop,), min_new_tokens=first + 1
    )
    assert len(model.generate(PROMPTS[0], later).token_ids[0]) > first
    one = model.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=1))
    assert [len(row) for row in one.token_ids] == [1] * 4
    assert one.timing.steps == 0


def test_the_model_says_where_a_row_ends_unless_the_caller_does(
    fake_model: Callable[..., CausalLM],
) -> None:
    tokens = (
        fake_model()
        .generate(PROMPTS[0], temperature=0, max_new_tokens=8, eos_token_id=None)
        .token_ids[0]
    )
    own = fake_model(generation_config={"eos_token_id": tokens[2], "max_new_tokens": 6})
    assert own.generate(PROMPTS[0]).token_ids[0] == tokens[: tokens.index(tokens[2]) + 1]
    assert own.generate(PROMPTS[0], eos_token_id=None).token_ids[0] == tokens[:6]
    of_manifest = fake_model(generation_config={}, manifest={"token_ids": _token_ids(tokens[2])})
    params = SamplingParams(temperature=0, max_new_tokens=6)
    assert of_manifest.generate(PROMPTS[0], params).finish_reasons == ["stop"]


def _token_ids(eos: int) -> Any:
    from qsample.package.package import TokenIds

    return TokenIds(PAD, BOS, (eos,))


def test_a_row_ends_when_the_context_is_full(fake: Callable[..., Package]) -> None:
    model = load(fake().path, ctx_len=16)
    output = model.generate(PROMPTS, SamplingParams(temperature=0, eos_token_id=()))
    assert [len(p) + len(n) for p, n in zip(PROMPTS, output.token_ids, strict=True)] == [16] * 4
    assert output.finish_reasons == ["length"] * 4
    roomy = load(fake().path).generate(
        PROMPTS, SamplingParams(temperature=0, eos_token_id=(), max_new_tokens=15)
    )
    assert [
        row[: len(short)] for row, short in zip(roomy.token_ids, output.token_ids, strict=True)
    ] == (output.token_ids)
    # The longest prompt that leaves room for a token, whole and in chunks of which the last is short.
    for chunk in (None, 4):
        full = model.generate(
            [[5] * 15, [6]], SamplingParams(temperature=0), prefill_chunk_size=chunk
        )
        assert len(full.token_ids[0]) == 1


def test_token_0_fills_and_begins_prompts(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(manifest={"token_ids": TokenIds(pad=3, eos=(4,), bos=5)})
    ids = {"pad_token_id": 0, "bos_token_id": 0}
    greedy = SamplingParams(temperature=0, max_new_tokens=2, eos_token_id=())
    padded = model.generate([[5, 6, 7], [8]], greedy, **ids)
    assert padded.sequences[1, :3].tolist() == [0, 0, 8]
    masked = model.generate(np.array([[5, 6, 7], [0, 0, 8]]), greedy, **ids)
    assert masked.token_ids == padded.token_ids
    empty = model.generate([[]], greedy, **ids)
    assert empty.token_ids == model.generate([[0]], greedy).token_ids
    assert empty.token_ids != model.generate([[]], greedy).token_ids


def test_default_length_and_the_models_own_limit(model: CausalLM) -> None:
    output = model.generate([[5] * 200], temperature=0, eos_token_id=None)
    assert len(output.sequences[0]) == MAX_POSITIONS
    assert (
        len(model.generate([5], temperature=0, eos_token_id=None).token_ids[0]) == MAX_POSITIONS - 1
    )


def test_logits_that_turn_invalid_later(fake_model: Callable[..., CausalLM]) -> None:
    """A row forced to sample the poisonous token at its second step keeps what it had sampled before."""
    model = fake_model(logit_bias=True)
    params = SamplingParams(temperature=0, max_new_tokens=10, logit_bias={POISON: 1e6})
    with pytest.warns(UserWarning, match="ended early"):
        output = model.generate(PROMPTS[:2], [params, GREEDY])
    assert output.token_ids[0] == [POISON]
    assert output.finish_reasons[0] == "invalid"
    assert output.token_ids[1] == model.generate(PROMPTS[1], GREEDY).token_ids[0]


def test_hugging_face_keywords_over_the_generation_config(
    fake_model: Callable[..., CausalLM],
) -> None:
    model = fake_model(
        generation_config={"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 5}
    )
    assert model.generate(PROMPTS, seed=1).token_ids == (
        model.generate(PROMPTS, SamplingParams(temperature=0.8, max_new_tokens=5), seed=1).token_ids
    )
    assert model.generate(PROMPTS, do_sample=False, max_length=20).token_ids == (
        model.generate(PROMPTS, SamplingParams(temperature=0, max_length=20)).token_ids
    )


def test_settings_of_the_file_that_cannot_run_end_no_call(
    fake_model: Callable[..., CausalLM],
) -> None:
    short = {"max_new_tokens": 5}
    config = {"do_sample": True, "temperature": 0.0, "top_k": -1, "top_p": 0, **short}
    model = fake_model(generation_config=config)
    with pytest.warns(UserWarning, match=r'"top_p": 0, which is outside the accepted range'):
        own = model.generate(PROMPTS).token_ids
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.generate(PROMPTS).token_ids == own
    assert own == model.generate(PROMPTS, do_sample=False).token_ids
    sampled = fake_model(generation_config={"do_sample": True, "top_k": 0, **short})
    assert model.generate(PROMPTS, temperature=1.0, seed=1).token_ids == (
        sampled.generate(PROMPTS, seed=1).token_ids
    )
    with pytest.raises(ValueError, match="top_k is -1"):
        model.generate(PROMPTS, top_k=-1)


def test_wrong_values_of_a_caller_s_generation_config_are_errors(
    fake_model: Callable[..., CausalLM],
) -> None:
    model = fake_model(generation_config={"max_new_tokens": 6, "do_sample": True})
    own = model.generation_config
    try:
        model.generation_config = {**own, "top_k": -1}
        with pytest.raises(ValueError, match="top_k is -1"):
            model.generate(PROMPTS)
        model.generation_config = {**own, "temperature": 0}
        with pytest.raises(ValueError, match="temperature is 0"):
            model.generate(PROMPTS)
        for stops in ([1, 2], [3, 4]):
            model.generation_config = {**own, "eos_token_id": np.array(stops)}
            assert all(model.generate(PROMPTS).token_ids)
    finally:
        model.generation_config = own


@pytest.mark.parametrize("chunk", [None, 2])
def test_logit_bias_and_allowed_tokens(
    chunk: int | None, fake_model: Callable[..., CausalLM]
) -> None:
    model = fake_model(logit_bias=True, allowed_tokens=True)
    plain = fake_model().generate(PROMPTS, RANDOM, seed=2).token_ids
    assert model.generate(PROMPTS, RANDOM, seed=2, prefill_chunk_size=chunk).token_ids == plain
    forced = SamplingParams(temperature=1.0, max_new_tokens=3, logit_bias={65: 1e4, 66: -1e4})
    rows = model.generate(PROMPTS[:2], [forced, RANDOM], seed=1, prefill_chunk_size=chunk).token_ids
    assert rows[0] == [65, 65, 65]
    allowed = {10, 33, 319, VOCAB - 1}
    mask = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    for token in allowed:
        mask[token // 32] |= np.array(1 << token % 32, dtype=np.uint32).astype(np.int32)
    options = {"seed": 1, "allowed_tokens": mask, "prefill_chunk_size": chunk}
    output = model.generate(
        PROMPTS, SamplingParams(temperature=5.0, max_new_tokens=40, eos_token_id=()), **options
    )
    assert set(itertools.chain(*output.token_ids)) == allowed


def test_a_large_portable_package_says_once_that_compile_makes_it_faster(
    fake: Callable[..., Package], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    load(fake().path).generate([5], max_new_tokens=1)
    assert not recwarn.list
    monkeypatch.setattr("qsample.package.package._MIN_BYTES_FOR_ADVICE", 1000)
    load(fake(compilation=compilation()).path).generate([5], max_new_tokens=1)
    assert not recwarn.list
    model = load(fake().path)
    for _ in range(2):
        model.generate([5], max_new_tokens=1)
    (shown,) = recwarn.list
    assert re.search(
        "package is portable.*`qsample compile .* OUT --weights int4`", str(shown.message)
    )


def test_a_name_that_the_package_lacks() -> None:
    import qsample

    with pytest.raises(
        AttributeError, match=r"'load'; AutoModelForCausalLM.from_pretrained opens a model$"
    ):
        qsample.load  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        qsample.nothing  # noqa: B018
