"""Rows that a caller's criteria end, or the clock: beside transformers' own criteria, and one token at a time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qsample.package import Package
from qsample.runtime import CausalLM, Engine
from tests.helpers.fake_cases import PROMPTS
from tests.helpers.fake_package import PAD, compilation

FREE: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": ()}
WIDTH = max(map(len, PROMPTS))


@pytest.mark.parametrize("double_buffering", [True, False])
@pytest.mark.parametrize("flush_every", [None, 5])
def test_a_criterion_ends_the_rows_that_it_names(
    flush_every: int | None, double_buffering: bool, model: CausalLM
) -> None:
    """It sees what transformers would show it, whatever was sampled ahead."""
    free = model.generate(PROMPTS, **FREE)
    shown = []

    def third_of_row_1_and_fifth_of_row_3(ids: Any, scores: Any) -> Any:
        assert scores is None
        shown.append(ids)
        return [False, ids.shape[1] == WIDTH + 3, False, ids.shape[1] == WIDTH + 5]

    options = {**FREE, "flush_every": flush_every, "double_buffering": double_buffering}
    output = model.generate(PROMPTS, stopping_criteria=[third_of_row_1_and_fifth_of_row_3], **options)
    lengths = [12, 3, 12, 5]
    assert output.token_ids == [row[:n] for row, n in zip(free.token_ids, lengths, strict=True)]
    assert output.finish_reasons == ["length", "stop", "length", "stop"]
    assert [ids.shape for ids in shown] == [(4, WIDTH + n) for n in range(1, 13)]
    assert shown[-1].tolist() == output.sequences.tolist()
    assert (shown[-1][1, WIDTH + 3 :] == PAD).all()
    assert output.texts is not None
    assert output.texts[1] == model.tokenizer.decode(free.token_ids[1][:3])  # type: ignore[union-attr]


def test_several_rows_of_a_prompt_are_rows_of_the_batch(model: CausalLM) -> None:
    shown: list[tuple[int, ...]] = []

    def all_but_the_first(ids: Any, scores: Any) -> Any:
        shown.append(ids.shape)
        return [False, *[ids.shape[1] == WIDTH + 3] * 7]

    options = {**FREE, "do_sample": True, "seed": 5, "num_return_sequences": 2}
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
        output = model.generate(PROMPTS, stopping_criteria=criteria, **FREE)
        assert [len(row) for row in output.token_ids] == [2] * 4
    for answer in (None, "yes", [True] * 3, 1, np.zeros(4)):
        with pytest.raises(ValueError, match=r"a stopping criterion returned .*one for each of the 4 rows"):
            model.generate(PROMPTS, stopping_criteria=lambda ids, scores, answer=answer: answer, **FREE)
    with pytest.raises(ZeroDivisionError):
        model.generate(PROMPTS, stopping_criteria=lambda ids, scores: 1 // 0, **FREE)
    assert model.generate(PROMPTS, **FREE).token_ids == model.generate(PROMPTS, stopping_criteria=[], **FREE).token_ids


def test_what_a_criterion_writes_into_its_array_is_its_own(model: CausalLM) -> None:
    shown: list[int] = []

    def scribbles(ids: Any, scores: Any) -> bool:
        ids[:] = 0
        return False

    options = {**FREE, "max_new_tokens": 2}
    model.generate([[5, 6]], stopping_criteria=[scribbles, lambda ids, _: bool(shown.append(ids[0, 0]))], **options)
    assert shown == [5, 5]


def test_rows_that_end_by_themselves_meanwhile(model: CausalLM) -> None:
    options = {**FREE, "eos_token_id": tuple(range(3, 320, 4)), "max_new_tokens": 30}
    free = model.generate(PROMPTS, **options)
    assert len({len(row) for row in free.token_ids}) > 1
    seen: list[int] = []
    never = model.generate(PROMPTS, stopping_criteria=lambda ids, scores: bool(seen.append(ids.shape[1])), **options)
    assert (never.token_ids, never.finish_reasons) == (free.token_ids, free.finish_reasons)
    assert seen == list(range(WIDTH + 1, WIDTH + 1 + max(map(len, free.token_ids))))


def test_stop_strings_streams_and_optional_outputs_go_together(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(logprobs=True)
    free = model.generate("ab", **FREE)
    streamed: list[int] = []

    class Recorder:
        def put(self, value: Any) -> None:
            streamed.extend(np.asarray(value).reshape(-1).tolist())

        def end(self) -> None:
            streamed.append(-1)

    output = model.generate(
        "ab", stopping_criteria=lambda ids, scores: ids.shape[1] == 3 + 4, streamer=Recorder(), **FREE
    )
    assert output.token_ids == [free.token_ids[0][:4]]
    assert streamed == [*output.sequences[0].tolist(), -1]
    assert output.logprobs is not None
    assert free.logprobs is not None
    assert output.logprobs.tolist() == free.logprobs[:, :4].tolist()
    stop = model.tokenizer.decode(free.token_ids[0][:2])[-1]  # type: ignore[union-attr]
    stopped = model.generate("ab", stop_strings=stop, stopping_criteria=lambda ids, scores: False, **FREE)
    wanted = model.generate("ab", stop_strings=stop, **FREE)
    assert (stopped.token_ids, stopped.texts, stopped.finish_reasons) == (
        *(wanted.token_ids, wanted.texts, wanted.finish_reasons),
    )


def test_time_ends_every_row_after_the_token_that_it_finds(
    model: CausalLM, fake_model: Callable[..., CausalLM]
) -> None:
    free = model.generate(PROMPTS, **FREE)
    output = model.generate(PROMPTS, max_time=1e-9, **FREE)
    assert output.token_ids == [row[:1] for row in free.token_ids]
    assert output.finish_reasons == ["time"] * 4
    roomy = model.generate(PROMPTS, max_time=1e6, **FREE)
    assert (roomy.token_ids, roomy.finish_reasons) == (free.token_ids, free.finish_reasons)
    # A slow criterion lets it run out in between.
    slow = model.generate(PROMPTS, max_time=0.2, stopping_criteria=lambda ids, scores: bool(time.sleep(0.11)), **FREE)
    assert 1 <= len(slow.token_ids[0]) < 12
    assert slow.finish_reasons == ["time"] * 4
    own = fake_model(generation_config={"max_time": 1e-9})
    assert own.generate(PROMPTS, **FREE).finish_reasons == ["time"] * 4
    assert own.generate(PROMPTS, max_time=None, **FREE).finish_reasons == ["length"] * 4


def test_a_batch_is_followed_as_a_whole(fake_model: Callable[..., CausalLM]) -> None:
    model = fake_model(compilation=compilation(batch_size=2, ctx_len=48))
    with pytest.raises(
        ValueError, match=r"4 prompts were given .* for 2 at most; stopping_criteria and max_time follow"
    ):
        model.generate(PROMPTS, max_time=5, **FREE)


def test_an_engine_says_what_to_do_instead(model: CausalLM) -> None:
    refused = pytest.raises(ValueError, match=r"are for generate; cancel\(\) ends a request")
    with Engine(model, slots=1) as engine, refused:
        engine.add_request([5], stopping_criteria=[print])


def test_transformers_own_criteria_see_tensors_and_end_the_same_rows(model: CausalLM) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    free = model.generate(PROMPTS, **FREE)
    token = free.token_ids[1][2]

    class SawToken(transformers.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            assert isinstance(input_ids, torch.Tensor)
            return (input_ids[:, WIDTH:] == token).any(-1)

    expected = [row[: row.index(token) + 1] if token in row else row for row in free.token_ids]
    for criteria in ([SawToken()], transformers.StoppingCriteriaList([SawToken()]), SawToken()):
        assert model.generate(PROMPTS, stopping_criteria=criteria, **FREE).token_ids == expected
    lists = transformers.StoppingCriteriaList
    shown = []
    model.generate(PROMPTS, stopping_criteria=lists([lambda ids, scores: bool(shown.append(ids))]), **FREE)
    assert isinstance(shown[0], torch.Tensor)
    from transformers.generation import EosTokenCriteria, MaxLengthCriteria

    short = model.generate(PROMPTS, stopping_criteria=lists([MaxLengthCriteria(WIDTH + 4)]), **FREE)
    assert [len(row) for row in short.token_ids] == [4] * 4
    assert model.generate(PROMPTS, stopping_criteria=lists([EosTokenCriteria(token)]), **FREE).token_ids == expected


def test_a_criterion_of_ones_own_needs_no_torch(fake: Callable[..., Package]) -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'onnx']))\n"
        "from qsample.runtime import load\n"
        f"model = load({str(fake().path)!r})\n"
        "out = model.generate(input_ids=[[5, 6]], attention_mask=[[1, 1]], do_sample=False,\n"
        "    stopping_criteria=lambda ids, _: ids.size > 4,\n"
        "    generation_config={'max_new_tokens': 9}, pad_token_id=0, max_time=1e6, use_cache=True)\n"
        "print(len(out.token_ids[0]), model.config.pad_token_id, model.eval().device)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "3 None cpu\n", done.stderr
