"""The public class: opening checkpoints and packages, host sampling against the baked sampler, saving copies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsample import AutoModelForCausalLM
from qsample.auto_model import CheckpointModel
from qsample.contract import Features
from qsample.errors import PackageError, QsampleError
from tests.helpers.fake_package import fake_package

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
SAMPLED = {
    "temperature": 0.9,
    "top_k": 30,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "max_new_tokens": 30,
}


def test_generate_straight_from_a_checkpoint(checkpoint: Callable[[str], Path], llama_package: Path) -> None:
    """A checkpoint exports itself behind the scenes and gives the tokens of its package."""
    direct = AutoModelForCausalLM.from_pretrained(checkpoint("llama")).generate(PROMPTS, seed=1, **SAMPLED)
    package = AutoModelForCausalLM.from_pretrained(llama_package).generate(PROMPTS, seed=1, **SAMPLED)
    assert direct.token_ids == package.token_ids


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_host_sampling_gives_the_tokens_of_the_baked_sampler(
    seed: int, exported: Callable[..., Path], llama_package: Path
) -> None:
    host = AutoModelForCausalLM.from_pretrained(exported("llama", include_sampler=False), include_sampler=False)
    baked = AutoModelForCausalLM.from_pretrained(llama_package)
    wanted = baked.generate(PROMPTS, seed=seed, **SAMPLED)
    got = host.generate(PROMPTS, seed=seed, **SAMPLED)
    assert (got.token_ids, got.finish_reasons) == (wanted.token_ids, wanted.finish_reasons)


@pytest.mark.parametrize(
    ("keywords", "features"),
    [
        ({}, Features()),
        ({"include_sampler": False}, Features(sampler=False)),
        ({"return_pdfs": True}, Features(probs=True)),
        ({"logit_bias": True, "top_logprobs": 3}, Features(logit_bias=True, top_logprobs=3)),
        ({"allowed_tokens": True, "logprobs": True}, Features(allowed_tokens=True, logprobs=True)),
    ],
)
def test_keywords_name_the_features(keywords: dict[str, Any], features: Features) -> None:
    model = AutoModelForCausalLM.from_pretrained("some/model", **keywords)
    assert isinstance(model, CheckpointModel)
    assert model.features == features


def test_save_pretrained_copies_a_package(llama_package: Path, tmp_path: Path) -> None:
    copy = AutoModelForCausalLM.from_pretrained(llama_package).save_pretrained(tmp_path / "copy")
    assert copy.package.path == tmp_path / "copy"
    assert copy.package.manifest == AutoModelForCausalLM.from_pretrained(llama_package).package.manifest
    with pytest.raises(QsampleError, match="overwrite"):
        copy.save_pretrained(tmp_path / "copy")


def test_compile_without_a_path_lives_as_long_as_the_result(llama_package: Path) -> None:
    compiled = AutoModelForCausalLM.from_pretrained(llama_package).compile(ctx_len=64)
    path = compiled.package.path
    assert len(compiled.generate([[5, 6]], do_sample=False, max_new_tokens=4).token_ids[0]) == 4
    del compiled
    assert not path.exists()


def test_opening_a_package_imports_neither_torch_nor_transformers(llama_package: Path) -> None:
    program = (
        "import sys, qsample\n"
        f"model = qsample.AutoModelForCausalLM.from_pretrained({str(llama_package)!r})\n"
        "model.generate([[5, 6]], do_sample=False, max_new_tokens=2)\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'jinja2'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_features_of_a_package_are_fixed(exported: Callable[..., Path], llama_package: Path) -> None:
    with pytest.raises(QsampleError, match="exported with include_sampler=True"):
        AutoModelForCausalLM.from_pretrained(llama_package, include_sampler=False)
    with pytest.raises(QsampleError, match="without logprobs, probs; export it again"):
        AutoModelForCausalLM.from_pretrained(llama_package, logprobs=True, return_pdfs=True)
    with pytest.raises(QsampleError, match="holds float32, not float16"):
        AutoModelForCausalLM.from_pretrained(llama_package, dtype="float16")


def test_nothing_is_written_over_what_it_is_made_from(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package")
    before = sorted(path.name for path in package.path.iterdir())
    model = AutoModelForCausalLM.from_pretrained(package.path)
    with pytest.raises(PackageError, match="is what the package is made from; choose another folder"):
        model.compile(tmp_path / "x" / ".." / "package", overwrite=True)
    assert sorted(path.name for path in package.path.iterdir()) == before
    for folder in ("checkpoint", "adapter", "words"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        source = AutoModelForCausalLM.from_pretrained(
            tmp_path / "checkpoint", adapter=tmp_path / "adapter", tokenizer=str(tmp_path / "words")
        )
        for write in (source.compile, source.export):
            with pytest.raises(PackageError, match="is what the package is made from"):
                write(tmp_path / folder, overwrite=True)
