"""Packages on an NVIDIA GPU: whatever reads and replays the captured step, the tokens are those of the plain step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from qsample import AutoModelForCausalLM, SamplingParams
from qsample.runtime import CausalLM, Engine, Step, load

CUDA = "CUDAExecutionProvider"
HERE = CUDA in ort.get_available_providers() and "QSAMPLE_CUDA_STUBS" not in os.environ
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="no NVIDIA GPU, or no onnxruntime-gpu")]

PROMPTS = [[1, 5, 6, 7, 8], [1, 9, 4], [1, 200, 201, 202, 203, 204, 205, 206], [1, 77], [1, 3]]
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=10),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.2, max_new_tokens=12, seed=2),
    SamplingParams(temperature=3.0, top_p=0.95, max_new_tokens=7, seed=3),  # beyond the candidates: it is searched
    SamplingParams(temperature=3.0, top_k=200, max_new_tokens=12, seed=4),
    SamplingParams(temperature=1.0, max_new_tokens=11, seed=1),
]
PLAIN = {"provider_options": {"enable_cuda_graph": "0"}}
FEATURES: dict[str, Any] = {"logit_bias": True, "allowed_tokens": True, "logprobs": True, "top_logprobs": 3}
FEATURES["return_pdfs"] = True


@pytest.fixture
def compiled(exported: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """(model_type, features, **options) → a package for CUDA; compile itself compares it with the portable graph."""

    def compile_to(family: str = "llama", features: dict[str, Any] | None = None, **options: Any) -> Path:
        model = AutoModelForCausalLM.from_pretrained(exported(family, **(features or {})))
        chosen = {"dtype": "float16", "ctx_len": 64, "max_divergence": 100, **options}
        return model.compile(tmp_path / "cuda", provider="cuda", **chosen).package.path

    return compile_to


@pytest.mark.parametrize("options", [{}, {"weights": "int4"}, {"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_generate(compiled: Callable[..., Path], family: str, options: dict[str, Any]) -> None:
    package = compiled(family, **options)
    compilation = load(package).package.manifest.compilation
    assert compilation is not None
    assert compilation.self_test["agreeing"] >= 0.8 * compilation.self_test["tokens"]
    assert compilation.self_test["replayed"] == compilation.self_test["tokens"] - 4  # the first run captures
    wanted = load(package, **PLAIN).generate(PROMPTS, PARAMS, flush_every=1).token_ids
    for flush_every in (1, 3, 8):
        assert load(package).generate(PROMPTS, PARAMS, flush_every=flush_every).token_ids == wanted


@pytest.mark.parametrize("double_buffering", [True, False])
def test_an_engine_with_fewer_slots_than_requests(compiled: Callable[..., Path], double_buffering: bool) -> None:
    package = compiled()
    alone = load(package, **PLAIN)
    wanted = [alone.generate([prompt], row).token_ids[0] for prompt, row in zip(PROMPTS, PARAMS, strict=True)]
    with Engine(load(package), slots=2, double_buffering=double_buffering) as engine:
        requests = [engine.add_request(prompt, row) for prompt, row in zip(PROMPTS, PARAMS, strict=True)]
        assert [list(request.result(120).token_ids) for request in requests] == wanted


def even_tokens_in_one(step: Step | None, mask: Any) -> None:
    """A function for allowed_tokens."""
    mask[1] = 0x55555555


def test_optional_inputs_and_outputs(compiled: Callable[..., Path]) -> None:
    package = compiled(features=FEATURES)
    params = [replace(PARAMS[0], logit_bias={40: 4.0, 41: float("-inf")}), *PARAMS[1:]]
    got = load(package).generate(PROMPTS, params, allowed_tokens=even_tokens_in_one)
    wanted = load(package, **PLAIN).generate(PROMPTS, params, allowed_tokens=even_tokens_in_one)
    assert got.token_ids == wanted.token_ids
    assert all(token % 2 == 0 for token in got.token_ids[1])
    assert 41 not in got.token_ids[0]
    for name in ("logprobs", "top_logprob_ids", "top_logprobs", "probs"):
        np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))


def test_a_conversation_goes_on_from_saved_states(compiled: Callable[..., Path]) -> None:
    opened = load(compiled("olmo_hybrid"))
    model = CausalLM(opened.package, replace(opened.sessions, piece_size=4))
    for reuse_sampled in (False, True):
        with Engine(model, slots=2, reuse_sampled_tokens=reuse_sampled) as engine:
            history = [1, *range(20, 29)]
            for turn in range(4):
                params = SamplingParams(temperature=0.0, max_new_tokens=5, eos_token_id=())
                output = engine.add_request(history, params, seed=turn).result(300)
                assert (output.usage.cached_tokens > 0) == (turn > 0)
                history = [*history, *output.token_ids, 50 + turn]
            assert engine.stats().prefixes.hits == 3
