"""Wide nuclei and large top-k, settled in the captured graph: by kernels that are launched if rows are listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from qsample import AutoModelForCausalLM, SamplingParams
from qsample.runtime import load
from tests.cuda import puppet
from tests.cuda.trace import Trace

PROMPTS = [[1, 5, 6, 7, 8], [1, 9, 4], [1, 200, 201, 202], [1, 77], [1, 3]]
WIDE = [
    SamplingParams(temperature=3.0, top_p=0.95, max_new_tokens=12, seed=1),
    SamplingParams(temperature=3.0, top_k=200, max_new_tokens=12, seed=2),
    SamplingParams(temperature=2.0, top_k=150, top_p=0.9, min_p=0.001, max_new_tokens=12, seed=3),
    SamplingParams(temperature=3.0, max_new_tokens=12, seed=4),
    SamplingParams(temperature=0.0, max_new_tokens=12),
]


@pytest.fixture(scope="module")
def package(exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search") / "package"
    model = AutoModelForCausalLM.from_pretrained(exported("llama"))
    return model.compile(path, provider="cuda", dtype="float16", ctx_len=64).package.path


def test_rows_are_searched(package: Path, trace: Trace) -> None:
    """Not in a step nor for its first token, whatever the filters; the tokens are those of the CPU's provider."""
    trace.clear()
    before = puppet.COUNTS["replays"]
    got = load(package).generate(PROMPTS, WIDE)
    assert puppet.COUNTS["replays"] > before
    assert not trace.problems()
    wanted = load(package, [puppet.CPU]).generate(PROMPTS, WIDE)
    assert got.token_ids == wanted.token_ids


def test_kernels_of_a_search_are_launched_where_rows_are_listed(
    package: Path, trace: Trace
) -> None:
    """In all, tests/cuda/test_sampler_kernels.py counts; over empty tensors CUDA would refuse a launch."""
    kernels = []
    for params in (WIDE[3:], WIDE):
        trace.clear()
        load(package).generate(PROMPTS[: len(params)], params)
        assert trace.captures() == 2
        kernels.append(trace.captured_kernels() // 2)
        assert not trace.problems()
        assert not trace.captured_reads_of_the_host()
    assert 20 < kernels[1] - kernels[0] < 80


def test_the_self_test_replays(package: Path) -> None:
    compilation = load(package).package.manifest.compilation
    assert compilation is not None
    assert compilation.self_test["agreeing"] >= 0.8 * compilation.self_test["tokens"]
    assert (
        compilation.self_test["replayed"] == compilation.self_test["tokens"] - 4
    )  # the first run captures
