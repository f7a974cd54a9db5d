"""The options of an engine, what it refuses before it takes a request, and outputs in order; functions
and images of a request."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample.errors import EngineClosedError
from qsample.runtime import CausalLM, Engine, SamplingParams
from qsample.runtime.engine import EngineOptions, _adapters_of, _check_call, _OrderedOutputs
from tests.helpers.fake_images import ROWS, picture, placeholders
from tests.helpers.requests import GREEDY


def test_options_by_default() -> None:
    options = EngineOptions()
    assert (
        options.slots,
        options.prefill_chunk_size,
        options.flush_every,
        options.saved_states,
    ) == (None,) * 4
    assert (options.max_waiting, options.double_buffering, options.reuse_sampled_tokens) == (
        64,
        True,
        False,
    )
    assert (options.prefixes, options.prefix_cache_dir) == ((), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots is 0; give an integer >= 1"),
        ({"max_waiting": -1}, "max_waiting is -1; give an integer >= 0"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size is 0; give an integer >= 1"),
        ({"saved_states": -1}, "saved_states is -1; give an integer >= 0"),
        ({"prefix_cache_dir": "a", "reuse_sampled_tokens": True}, "leave either out"),
        ({"prefixes": "file"}, "prefixes is 'file'; give a list of files"),
        ({"prefixes": ["a", ""]}, "prefixes is empty; give a path"),
        ({"prefix_cache_dir": ""}, "prefix_cache_dir is empty; give a path"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(**options)
    EngineOptions(slots=1, max_waiting=0, prefill_chunk_size=1, saved_states=0, prefixes=["a"])
    EngineOptions(prefix_cache_dir="a", reuse_sampled_tokens=False)
    EngineOptions(reuse_sampled_tokens=True)


def test_what_an_engine_refuses(model: CausalLM) -> None:
    with Engine(model, slots=2, max_waiting=1) as engine:
        assert repr(engine) == f"Engine({model!r}, 2 slots of {engine.capacity} tokens, 0 requests)"
        for options, message in (
            ({"n": 2}, "add_request adds one request; add_requests takes num_return_sequences"),
            ({"priority": "a"}, "priority is 'a'; give an integer"),
            ({"timeout": "a"}, "timeout is 'a'"),
            ({"stopping_criteria": len}, "stopping_criteria are for generate; cancel"),
            ({"logits_processor": len}, "logits_processor is for generate;"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.add_request([5], SamplingParams(), **options)
        with pytest.raises(ValueError, match="2 prompts were given; add them one by one"):
            engine.add_request([[5], [6]])
        with pytest.raises(
            ValueError, match="num_return_sequences is 4 and this engine takes 3; raise max_waiting"
        ):
            engine.add_requests([5], SamplingParams(), num_return_sequences=4)
        stats = engine.stats()
        assert (stats.slots, stats.max_waiting, stats.running, stats.waiting) == (2, 1, 0, 0)
        assert (stats.running_adapters, stats.waiting_adapters) == ((), ())
        with pytest.raises(TypeError, match="an Engine cannot be pickled"):
            pickle.dumps(engine)
        assert not engine.closed
    assert engine.closed
    assert repr(engine).endswith("closed)")
    engine.close()
    for _ in range(2):
        with pytest.raises(EngineClosedError, match="the engine is closed; make a new one"):
            engine.add_request([5])


def test_calls_with_callbacks_of_a_batch() -> None:
    nothing: Any = SimpleNamespace(stopping_criteria=None, logits_processor=None)
    _check_call(nothing)


def test_names_of_adapters() -> None:
    def row(name: str | None) -> Any:
        adapter = None if name is None else SimpleNamespace(name=name)
        return SimpleNamespace(request=SimpleNamespace(adapter=adapter))

    assert _adapters_of(map(row, ["b", None, "a", "b"])) == ("a", "b")
    assert _adapters_of([]) == ()


class Waiting:
    """A request as far as its outputs are concerned."""

    def __init__(self, output: Any, *, done: bool = True) -> None:
        self.done, self._output = done, output

    def result(self) -> Any:
        if isinstance(self._output, Exception):
            raise self._output
        return self._output


def test_outputs_come_in_order_and_errors_in_their_places() -> None:
    outputs = _OrderedOutputs((LookupError,))
    assert not outputs
    assert not outputs.is_next_there

    def fail(error: Exception) -> Any:
        raise error

    late = Waiting("second", done=False)
    failed = ValueError("of a result")
    for add in (
        lambda: Waiting("first"),
        lambda: late,
        lambda: fail(ValueError("of an addition")),
        lambda: Waiting(failed),
    ):
        outputs.add(add)  # type: ignore[arg-type]
    assert outputs
    assert not outputs.fails
    assert outputs.is_next_there
    assert outputs.take_next() == "first"
    assert not outputs.is_next_there
    late.done = True
    assert outputs.is_next_there
    assert outputs.take_next() == "second"
    assert outputs.is_next_there, "an error need not be waited for"
    error = outputs.take_next()
    assert isinstance(error, ValueError)
    assert str(error) == "of an addition"
    assert outputs.take_next() is failed
    assert not outputs
    outputs.add(lambda: fail(LookupError("raised")))
    assert outputs.fails
    with pytest.raises(LookupError, match="raised"):
        outputs.take_next()


def test_a_closed_engine_has_no_thread(model: CausalLM) -> None:
    before = threading.active_count()
    engine = Engine(model, slots=1)
    assert engine.drain(5)
    assert engine.closed
    engine.close()
    assert threading.active_count() == before


def test_a_function_chooses_each_token_of_its_requests(
    fake_model: Callable[..., CausalLM],
) -> None:
    model = fake_model(allowed_tokens=True)
    newest = [40, 50]

    def next_number(step: Any, mask: np.ndarray) -> None:
        for row in range(2):
            if step is not None and step.emitted[row]:
                assert step.tokens[row] == newest[row]
                newest[row] += 1
            mask[row] = 0
            mask[row, newest[row] // 32] = 1 << newest[row] % 32

    params = SamplingParams(temperature=1.0, max_new_tokens=4, eos_token_id=())
    with Engine(model, slots=3) as engine:
        free = engine.add_request([5], params, seed=3)
        rows = engine.add_requests([6], params, num_return_sequences=2, allowed_tokens=next_number)
        assert [row.result(60).token_ids for row in rows] == [
            [40, 41, 42, 43],
            [50, 51, 52, 53],
        ]
        assert free.result(60).token_ids == model.generate([5], params, seed=3).token_ids[0]


def test_images_of_a_request_are_read_before_it_waits(
    fake_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fake_model(image=ROWS)
    prompt, images = [5, *placeholders(4), 6], [picture(8, 8)]
    with Engine(model, slots=1, max_waiting=0) as engine:
        with monkeypatch.context() as failing:
            failing.setattr(model.images, "compute_features", None)
            with pytest.raises(TypeError, match="NoneType"):
                engine.add_request(prompt, images=images)
        # Its place is free again.
        request = engine.add_request(prompt, GREEDY, images=images, timeout=60)
        expected = model.generate([prompt], GREEDY, images=[images])
        assert request.result(60).token_ids == expected.token_ids[0]
