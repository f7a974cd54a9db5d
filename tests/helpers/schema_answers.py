"""Answers of a model to random schemas, at limits from the shortest answer up, judged by jsonschema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np

from qsample.request.grammar import Form, InvalidGrammarError
from qsample.request.structured.grammars import Wish
from qsample.request.structured.not_regular import NotRegularError
from qsample.request.structured.tables import TokenGrammar
from qsample.runtime import CausalLM, SamplingParams
from tests.helpers.random_schemas import random_schema

# Temperatures at which any allowed token is as likely as any other, and at which the model has its say.
ANY_TOKEN, OWN_TOKENS = 1e4, 1.0
MORE_TOKENS = 40
MAX_TOKENS = 160


def compiled_schema(
    model: CausalLM, rng: np.random.Generator
) -> tuple[dict[str, Any], TokenGrammar]:
    """A random schema whose tables are not too large, and whose shortest answer is not too long."""
    while True:
        schema = random_schema(rng)
        try:
            tables = model.grammars.tables(Wish(Form("json_schema", schema)))
        except (NotRegularError, InvalidGrammarError):  # too large, or without a valid document
            continue
        if tables.shortest <= MAX_TOKENS and tables.transitions.nbytes < 2 << 20:
            return schema, tables


def check_answers(
    model: CausalLM, count: int, seed: int, temperature: float, rows: int = 8
) -> None:
    """Assert that the answers to `count` random schemas are valid, in batches of as many schemas as rows.

    Every fourth answer has room for the shortest answer only.
    """
    rng = np.random.default_rng(seed)
    for start in range(0, count, rows):
        chosen = [compiled_schema(model, rng) for _ in range(rows)]
        params = [
            SamplingParams(
                temperature=temperature,
                max_new_tokens=tables.shortest
                + (0 if (start + row) % 4 == 0 else int(rng.integers(MORE_TOKENS))),
            )
            for row, (_, tables) in enumerate(chosen)
        ]
        output = model.generate(
            ["Here is the JSON:"] * rows,
            params,
            seed=[int(number) for number in rng.integers(1 << 30, size=rows)],
            grammar=[tables for _, tables in chosen],
            outputs=(),
        )
        for row, (schema, _) in enumerate(chosen):
            where = json.dumps([schema, params[row].max_new_tokens])
            assert output.finish_reasons[row] == "stop", where
            try:
                document = json.loads(output.texts[row])
            except ValueError:
                raise AssertionError(f"{output.texts[row]!r} is not JSON: {where}") from None
            jsonschema.validate(document, schema)
