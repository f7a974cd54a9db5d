"""Schemas on a real model: random ones, and what it says within them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qsample import AutoModelForCausalLM
from qsample.runtime import CausalLM, load
from tests.conftest import made_once
from tests.helpers.schema_answers import ANY_TOKEN, OWN_TOKENS, check_answers
from tests.real.conftest import GGUF

pytestmark = pytest.mark.real
pytest.importorskip("outlines_core")


@pytest.fixture(scope="module")
def model(real_folder: Path, shared_folder: Path) -> CausalLM:
    path = made_once(
        shared_folder / "smollm2-grammars",
        lambda folder: AutoModelForCausalLM.from_pretrained(
            str(real_folder / GGUF), grammars=True
        ).export(folder),
    )
    return load(path)


@pytest.mark.parametrize(
    "count", [16, pytest.param(2000, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("temperature", [OWN_TOKENS, ANY_TOKEN])
def test_answers_to_random_schemas(model: CausalLM, count: int, temperature: float) -> None:
    check_answers(model, count, seed=count, temperature=temperature)


def test_what_the_model_knows(model: CausalLM) -> None:
    schema = {
        "type": "object",
        "properties": {"country": {"const": "France"}, "capital": {"type": "string"}},
        "required": ["country", "capital"],
    }
    chat = [{"role": "user", "content": "What is the capital of France? Answer in JSON."}]
    grammar = model.grammar(json=schema)
    for limit in (grammar.shortest, 40):
        output = model.generate([chat], grammar=grammar, do_sample=False, max_new_tokens=limit)
        answer = json.loads(output.texts[0])
        assert answer["country"] == "France"
    assert answer["capital"] == "Paris"
