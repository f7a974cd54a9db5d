"""Decoders that take one token a call: a prompt is read token by token, everywhere."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from qsample.runtime import CausalLM, Engine, SamplingParams, load
from qsample.runtime.bench import measure
from tests.helpers import fake_reference
from tests.helpers.fake_package import MAX_POSITIONS, compilation, fake_package


@pytest.fixture(scope="module")
def one_token(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    def fix(graph: onnx.ModelProto) -> None:
        for value in graph.graph.input:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == "S":
                    dim.dim_value = 1

    path: Path = tmp_path_factory.mktemp("one") / "package"
    model = load(fake_package(path, compilation=compilation(ctx_len=MAX_POSITIONS), edit=fix).path)
    assert model.sessions.prompts.piece_size == 1
    return model


PARAMS = SamplingParams(temperature=0.9, max_new_tokens=8, eos_token_id=())
PROMPTS = [[5, 6, 7], [9, 200, 31, 4, 5]]


def test_a_prompt_is_read_token_by_token(one_token: CausalLM) -> None:
    wanted = [
        fake_reference.generate(prompt, PARAMS, row, MAX_POSITIONS)[0]
        for row, prompt in enumerate(PROMPTS)
    ]
    for chunk in (None, 1, 3):
        assert (
            one_token.generate(PROMPTS, PARAMS, seed=0, prefill_chunk_size=chunk).token_ids
            == wanted
        )
    with Engine(one_token, slots=2) as engine:
        requests = [
            engine.add_request(prompt, PARAMS, seed=row) for row, prompt in enumerate(PROMPTS)
        ]
        assert [request.result(60).token_ids for request in requests] == wanted
    assert measure(one_token, 1, 4, 2, repetitions=1).rows == 1
