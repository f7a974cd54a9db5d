"""Parameter arrays: the contract's names, dtypes and shapes; and the seed of each row."""

from __future__ import annotations

from collections.abc import Callable

from qsample.runtime import CausalLM, SamplingParams
from qsample.runtime.parameters import parameter_arrays
from tests.helpers.fake_package import fake_interface
from tests.helpers.filters import FILTERS


def test_parameter_arrays_follow_the_contract() -> None:
    interface = fake_interface(logit_bias=True, allowed_tokens=True, filters=FILTERS)
    params = [SamplingParams(temperature=0.5, top_k=3, eos_token_id=(7, 8), logit_bias={5: 1.0}), SamplingParams()]
    arrays = parameter_arrays(interface, params, [3, 4], 100, default_stops=(2,))
    sizes = interface.sizes | {"B": 2, "E": 2, "N": 1, "D": 1, "Q": 1, "L": 1}
    for spec in interface.parameters:
        array = arrays.pop(spec.name)
        assert (array.dtype.name, array.shape) == (spec.dtype, spec.shape(sizes)), spec.name
        assert array.flags.c_contiguous
        if spec.name == "stop_ids":
            assert array.tolist() == [[7, 8], [2, -1]]
        elif spec.name == "max_length":
            assert array.tolist() == [100, 100]
        elif spec.off is not None:
            assert (array[1] == spec.off).all(), spec.name
    assert not arrays


def test_no_stop_ids_is_one_column_of_padding(fake_model: Callable[..., CausalLM]) -> None:
    arrays = parameter_arrays(fake_interface(), [SamplingParams(eos_token_id=())], [1], 10, default_stops=(2,))
    assert arrays["stop_ids"].tolist() == [[-1]]


PROMPTS = [[5, 6, 7], [9, 200, 31, 4, 5, 6, 7, 8, 9, 10, 11], [77], [50, 51, 52, 53, 54]]


def test_where_seeds_come_from(model: CausalLM) -> None:
    short = SamplingParams(max_new_tokens=1)
    seeded = SamplingParams(max_new_tokens=1, seed=9)
    assert model.generate(PROMPTS[:2], short, seed=5).seeds == [5, 6]
    assert model.generate(PROMPTS[:2], short, seed=[5, 5]).seeds == [5, 5]
    assert model.generate(PROMPTS[:2], seeded).seeds == [9, 10]
    assert model.generate(PROMPTS[:2], [seeded, seeded]).seeds == [9, 9]
    assert model.generate(PROMPTS[:2], [seeded, seeded], seed=1).seeds == [1, 2]
    assert model.generate(PROMPTS[:2], short, seed=2**63 - 1).seeds == [2**63 - 1, 0]
    half = model.generate(PROMPTS[:2], [seeded, short]).seeds
    assert half[0] == 9
    assert len({*half, *model.generate(PROMPTS[:2], short).seeds}) == 4
