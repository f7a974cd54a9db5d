"""A caller's logits processors and stopping criteria, compared with transformers', row by row and token by token."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.runtime import CausalLM, load
from tests.helpers.fake_package import PAD, VOCAB, compilation
from tests.helpers.fake_reference import logits as reference_logits
from tests.helpers.requests import PROMPTS

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

    output = host.generate(
        PROMPTS[1], logits_processor=second_best, prefill_chunk_size=chunk, **FREE
    )
    history = list(PROMPTS[1])
    for step, token in enumerate(output.token_ids[0]):
        expected = reference_logits(history)
        assert seen[step][0] == history
        assert seen[step][1].shape == (1, VOCAB)
        assert seen[step][1][0] == pytest.approx(expected, abs=1e-3)
        assert token == np.argsort(-expected)[1]
        history.append(token)
    assert len(seen) == 8


def test_each_row_has_copies_of_the_processors(fake_model: Callable[..., CausalLM]) -> None:
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


def test_rows_of_the_same_prompt_have_copies_of_the_processors(host: CausalLM) -> None:
    def alternates(ids: Any, scores: Any) -> Any:
        scores[:, ids[0, -1] % 2 :: 2] = -np.inf
        return scores

    options = {**FREE, "do_sample": True, "seed": 5, "logits_processor": alternates}
    twice = [prompt for prompt in PROMPTS for _ in range(2)]
    output = host.generate(PROMPTS, num_return_sequences=2, **options)
    assert output.token_ids == host.generate(twice, **options).token_ids
    for prompt, row in zip(twice, output.token_ids, strict=True):
        assert all((a - b) % 2 for a, b in itertools.pairwise([prompt[-1], *row]))


def test_processors_do_not_affect_the_next_call(host: CausalLM) -> None:
    wanted = host.generate(PROMPTS, **FREE).token_ids
    forced = host.generate(
        PROMPTS, logits_processor=lambda ids, scores: scores * 0 + np.eye(1, VOCAB, 9), **FREE
    )
    assert forced.token_ids == [[9] * 8] * 4
    assert host.generate(PROMPTS, **FREE).token_ids == wanted
    same = host.generate(
        PROMPTS, logits_processor=lambda ids, scores: scores, stopping_criteria=[], **FREE
    )
    assert same.token_ids == wanted


def test_sampling_and_stopping_go_with_it(
    host: CausalLM, fake_model: Callable[..., CausalLM]
) -> None:
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


def test_a_processor_that_cannot_be_copied(host: CausalLM) -> None:
    class Single:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is only one")

        def __call__(self, ids: Any, scores: Any) -> Any:
            return scores

    assert host.generate(PROMPTS[0], logits_processor=Single(), **FREE).token_ids
    with pytest.raises(ValueError, match=r"there is only one.*generate each prompt on its own"):
        host.generate(PROMPTS, logits_processor=Single(), **FREE)


def test_transformers_own_processors(
    exported: Callable[..., Path], checkpoint: Callable[[str], Path]
) -> None:
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
            return scores.masked_fill(
                torch.arange(scores.shape[1]) % 2 == input_ids.shape[1] % 2, -torch.inf
            )

    for processors in (
        [
            generation.NoRepeatNGramLogitsProcessor(2),
            generation.SuppressTokensLogitsProcessor([5, 9]),
        ],
        transformers.LogitsProcessorList([Odd()]),
        [generation.NoBadWordsLogitsProcessor([[122], [98, 249]], eos_token_id=2)],
    ):
        options = {"do_sample": False, "max_new_tokens": 10, "logits_processor": processors}
        wanted = original.generate(ids, **options).tolist()
        assert wanted != original.generate(ids, do_sample=False, max_new_tokens=10).tolist()
        assert model.generate(ids, **options).sequences.tolist() == wanted


TWELVE = {**FREE, "max_new_tokens": 12}
WIDTH = max(map(len, PROMPTS))


@pytest.mark.parametrize("double_buffering", [True, False])
@pytest.mark.parametrize("flush_every", [None, 5])
def test_a_criterion_ends_the_rows_that_it_names(
    flush_every: int | None, double_buffering: bool, model: CausalLM
) -> None:
    """It sees what transformers would show it, whatever was sampled ahead."""
    free = model.generate(PROMPTS, **TWELVE)
    shown = []

    def third_of_row_1_and_fifth_of_row_3(ids: Any, scores: Any) -> Any:
        assert scores is None
        shown.append(ids)
        return [False, ids.shape[1] == WIDTH + 3, False, ids.shape[1] == WIDTH + 5]

    options = {**TWELVE, "flush_every": flush_every, "double_buffering": double_buffering}
    output = model.generate(
        PROMPTS, stopping_criteria=[third_of_row_1_and_fifth_of_row_3], **options
    )
    lengths = [12, 3, 12, 5]
    assert output.token_ids == [row[:n] for row, n in zip(free.token_ids, lengths, strict=True)]
    assert output.finish_reasons == ["length", "stop", "length", "stop"]
    assert [ids.shape for ids in shown] == [(4, WIDTH + n) for n in range(1, 13)]
    assert shown[-1].tolist() == output.sequences.tolist()
    assert (shown[-1][1, WIDTH + 3 :] == PAD).all()
    assert output.texts is not None
    assert model.tokenizer is not None
    whole = model.tokenizer.decode(free.token_ids[1][:3])
    assert output.texts[1] == whole.removesuffix("\ufffd")  # the last byte only begins a character


def test_several_rows_of_a_prompt_are_rows_of_the_batch(model: CausalLM) -> None:
    shown: list[tuple[int, ...]] = []

    def all_but_the_first(ids: Any, scores: Any) -> Any:
        shown.append(ids.shape)
        return [False, *[ids.shape[1] == WIDTH + 3] * 7]

    options = {**TWELVE, "do_sample": True, "seed": 5, "num_return_sequences": 2}
    free = model.generate(PROMPTS, **options)
    output = model.generate(PROMPTS, stopping_criteria=all_but_the_first, **options)
    assert shown == [(8, WIDTH + n) for n in range(1, 13)]
    assert output.token_ids == [free.token_ids[0], *(row[:3] for row in free.token_ids[1:])]


def test_every_form_of_a_criterion_and_of_its_answer(model: CausalLM) -> None:
    def after(n: int, answer: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda ids, scores: answer(ids.shape[1] >= WIDTH + n)

    for criteria in (
        after(2, bool),
        [after(4, bool), after(2, np.bool_)],
        (after(2, lambda met: np.full((4, 1), met)),),
        [after(2, lambda met: [met] * 4)],
    ):
        output = model.generate(PROMPTS, stopping_criteria=criteria, **TWELVE)
        assert [len(row) for row in output.token_ids] == [2] * 4
    for answer in (None, "yes", [True] * 3, 1, np.zeros(4)):
        with pytest.raises(
            ValueError, match=r"a stopping criterion returned .*a bool for each of the 4 rows"
        ):
            model.generate(
                PROMPTS, stopping_criteria=lambda ids, scores, answer=answer: answer, **TWELVE
            )
    with pytest.raises(ZeroDivisionError):
        model.generate(PROMPTS, stopping_criteria=lambda ids, scores: 1 // 0, **TWELVE)
    assert (
        model.generate(PROMPTS, **TWELVE).token_ids
        == model.generate(PROMPTS, stopping_criteria=[], **TWELVE).token_ids
    )


def test_a_criterion_that_writes_into_its_array_changes_nothing(model: CausalLM) -> None:
    shown: list[int] = []

    def scribbles(ids: Any, scores: Any) -> bool:
        ids[:] = 0
        return False

    options = {**TWELVE, "max_new_tokens": 2}
    model.generate(
        [[5, 6]],
        stopping_criteria=[scribbles, lambda ids, _: bool(shown.append(ids[0, 0]))],
        **options,
    )
    assert shown == [5, 5]


def test_rows_that_end_by_themselves_meanwhile(model: CausalLM) -> None:
    options = {**TWELVE, "eos_token_id": tuple(range(3, 320, 4)), "max_new_tokens": 30}
    free = model.generate(PROMPTS, **options)
    assert len({len(row) for row in free.token_ids}) > 1
    seen: list[int] = []
    never = model.generate(
        PROMPTS, stopping_criteria=lambda ids, scores: bool(seen.append(ids.shape[1])), **options
    )
    assert (never.token_ids, never.finish_reasons) == (free.token_ids, free.finish_reasons)
    assert seen == list(range(WIDTH + 1, WIDTH + 1 + max(map(len, free.token_ids))))


def test_stop_strings_streams_and_optional_outputs_go_together(
    fake_model: Callable[..., CausalLM],
) -> None:
    model = fake_model(logprobs=True)
    free = model.generate("ab", **TWELVE)
    streamed: list[int] = []

    class Recorder:
        def put(self, value: Any) -> None:
            streamed.extend(np.asarray(value).reshape(-1).tolist())

        def end(self) -> None:
            streamed.append(-1)

    output = model.generate(
        "ab",
        stopping_criteria=lambda ids, scores: ids.shape[1] == 3 + 4,
        streamer=Recorder(),
        **TWELVE,
    )
    assert output.token_ids == [free.token_ids[0][:4]]
    assert streamed == [*output.sequences[0].tolist(), -1]
    assert output.logprobs is not None
    assert free.logprobs is not None
    assert output.logprobs.tolist() == free.logprobs[:, :4].tolist()
    stop = model.tokenizer.decode(free.token_ids[0][:2])[-1]  # type: ignore[union-attr]
    stopped = model.generate(
        "ab", stop_strings=stop, stopping_criteria=lambda ids, scores: False, **TWELVE
    )
    wanted = model.generate("ab", stop_strings=stop, **TWELVE)
    assert (stopped.token_ids, stopped.texts, stopped.finish_reasons) == (
        *(wanted.token_ids, wanted.texts, wanted.finish_reasons),
    )


def test_time_ends_every_row_after_the_token_that_it_finds(
    model: CausalLM, fake_model: Callable[..., CausalLM]
) -> None:
    free = model.generate(PROMPTS, **TWELVE)
    output = model.generate(PROMPTS, max_time=1e-9, **TWELVE)
    assert output.token_ids == [row[:1] for row in free.token_ids]
    assert output.finish_reasons == ["time"] * 4
    roomy = model.generate(PROMPTS, max_time=1e6, **TWELVE)
    assert (roomy.token_ids, roomy.finish_reasons) == (free.token_ids, free.finish_reasons)
    # A slow criterion lets it run out in between.
    slow = model.generate(
        PROMPTS,
        max_time=0.2,
        stopping_criteria=lambda ids, scores: bool(time.sleep(0.11)),
        **TWELVE,
    )
    assert 1 <= len(slow.token_ids[0]) < 12
    assert slow.finish_reasons == ["time"] * 4
    own = fake_model(generation_config={"max_time": 1e-9})
    assert own.generate(PROMPTS, **TWELVE).finish_reasons == ["time"] * 4
    assert own.generate(PROMPTS, max_time=None, **TWELVE).finish_reasons == ["length"] * 4


def test_transformers_own_criteria_see_tensors_and_end_the_same_rows(model: CausalLM) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    free = model.generate(PROMPTS, **TWELVE)
    token = free.token_ids[1][2]

    class SawToken(transformers.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            assert isinstance(input_ids, torch.Tensor)
            return (input_ids[:, WIDTH:] == token).any(-1)

    expected = [row[: row.index(token) + 1] if token in row else row for row in free.token_ids]
    for criteria in ([SawToken()], transformers.StoppingCriteriaList([SawToken()]), SawToken()):
        assert model.generate(PROMPTS, stopping_criteria=criteria, **TWELVE).token_ids == expected
    lists = transformers.StoppingCriteriaList
    shown = []
    model.generate(
        PROMPTS, stopping_criteria=lists([lambda ids, scores: bool(shown.append(ids))]), **TWELVE
    )
    assert isinstance(shown[0], torch.Tensor)
    from transformers.generation import EosTokenCriteria, MaxLengthCriteria

    short = model.generate(
        PROMPTS, stopping_criteria=lists([MaxLengthCriteria(WIDTH + 4)]), **TWELVE
    )
    assert [len(row) for row in short.token_ids] == [4] * 4
    assert (
        model.generate(
            PROMPTS, stopping_criteria=lists([EosTokenCriteria(token)]), **TWELVE
        ).token_ids
        == expected
    )
