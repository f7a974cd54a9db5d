"""Rows of parameters: the contract's names, dtypes and shapes."""

from __future__ import annotations

from qsample.runtime import SamplingParams
from qsample.runtime.parameters import parameter_row
from tests.helpers.fake_package import fake_interface
from tests.helpers.filters import FILTERS


def test_a_row_follows_the_contract() -> None:
    interface = fake_interface(logit_bias=True, allowed_tokens=True, filters=FILTERS)
    asked = SamplingParams(
        temperature=0.5, top_k=3, eos_token_id=(7, 8), logit_bias={5: 1.0}, bad_words_ids=((1, 2), (3,))
    )
    one, off = (parameter_row(interface, params, 3, 100, default_stops=(2,)) for params in (asked, SamplingParams()))
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
    assert (row["logit_bias_ids"].tolist(), row["logit_bias"].tolist()) == ([5], [1.0])
    assert row["bad_words_ids"].tolist() == [[1, 2], [-1, 3]]


def test_no_stop_ids_is_one_column_of_padding() -> None:
    row = parameter_row(fake_interface(), SamplingParams(eos_token_id=()), 1, 10, default_stops=(2,))
    assert row["stop_ids"].tolist() == [-1]
