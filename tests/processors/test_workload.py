"""The workload of tests/processors on the processor at hand: it finds no difference, and would find one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qsample.compiler.compile import compile_package
from qsample.compiler.options import CompileOptions
from qsample.package.package import read_package
from qsample.runtime import CausalLM, load
from tests.conftest import made_once
from tests.processors.packages import CTX_LEN
from tests.processors.workload import Company, Outcome, Row, compare, random_rows


@pytest.fixture(scope="module", params=["float32", pytest.param("int4", marks=pytest.mark.ci)])
def model(
    request: pytest.FixtureRequest, exported: Callable[..., Path], shared_folder: Path
) -> CausalLM:
    portable = read_package(exported("llama", logprobs=True, logit_bias=True))
    quantized = {"weights": "int4", "block_size": 64} if request.param == "int4" else {}
    options = CompileOptions(ctx_len=CTX_LEN, max_divergence=1e6, **quantized)
    path = shared_folder / f"llama-{request.param}-alone-and-in-company"
    return load(made_once(path, lambda made: compile_package(portable, made, options)))


def test_rows_do_not_depend_on_their_company(model: CausalLM) -> None:
    rows = random_rows(24, model.interface.vocab_size, 1)
    report = compare(model, rows, 1)
    assert report["first"] == []
    assert report["comparisons"] == 4 * 24
    assert report["reused"] > 100
    assert model.sessions.rounding is not None
    if (
        not model.sessions.rounding.products.any
    ):  # on this processor, the runtime has to do something for it
        assert (
            compare(load(model.package.path, batch_invariant=False), rows[:12], 1)["differences"]
            > 0
        )


def test_a_difference_is_found_and_told(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a token, in the last bit of a log-probability, in the length."""
    plain = Company.alone

    def alone(self: Company, rows: list[Row]) -> list[Outcome]:
        outcomes = list(plain(self, rows))
        tokens, why, bits = outcomes[0]
        outcomes[0] = [tokens[0] + 1, *tokens[1:]], why, bits
        tokens, why, bits = outcomes[1]
        outcomes[1] = (
            tokens,
            why,
            np.nextafter(np.frombuffer(bits, np.float32), np.float32(1)).tobytes(),
        )
        tokens, why, bits = outcomes[2]
        outcomes[2] = tokens[:-1], why, bits[:-4]
        return outcomes

    monkeypatch.setattr(Company, "alone", alone)
    monkeypatch.setattr(
        Company, "ways", lambda self: {"in one slot": lambda rows: self._engine(rows, slots=1)}
    )
    report = compare(model, random_rows(3, model.interface.vocab_size, 1), 1)
    assert report["differences"] == 3
    told = "".join(sorted(report["first"], key=lambda one: one.split("row ")[1]))
    for words in (
        "row 0, token 1 is",
        "row 1, the log-probability of token 1",
        "row 2, it ended with",
    ):
        assert words in told
