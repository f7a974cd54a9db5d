"""What a user runs on a CUDA package: generate, an engine, the stand-alone script. The tokens are the CPU's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qsample import AutoModelForCausalLM, SamplingParams
from qsample.runtime import Engine, load
from tests.cuda import puppet

SCRIPT = Path(__file__).parents[2] / "examples" / "generate_onnxruntime.py"
PROMPTS = [
    "In the beginning",
    "Moses",
    "And the Lord spake unto",
    "a",
    "the sons of Levi:",
    "unto them",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_new_tokens=9),
    SamplingParams(temperature=0.9, top_k=20, repetition_penalty=1.2, max_new_tokens=12),
    SamplingParams(temperature=3.0, top_p=0.97, max_new_tokens=7),  # beyond the candidates
    SamplingParams(temperature=1.0, min_p=0.05, max_new_tokens=10),
    SamplingParams(temperature=0.7, top_p=0.8, max_new_tokens=3),
    SamplingParams(temperature=1.0, max_new_tokens=11),
]


@pytest.fixture(scope="module")
def package(exported: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs") / "cuda"
    portable = AutoModelForCausalLM.from_pretrained(exported("llama"))
    portable.compile(folder, provider="cuda", dtype="float16", ctx_len=64)
    return folder


@pytest.fixture(scope="module")
def expected(package: Path) -> list[list[int]]:
    """Of the same file on the CPU's provider, each prompt alone."""
    model = load(package, [puppet.CPU])
    pairs = enumerate(zip(PROMPTS, PARAMS, strict=True))
    return [
        model.generate([prompt], params, seed=seed).token_ids[0] for seed, (prompt, params) in pairs
    ]


@pytest.mark.parametrize("flush_every", [1, 3, 8])
def test_generate(package: Path, expected: list[list[int]], flush_every: int) -> None:
    before = puppet.COUNTS["replays"]
    got = load(package).generate(PROMPTS, PARAMS, seed=0, flush_every=flush_every)
    assert got.token_ids == expected
    assert puppet.COUNTS["replays"] > before


@pytest.mark.parametrize("double_buffering", [True, False])
def test_an_engine_with_fewer_slots_than_requests(
    package: Path, expected: list[list[int]], double_buffering: bool
) -> None:
    with Engine(load(package), slots=2, double_buffering=double_buffering) as engine:
        pairs = enumerate(zip(PROMPTS, PARAMS, strict=True))
        requests = [
            engine.add_request(prompt, params, seed=seed) for seed, (prompt, params) in pairs
        ]
        assert [list(request.result(120).token_ids) for request in requests] == expected


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.8, 0.95), (3.0, 0.97)])
def test_the_stand_alone_script(package: Path, temperature: float, top_p: float) -> None:
    arguments = [
        f"--temperature={temperature}",
        f"--top-p={top_p}",
        "--max-new-tokens=12",
        "--seed=7",
    ]
    command = [
        sys.executable,
        "-m",
        "tests.cuda.puppet",
        SCRIPT,
        package,
        "--provider=cuda",
        "--prompt=Moses",
    ]
    done = subprocess.run(
        [*map(str, command), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    model = load(package, [puppet.CPU])
    params = SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=12)
    output = model.generate("Moses", params, seed=7)
    assert model.tokenizer is not None
    assert done.stdout == model.tokenizer.decode(output.sequences[0].tolist()) + "\n"
