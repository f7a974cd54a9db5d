"""Parameters as the arrays that the graph reads: names, dtypes and shapes; the filters of an export, from each door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as _Tokenizer
from tokenizers import models, pre_tokenizers

from qsample.contract.tensors import NOISE_STREAMS
from qsample.request.text.tokenizer import Tokenizer
from qsample.runtime import CausalLM, Engine, SamplingParams
from qsample.runtime.decode.inputs import uniforms
from qsample.runtime.decode.slots import Slots
from qsample.runtime.prepare import for_package, parameter_row
from tests.helpers.fake_package import fake_interface
from tests.helpers.filters import ASKED, FILTERS, assert_read, read_by_the_graph, record_parameters


def test_a_row_follows_the_contract() -> None:
    interface = fake_interface(logit_bias=True, allowed_tokens=True, filters=FILTERS)
    asked = SamplingParams(
        temperature=0.5,
        top_k=3,
        eos_token_id=(7, 8),
        logit_bias={5: 1.0},
        bad_words_ids=((1, 2), (3,)),
    )
    one, off = (
        parameter_row(interface, params, 3, 100, default_stops=(2,))
        for params in (asked, SamplingParams())
    )
    sizes = interface.sizes | {"B": 1, "E": 1, "N": 1, "D": 1, "Q": 1, "L": 1}
    for spec in interface.parameters:
        array = off.pop(spec.name)
        assert (array.dtype.name, array.shape) == (spec.dtype, spec.shape(sizes)[1:]), spec.name
        assert one.pop(spec.name).dtype == spec.dtype
        assert array.flags.c_contiguous
        if spec.name == "stop_ids":
            assert array.tolist() == [2]
        elif spec.name == "max_length":
            assert array == 100
        elif spec.off is not None:
            assert (array == spec.off).all(), spec.name
    assert not one
    assert not off
    row = parameter_row(interface, asked, 3, 100)
    assert row["temperature"] == 0.5
    assert row["stop_ids"].tolist() == [7, 8]
    none = parameter_row(interface, SamplingParams(eos_token_id=()), 1, 10, default_stops=(2,))
    assert none["stop_ids"].tolist() == [-1], "a column of padding"
    assert (row["logit_bias_ids"].tolist(), row["logit_bias"].tolist()) == ([5], [1.0])
    assert row["bad_words_ids"].tolist() == [[1, 2], [-1, 3]]


READ = read_by_the_graph()
SHORT = {"max_new_tokens": 4, "eos_token_id": (), "seed": 3}


def test_each_door_reaches_the_graph(
    fake_model: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fake_model(filters=FILTERS)
    asking = fake_model(filters=FILTERS, generation_config={"do_sample": True, "top_k": 0, **ASKED})
    begun = record_parameters(monkeypatch)
    model.generate("In", SamplingParams(**ASKED, **SHORT))
    model.generate("In", **ASKED, **SHORT)
    asking.generate("In", **SHORT)
    with Engine(model, slots=1) as engine:
        engine.add_request("In", **ASKED, **SHORT).result(60)
    assert len(begun) == 4
    for row in begun:
        assert_read(row, READ)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("typical_p", "typical_p"),
        ("xtc_probability", "xtc"),
        ("bad_words", "bad_words_ids"),
        ("mirostat", "mirostat"),
        ("penalty_last_n", "penalty_last_n"),
        ("adaptive_target", "adaptive_p"),
    ],
)
def test_a_filter_that_the_package_lacks(
    field: str, name: str, fake_model: Callable[..., CausalLM]
) -> None:
    message = (
        rf"{field} is .*, and the package was exported with the filters dry; export the model again with "
        rf"filters=\['dry', '{name}'\] \(--filter\), or give {field}=.* to go without"
    )
    with pytest.raises(ValueError, match=message):
        fake_model(filters=("dry",)).generate("In", **{field: ASKED[field]})
    config = {"do_sample": True, "top_k": 0}
    model = fake_model(generation_config=config | {field: ASKED[field]})
    with pytest.warns(UserWarning, match=f'asks for "{field}", which the package was made without'):
        own = model.generate("In", **SHORT).token_ids
    assert own == fake_model(generation_config=config).generate("In", **SHORT).token_ids


def test_a_word_is_forbidden_behind_a_space_too_if_that_is_other_tokens() -> None:
    vocab = {"a": 0, "Ġ": 1, "Ġa": 2, "b": 3, "Ġab": 4}
    backend = _Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a"), ("Ġa", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    params = SamplingParams(bad_words=(" a", "b", "ab"), bad_words_ids=((3, 3),))
    face = fake_interface(filters=("bad_words_ids",))
    row = parameter_row(face, for_package(face, params, Tokenizer(backend)), 1, 9)
    assert row["bad_words_ids"].tolist() == [[3, 3], [-1, 0], [-1, 2], [-1, 3], [0, 3], [-1, 4]]


def test_states_of_a_row_that_begins_moves_and_ends(fake_model: Callable[..., CausalLM]) -> None:
    """The fake graph counts a row's tokens in `mirostat_mu` and `adaptive_error`."""
    model = fake_model(filters=FILTERS)
    slots = Slots(model.sessions, 3, 32)

    def begin(slot: int, seed: int, **options: Any) -> None:
        params = SamplingParams(max_new_tokens=20, eos_token_id=(), **options)
        prompt = np.array([5, 6], dtype=np.int64)
        slots.begin(
            slot,
            prompt,
            seed,
            parameter_row(
                model.interface, for_package(model.interface, params, model.tokenizer), 2, 32
            ),
        )
        slots.prefill(slot, prompt, emit=True)

    def check(slot: int, seed: int, tokens: int, read: dict[str, Any]) -> None:
        assert [slots._state[name].read()[slot] for name in ("mirostat_mu", "adaptive_error")] == [
            tokens
        ] * 2
        rows = {name: buffer.read()[slot] for name, buffer in slots._parameters.buffers.items()}
        assert_read(rows, read)
        for name, stream in NOISE_STREAMS.items():
            assert (slots._state[name].read()[slot] == uniforms(seed, 32, stream)).all()

    begin(1, 2**62 + 1, **ASKED)
    slots.decode(), slots.decode()
    check(1, 2**62 + 1, 3, READ)
    begin(
        0, 8, bad_words_ids=[[7, 8, 9], [5], [6]]
    )  # wider: four sequences of four tokens from now on
    wide = {
        **READ,
        "bad_words_ids": [[-1, -1, *row] for row in READ["bad_words_ids"]] + [[-1] * 4] * 2,
    }
    check(1, 2**62 + 1, 3, wide)
    check(
        0,
        8,
        1,
        {
            "bad_words_ids": [[-1, 7, 8, 9], [-1, -1, -1, 5], [-1, -1, -1, 6], [-1] * 4],
            "mirostat_tau": 0,
        },
    )
    slots.decode()
    slots.move(1, 2, 0)
    check(2, 2**62 + 1, 4, wide)
    slots.stop(2)
    begin(2, 9)
    check(
        2,
        9,
        1,
        {"typical_p": 1, "dry_sequence_breakers": [-1, -1], "bad_words_ids": [[-1] * 4] * 4},
    )
