"""Keywords of transformers: each is known, harmless values pass, others get an error that names them."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest

from qsample.errors import unknown
from qsample.huggingface.keywords import FROM_PRETRAINED, GENERATE, check_from_pretrained, take_refused


@pytest.mark.parametrize(("table", "name"), [(table, name) for table in (GENERATE, FROM_PRETRAINED) for name in table])
def test_a_value_that_asks_for_something_is_refused_by_name(table: Any, name: str) -> None:
    harmless = (None, *table[name].harmless)
    for value in ("something", 3, -0.5, [7], {"a": 1}, np.ones((2, 2)), object()):
        with pytest.raises(ValueError, match=f"^{name} is .*no meaning in qsample: {re.escape(table[name].instead)}"):
            take_refused(table, {name: value})
    for value in harmless:
        given = {name: value, "other": 5}
        take_refused(table, given)
        assert given == {"other": 5}


def test_booleans_and_numbers_are_told_apart() -> None:
    with pytest.raises(ValueError, match="early_stopping is True"):
        take_refused(GENERATE, {"early_stopping": True})
    with pytest.raises(ValueError, match="length_penalty is True"):
        take_refused(GENERATE, {"length_penalty": True})
    take_refused(GENERATE, {"length_penalty": 1.0})
    with pytest.raises(ValueError, match="token_type_ids is of type ndarray"):
        take_refused(GENERATE, {"token_type_ids": np.zeros((1, 3))})


def test_every_keyword_of_transformers_generate_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    from qsample.runtime.arguments import _OF_GENERATE, _SAMPLING

    names = set(inspect.signature(transformers.GenerationMixin.generate).parameters) - {"self", "kwargs"}
    names |= {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    names |= set(transformers.utils.generic.TransformersKwargs.__optional_keys__)
    assert names - _OF_GENERATE - _SAMPLING - GENERATE.keys() == {"transformers_version"}


def test_what_transformers_fills_in_by_itself_is_harmless() -> None:
    transformers = pytest.importorskip("transformers")
    given = transformers.GenerationConfig._get_default_generation_params()
    take_refused(GENERATE, given)
    assert not given.keys() & GENERATE.keys()


def test_every_keyword_of_transformers_from_pretrained_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    from qsample import AutoModelForCausalLM

    load = transformers.PreTrainedModel.from_pretrained
    names = set(inspect.signature(load).parameters) - {"model_args", "kwargs"}
    names |= set(re.findall(r'kwargs\.pop\("([a-z]\w*)"', inspect.getsource(load)))
    assert "device_map" in names
    own = set(inspect.signature(AutoModelForCausalLM.from_pretrained).parameters)
    assert names - own - FROM_PRETRAINED.keys() == set()


def test_keywords_that_nobody_knows() -> None:
    with pytest.raises(TypeError, match="from_pretrained has no argument 'reversion'; did you mean 'revision'"):
        check_from_pretrained({"device_map": None, "reversion": "main"}, {"revision", "dtype"})
    assert unknown("no such", "xyzzy", {"b", "a"}) == "no such 'xyzzy'; choose from a, b"
