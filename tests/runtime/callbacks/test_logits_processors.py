"""Logits processors of a caller's: beside transformers, row by row, and where they cannot be what they are there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.runtime import CausalLM, Engine, load
from tests.helpers.fake_cases import PROMPTS
from tests.helpers.fake_package import VOCAB, compilation
from tests.helpers.fake_reference import logits as reference_logits

FREE: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": ()}


@pytest.fixture
def host(fake_model: Callable[..., CausalLM]) -> CausalLM:
    return fake_model(sampler=False)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_processor_sees_every_token_and_its_logits(chunk: int | None, host: CausalLM) -> None:
    seen: list[tuple[list[int], Any]] = []

    def second_best(ids: Any, scores: Any) -> Any:
        seen.append((ids[0].tolist(), scores.copy()))
        scores[0, scores.argmax()] = -np.inf
        return scores

    output = host.generate(PROMPTS[1], logits_processor=second_best, prefill_chunk_size=chunk, **FREE)
    history = list(PROMPTS[1])
    for step, token in enumerate(output.token_ids[0]):
        expected = reference_logits(history)
        assert seen[step][0] == history
        assert seen[step][1].shape == (1, VOCAB)
        assert seen[step][1][0] == pytest.approx(expected, abs=1e-3)
        assert token == np.argsort(-expected)[1]
        history.append(token)
    assert len(seen) == 8


def test_a_row_has_processors_of_its_own(fake_model: Callable[..., CausalLM]) -> None:
    """Alone, in a batch, and in a package of fewer rows, where prompts take turns."""

    class Forces:
        """The n-th token is 100 + n."""

        calls = 0

        def __call__(self, ids: Any, scores: Any) -> Any:
            self.calls += 1
            scores[:] = -np.inf
            scores[0, 100 + self.calls] = 0
            return scores

    device = fake_model(sampler=False, compilation=compilation(batch_size=2, ctx_len=48))
    for model in (fake_model(sampler=False), device):
        processor = Forces()
        output = model.generate(PROMPTS, logits_processor=[processor], **FREE)
        assert output.token_ids == [list(range(101, 109))] * 4
        assert processor.calls == 0
    alone = Forces()
    fake_model(sampler=False).generate(PROMPTS[0], logits_processor=[alone], **FREE)
    assert alone.calls == 8


def test_rows_of_one_reading_have_processors_of_their_own_too(host: CausalLM) -> None:
    def alternates(ids: Any, scores: Any) -> Any:
        scores[:, ids[0, -1] % 2 :: 2] = -np.inf
        return scores

    options = {**FREE, "do_sample": True, "seed": 5, "logits_processor": alternates}
    twice = [prompt for prompt in PROMPTS for _ in range(2)]
    output = host.generate(PROMPTS, num_return_sequences=2, **options)
    assert output.token_ids == host.generate(twice, **options).token_ids
    for prompt, row in zip(twice, output.token_ids, strict=True):
        assert all((a - b) % 2 for a, b in itertools.pairwise([prompt[-1], *row]))


def test_the_next_call_has_none(host: CausalLM) -> None:
    wanted = host.generate(PROMPTS, **FREE).token_ids
    forced = host.generate(PROMPTS, logits_processor=lambda ids, scores: scores * 0 + np.eye(1, VOCAB, 9), **FREE)
    assert forced.token_ids == [[9] * 8] * 4
    assert host.generate(PROMPTS, **FREE).token_ids == wanted
    same = host.generate(PROMPTS, logits_processor=lambda ids, scores: scores, stopping_criteria=[], **FREE)
    assert same.token_ids == wanted


def test_sampling_and_stopping_go_with_it(host: CausalLM, fake_model: Callable[..., CausalLM]) -> None:
    options = {"temperature": 0.8, "max_new_tokens": 6, "seed": 3, "eos_token_id": ()}
    plain = fake_model().generate(PROMPTS, **options)
    same = host.generate(PROMPTS, logits_processor=lambda ids, scores: scores + 5, **options)
    assert same.token_ids == plain.token_ids
    short = host.generate(
        PROMPTS,
        logits_processor=lambda ids, scores: scores,
        stopping_criteria=lambda ids, scores: ids.shape[1] == 11 + 3,
        **options,
    )
    assert short.token_ids == [row[:3] for row in plain.token_ids]


@pytest.mark.parametrize(
    ("features", "options", "message"),
    [
        ({}, {}, "logits stay in this package's graph; export with include_sampler=False"),
        ({"sampler": False}, {"repetition_penalty": 1.2}, "logits_processor and repetition_penalty were given"),
        ({"sampler": False}, {"min_new_tokens": 3}, "logits_processor and min_length were given"),
        ({"sampler": False, "logit_bias": True}, {"logit_bias": {5: 1.0}}, "logits_processor and logit_bias"),
        ({"sampler": False, "logprobs": True}, {}, "the package's logprobs are of; export without them"),
        ({"sampler": False}, {"flush_every": 3}, "flush_every is 3 and logits_processor is given"),
        ({"sampler": False}, {"logits_processor": [5]}, "logits_processor has a int; give a function"),
        ({"sampler": False}, {"logits_processor": lambda ids, scores: None}, "returned object"),
        ({"sampler": False}, {"logits_processor": lambda ids, scores: scores[0]}, r"returned float32 \(320,\)"),
        ({"sampler": False}, {"logits_processor": lambda ids, scores: ids}, "returned int64"),
    ],
)
def test_what_it_does_not_go_with(
    features: dict[str, Any], options: dict[str, Any], message: str, fake_model: Callable[..., CausalLM]
) -> None:
    arguments = {"logits_processor": [lambda ids, scores: scores], **FREE, **options}
    with pytest.raises(ValueError, match=message):
        fake_model(**features).generate(PROMPTS, **arguments)


def test_an_engine_and_a_processor_that_cannot_be_copied(host: CausalLM) -> None:
    with Engine(host, slots=1) as engine, pytest.raises(ValueError, match=r"logits_processor is for generate; export"):
        engine.add_request([5], logits_processor=[print])

    class Single:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is only one")

        def __call__(self, ids: Any, scores: Any) -> Any:
            return scores

    assert host.generate(PROMPTS[0], logits_processor=Single(), **FREE).token_ids
    with pytest.raises(ValueError, match=r"there is only one.*generate the prompts one by one"):
        host.generate(PROMPTS, logits_processor=Single(), **FREE)


def test_transformers_own_processors(exported: Callable[..., Path], checkpoint: Callable[[str], Path]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers import generation

    model = load(exported("llama", include_sampler=False))
    original = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint("llama"), attn_implementation="eager"
    ).eval()
    ids = torch.tensor([[0, 0, 17, 40, 5, 261], [90, 91, 92, 93, 94, 95], [0, 0, 0, 0, 0, 33]])

    class Odd(generation.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == input_ids.shape[1] % 2, -torch.inf)

    for processors in (
        [generation.NoRepeatNGramLogitsProcessor(2), generation.SuppressTokensLogitsProcessor([5, 9])],
        transformers.LogitsProcessorList([Odd()]),
        [generation.NoBadWordsLogitsProcessor([[122], [98, 249]], eos_token_id=2)],
    ):
        options = {"do_sample": False, "max_new_tokens": 10, "logits_processor": processors}
        wanted = original.generate(ids, **options).tolist()
        assert wanted != original.generate(ids, do_sample=False, max_new_tokens=10).tolist()
        assert model.generate(ids, **options).sequences.tolist() == wanted
