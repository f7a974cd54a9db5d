"""Keywords of transformers: each is known, harmless values pass, others get an error that names them."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest

from qsample.addons.migrate.qefficient import (
    REFUSED_COMPILE,
    REFUSED_QAIC_CONFIG,
    REFUSED_SAMPLING_PARAMS,
)
from qsample.errors import unknown
from qsample.request.refusals import (
    ABSENT_ATTRIBUTES,
    APPLY_CHAT_TEMPLATE,
    FROM_PRETRAINED,
    GENERATE,
    IGNORED_KEYWORDS,
    UNSUPPORTED_SETTINGS,
    check_from_pretrained,
    without_refused,
)
from qsample.runtime import CausalLM
from qsample.runtime.call import accepted_keywords

TABLES = (
    GENERATE,
    UNSUPPORTED_SETTINGS,
    FROM_PRETRAINED,
    APPLY_CHAT_TEMPLATE,
    REFUSED_COMPILE,
    REFUSED_QAIC_CONFIG,
    REFUSED_SAMPLING_PARAMS,
)


@pytest.mark.parametrize(("table", "name"), [(table, name) for table in TABLES for name in table])
def test_a_value_that_asks_for_something_is_refused_by_name(table: Any, name: str) -> None:
    for value in ("something", 33, -0.5, [7], {"a": 1}, np.ones((2, 2)), object()):
        with pytest.raises(
            ValueError, match=f"^{name} is .*not supported: {re.escape(table[name].instead)}"
        ):
            without_refused(table, {name: value})
    for value in (None, *table[name].neutral):
        assert without_refused(table, {name: value, "other": 5}) == {"other": 5}


def test_booleans_and_numbers_are_told_apart() -> None:
    with pytest.raises(ValueError, match="early_stopping is True"):
        without_refused(GENERATE, {"early_stopping": True})
    with pytest.raises(ValueError, match="length_penalty is True"):
        without_refused(GENERATE, {"length_penalty": True})
    without_refused(GENERATE, {"length_penalty": 1.0})
    with pytest.raises(ValueError, match="token_type_ids is of type ndarray"):
        without_refused(GENERATE, {"token_type_ids": np.zeros((1, 3))})


def test_every_keyword_of_transformers_generate_is_known_or_refused(model: CausalLM) -> None:
    """An unknown keyword is refused by its name, so that no argument is ignored. All fields of a
    generation_config are known."""
    transformers = pytest.importorskip("transformers")

    known = accepted_keywords() | UNSUPPORTED_SETTINGS.keys() | GENERATE.keys()
    fields = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert fields - known == {"transformers_version"}
    arguments = set(inspect.signature(transformers.GenerationMixin.generate).parameters)
    arguments |= set(transformers.utils.generic.TransformersKwargs.__optional_keys__)
    for name in arguments - known - {"self", "kwargs"}:
        with pytest.raises(ValueError, match=f"generate has no argument '{name}'"):
            model.generate([5], **{name: 5})


def test_the_defaults_of_transformers_are_harmless() -> None:
    transformers = pytest.importorskip("transformers")
    given = transformers.GenerationConfig._get_default_generation_params()
    assert not without_refused(GENERATE, given).keys() & GENERATE.keys()


def test_every_keyword_of_transformers_from_pretrained_is_known_or_refused() -> None:
    transformers = pytest.importorskip("transformers")
    from qsample import AutoModelForCausalLM
    from qsample.models.keywords import OpenKeywords

    load = transformers.PreTrainedModel.from_pretrained
    names = set(inspect.signature(load).parameters) - {"model_args", "kwargs"}
    names |= set(re.findall(r'kwargs\.pop\("([a-z]\w*)"', inspect.getsource(load)))
    assert "device_map" in names
    own = {"pretrained_model_name_or_path", *OpenKeywords.__optional_keys__}
    for name in names - own - FROM_PRETRAINED.keys() - IGNORED_KEYWORDS:
        with pytest.raises(TypeError, match=f"from_pretrained has no argument '{name}'"):
            AutoModelForCausalLM.from_pretrained("model", **{name: 5})


def test_unknown_keywords_have_a_suggestion() -> None:
    with pytest.raises(
        TypeError, match="from_pretrained has no argument 'reversion'; did you mean 'revision'"
    ):
        check_from_pretrained(
            {"max_memory": None, "attn_implementation": "sdpa", "reversion": "main"},
            {"revision", "dtype"},
        )
    assert unknown("no such", "xyzzy", {"b", "a"}) == "no such 'xyzzy'; choose from a, b"


def test_attributes_that_are_absent_are_those_of_transformers_models() -> None:
    """Some are of peft's models, or of a causal model's head and base model."""
    transformers = pytest.importorskip("transformers")
    peft = {"merge_and_unload"}
    parts = {"model", "lm_head", "layers", "embed_tokens", "norm"}
    known = dir(transformers.LlamaForCausalLM)
    assert {name for name in ABSENT_ATTRIBUTES if name not in known} == peft | parts
