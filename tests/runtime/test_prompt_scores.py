"""Requests that score their prompts, whole pieces at a time; the oracle is transformers in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.addons.serve.answers import ForcedTokens
from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.package.package import read_package
from qsample.runtime import CausalLM, Engine, SamplingParams, load
from qsample.runtime.decode import prefixes
from tests.conftest import made_once
from tests.helpers.prompt_logprobs import Scores, scores_by_transformers

CTX_LEN = 160
# Attention, its soft-capped logits, states of fixed size, experts.
FAMILIES = ("llama", "gemma2", "lfm2", "qwen3_moe")


@pytest.fixture(scope="module")
def scored_package(exported: Callable[..., Path], shared_folder: Path) -> Callable[..., Path]:
    """(model type, compile options) → a package for the CPU that scores prompts."""

    def make(family: str, **options: Any) -> Path:
        portable = read_package(exported(family, for_serving=True))
        chosen = CompileOptions(ctx_len=CTX_LEN, **options)
        name = "-".join(["scored", family, *(f"{key}-{value}" for key, value in options.items())])
        return made_once(shared_folder / name, lambda path: compile_package(portable, path, chosen))

    return make


@pytest.fixture(scope="module")
def llama(exported: Callable[..., Path]) -> CausalLM:
    """A portable package that scores prompts."""
    return load(exported("llama", for_serving=True), ctx_len=CTX_LEN, intra_op_num_threads=1)


@pytest.fixture(scope="module")
def oracle(checkpoint: Callable[[str], Path]) -> Callable[[str], Scores]:
    """model type → (n token ids) → the log-probability of every token after each but the last, [n - 1, V]."""
    pytest.importorskip("transformers")
    return cache(lambda family: scores_by_transformers(checkpoint(family)))


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, vocab_size, length).tolist()
    return ids


def check(outputs: Any, logprobs: np.ndarray, ids: list[int], atol: float = 2e-4) -> None:
    """Compare the scores of a prompt with log-probabilities."""
    own = logprobs[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(outputs["prompt_logprobs"][:, 0], own, atol=atol)
    values = outputs["prompt_top_logprobs"]
    np.testing.assert_allclose(values, -np.sort(-logprobs)[:, : values.shape[1]], atol=atol)
    found = np.take_along_axis(logprobs, outputs["prompt_top_logprob_ids"], -1)
    np.testing.assert_allclose(found, values, atol=atol)
    ranks = outputs["prompt_ranks"]
    # Tokens closer than the tolerance may change places; the token itself is among the latter.
    assert np.all(ranks[:, 0] >= 1 + (logprobs > own[:, None] + 2 * atol).sum(-1))
    assert np.all(ranks[:, 0] <= (logprobs > own[:, None] - 2 * atol).sum(-1))


def test_scores_are_those_of_transformers(llama: CausalLM, oracle: Callable[[str], Scores]) -> None:
    check_many_prompts(llama, oracle("llama"))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_packages_for_the_cpu(
    family: str, scored_package: Callable[..., Path], oracle: Callable[[str], Scores]
) -> None:
    model = load(scored_package(family), intra_op_num_threads=1)
    check_many_prompts(model, oracle(family))


def check_many_prompts(model: CausalLM, oracle: Scores) -> None:
    """Prompts of a token more or less than a piece, several at once, the longest of which fills the context. Some are
    equal, or have the same length."""
    vocab_size = model.interface.vocab_size
    lengths = (30, 30, 30, 2, 3, 64, 65, 66, 129, CTX_LEN)
    prompts = [prompt_of(length, vocab_size, seed) for seed, length in enumerate(lengths)]
    prompts += [prompts[-1]] * 2
    with Engine(model, slots=3) as engine:
        requests = [engine.add_request(ids, prompt_logprobs=True) for ids in prompts]
        for ids, request in zip(prompts, requests, strict=True):
            output = request.result()
            check(output.prompt_outputs, oracle(ids), ids)
            assert (output.token_ids, output.finish_reason, output.outputs) == ([], "length", {})
            assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (len(ids), 0)
            assert request.scored_tokens == len(ids) - 1


def test_listed_tokens_are_scored_after_a_prompt(
    llama: CausalLM, oracle: Callable[[str], Scores]
) -> None:
    """Tokens of any rank, token 0 and the last among them, twice in a row; beside other requests, and from a cache."""
    scores = oracle("llama")
    vocab_size = llama.interface.vocab_size
    ids = [7, 0, vocab_size - 1, 7]
    with Engine(llama, slots=3) as engine:
        for length in (1, 2, 64, 65, CTX_LEN - 1):
            prompt = prompt_of(length, vocab_size, length)
            expected = scores([*prompt, 0])[-1]
            other = engine.add_request(prompt, max_new_tokens=1, temperature=0.0)
            for _ in range(2):
                request = engine.add_request(prompt, logprob_token_ids=ids)
                output = request.result()
                found = output.prompt_outputs
                np.testing.assert_allclose(found["prompt_logprobs"][:, 0], expected[ids], atol=2e-4)
                assert (output.token_ids, output.usage.prompt_tokens) == ([], length)
                assert request.scored_tokens == len(ids)
            assert output.usage.cached_tokens >= length // 64 * 32
            assert other.result().token_ids == [int(expected.argmax())]


def test_scores_beside_prompts_that_are_read_together(
    llama: CausalLM, oracle: Callable[[str], Scores]
) -> None:
    """Prompts of equal lengths in adjacent slots are read at once, but not those that are scored."""
    scores = oracle("llama")
    vocab_size = llama.interface.vocab_size
    # The last token of a scored prompt is not read, so all calls could have 20 tokens.
    prompts = [prompt_of(20 + (seed % 3 > 0), vocab_size, seed) for seed in range(24)]
    with Engine(llama, slots=4) as engine:
        requests = [
            engine.add_request(ids, max_new_tokens=1, temperature=0.0)
            if seed % 3 == 0
            else engine.add_request(ids, prompt_logprobs=True)
            for seed, ids in enumerate(prompts)
        ]
        for seed, request in enumerate(requests):
            output = request.result()
            expected = scores([*prompts[seed], 0])
            if seed % 3:
                check(output.prompt_outputs, expected[:-1], prompts[seed])
            else:
                assert output.token_ids == [int(expected[-1].argmax())]


def test_scores_are_those_of_sampled_tokens(llama: CausalLM) -> None:
    """A prompt that is sampled token by token has the same scores, and the same likeliest tokens."""
    ids = prompt_of(100, llama.interface.vocab_size)
    params = SamplingParams(temperature=0.0, max_new_tokens=len(ids) - 1, eos_token_id=())
    with Engine(llama, slots=1) as engine:
        scored = engine.add_request(ids, prompt_logprobs=True).result().prompt_outputs
        forced = engine.add_request([ids[:1]], params, allowed_tokens=ForcedTokens(ids[1:]))
        sampled = forced.result().outputs
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(scored[f"prompt_{name}"], sampled[name], atol=1e-4)
    np.testing.assert_array_equal(scored["prompt_top_logprob_ids"], sampled["top_logprob_ids"])


@pytest.mark.parametrize(
    "options", [{"prefill_chunk_size": 64, "slots": 4}, {"flush_every": 3, "slots": 3}], ids=str
)
def test_other_requests_keep_their_tokens(options: Any, llama: CausalLM) -> None:
    check_other_requests(llama, options)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_requests_of_packages_for_the_cpu(
    family: str, scored_package: Callable[..., Path]
) -> None:
    model = load(scored_package(family), intra_op_num_threads=1)
    check_other_requests(model, {"prefill_chunk_size": 64, "slots": 4})


def check_other_requests(model: CausalLM, options: Any) -> None:
    """The tokens and log-probabilities of answers are the same, bit by bit, while prompts are scored beside them; also
    of answers to scored prompts, which are not read again."""
    vocab_size = model.interface.vocab_size
    prompts = [prompt_of(length, vocab_size, length) for length in (70, 5, 130, 1, 64)]
    params = SamplingParams(temperature=0.9, max_new_tokens=20, eos_token_id=())
    with Engine(model, **options) as engine:
        alone = [
            engine.add_request(ids, params, seed=seed).result() for seed, ids in enumerate(prompts)
        ]
    with Engine(model, **options) as engine:
        requests = []
        for seed, ids in enumerate(prompts):
            if len(ids) > 1:
                engine.add_request(ids, prompt_logprobs=True, cancel_if_abandoned=False)
            requests.append(engine.add_request(ids, params, seed=seed))
        together = [request.result() for request in requests]
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        for name, values in one.outputs.items():
            np.testing.assert_array_equal(values, other.outputs[name])


def test_a_prompt_is_read_once_for_its_scores_and_its_answer(
    llama: CausalLM, oracle: Callable[[str], Scores]
) -> None:
    """The answer continues from the cache. A prompt that is scored is read anew, whatever slots hold of it."""
    ids = prompt_of(150, llama.interface.vocab_size)
    with Engine(llama, slots=2) as engine:
        for _ in range(2):
            scored = engine.add_request(ids, prompt_logprobs=True).result()
            assert scored.usage.cached_tokens == 0
            check(scored.prompt_outputs, oracle("llama")(ids), ids)
            assert engine.add_request(ids, max_new_tokens=2).result().usage.cached_tokens >= 128


@pytest.mark.ci
def test_many_tokens_in_a_piece(
    bundled_package: Path, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces far behind the start of a prompt have more tokens than the scorer takes at once."""
    monkeypatch.setattr(prefixes, "LATE_START", 256)
    from tests.helpers.tiny_models import with_features

    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import qsample
    from qsample.contract.interface import Features

    portable = read_package(bundled_package)
    features = Features(logprobs=True, top_logprobs=2, prompt_logprobs=True)
    path = made_once(
        shared_folder / "tiny_lm-scored", lambda path: with_features(portable, path, features)
    )
    model = load(path, intra_op_num_threads=1)
    ids = prompt_of(500, model.interface.vocab_size)
    bundled = Path(qsample.__file__).parent / "assets" / "tiny_lm"
    reference = transformers.AutoModelForCausalLM.from_pretrained(bundled, dtype=torch.float64)
    with torch.no_grad():
        logits = reference.eval()(torch.tensor([ids])).logits[0, :-1]
    with Engine(model, slots=1) as engine:
        scored = engine.add_request(ids, prompt_logprobs=True).result()
    check(scored.prompt_outputs, torch.log_softmax(logits, -1).numpy(), ids)


@pytest.mark.slow
def test_packages_for_one_row_and_of_fewer_bits(
    scored_package: Callable[..., Path], oracle: Callable[[str], Scores]
) -> None:
    one_row = load(scored_package("llama", batch_size=1), intra_op_num_threads=1)
    ids = prompt_of(100, one_row.interface.vocab_size)
    with Engine(one_row) as engine:
        check(
            engine.add_request(ids, prompt_logprobs=True).result().prompt_outputs,
            oracle("llama")(ids),
            ids,
        )
    model = load(
        scored_package("llama", weights="int8", kv_cache_dtype="int8", max_divergence=1.0),
        intra_op_num_threads=1,
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=len(ids) - 1, eos_token_id=())
    with Engine(model, slots=1) as engine:
        scored = engine.add_request(ids, prompt_logprobs=True).result().prompt_outputs
        forced = engine.add_request([ids[:1]], params, allowed_tokens=ForcedTokens(ids[1:]))
        sampled = forced.result().outputs
    # Activations in 8 bits jump if an attention's sum differs in its last bit.
    np.testing.assert_allclose(scored["prompt_logprobs"], sampled["logprobs"], atol=0.2)


def test_refusals(llama: CausalLM, llama_package: Path) -> None:
    with Engine(llama, slots=1) as engine:
        with pytest.raises(
            ValueError, match="the prompt is a single token, which nothing precedes"
        ):
            engine.add_request([[5]], prompt_logprobs=True)
        for value in (1, 0, "yes"):
            with pytest.raises(
                ValueError, match=r"prompt_logprobs is .*; give True, for the altern"
            ):
                engine.add_request([[5, 6]], prompt_logprobs=value)
        for ids, told in (
            ([], "give a list of 1 to 128 token ids"),
            (5, "give a list of 1 to 128 token ids"),
            ("5", "give a list of 1 to 128 token ids"),
            ([-1], "give a list of 1 to 128 token ids"),
            ([5] * 129, "give a list of 1 to 128 token ids"),
            ([5, llama.interface.vocab_size], "the model's ids are 0 to"),
        ):
            with pytest.raises(ValueError, match=f"logprob_token_ids .*{told}"):
                engine.add_request([[5, 6]], logprob_token_ids=ids)
        with pytest.raises(ValueError, match="give either"):
            engine.add_request([[5, 6]], logprob_token_ids=[5], prompt_logprobs=True)
        for off in (None, False):
            output = engine.add_request([[5, 6]], prompt_logprobs=off, max_new_tokens=1).result()
            assert (output.prompt_outputs, len(output.token_ids)) == ({}, 1)
    with pytest.raises(ValueError, match="prompt_logprobs is for requests of an Engine"):
        llama.generate([[5, 6]], prompt_logprobs=True)
    with pytest.raises(ValueError, match="logprob_token_ids is for requests of an Engine"):
        llama.generate([[5, 6]], logprob_token_ids=[5])
    plain = load(llama_package, intra_op_num_threads=1)
    with (
        Engine(plain, slots=1) as engine,
        pytest.raises(
            ValueError, match="the package does not score prompts; export the model with"
        ),
    ):
        engine.add_request([[5, 6]], prompt_logprobs=True)


@pytest.mark.ci
@pytest.mark.parametrize("options", [{"provider": "web"}, {"num_devices": 2}], ids=str)
def test_packages_that_leave_scores_out(
    options: Any, exported: Callable[..., Path], tmp_path: Path
) -> None:
    portable = read_package(exported("llama", for_serving=True))
    assert portable.interface.features.prompt_logprobs
    package = compile_package(portable, tmp_path / "package", CompileOptions(ctx_len=32, **options))
    assert not package.interface.features.prompt_logprobs
    assert load(package.path).generate([[5, 6]], max_new_tokens=2, eos_token_id=()).token_ids
