"""Greedy tokens of an exported graph against Hugging Face's own generate, for ragged batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import qsample
from qsample import AutoModelForCausalLM
from qsample.runtime import Engine, load
from tests.helpers.tiny_models import FAMILIES, VOCAB_SIZE

NEW_TOKENS = 64
BUNDLED = Path(qsample.__file__).parent / "assets" / "tiny_lm"


def prompts(vocab_size: int, lengths: tuple[int, ...] = (3, 17, 9, 1)) -> list[list[int]]:
    generator = np.random.default_rng(7)
    return [generator.integers(4, vocab_size, n).tolist() for n in lengths]


def hugging_face_greedy(checkpoint: Path, rows: list[list[int]]) -> list[list[int]]:
    """New tokens of each prompt, run alone so that no padding is involved."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    out = []
    for row in rows:
        ids = torch.tensor([row])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        out.append(generated[0, len(row) :].tolist())
    return out


# A cache alone; windows and soft caps; learned positions; a recurrence next to attention.
QUICK = ("llama", "gemma2", "gpt2", "qwen3_5_text")


@pytest.mark.ci
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in sorted(FAMILIES)
    ],
)
def test_random_models(
    model_type: str, checkpoint: Callable[[str], Path], exported: Callable[..., Path]
) -> None:
    rows = prompts(VOCAB_SIZE)
    output = AutoModelForCausalLM.from_pretrained(exported(model_type)).generate(
        rows, do_sample=False, max_new_tokens=NEW_TOKENS
    )
    assert output.token_ids == hugging_face_greedy(checkpoint(model_type), rows)


@pytest.mark.ci
def test_the_models_own_settings(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """An export with the default features has what the model's generation_config asks for."""
    source, rows = tmp_path / "model", prompts(VOCAB_SIZE)
    shutil.copytree(checkpoint("llama"), source)
    plain = [token for row in hugging_face_greedy(source, rows) for token in row]
    settings = {
        "suppress_tokens": plain[::7],
        "sequence_bias": [[[plain[1]], -4.0], [[plain[2]], 3.0]],
        "bad_words_ids": [plain[3:5]],
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.3,
        "eos_token_id": 2,
    }
    (source / "generation_config.json").write_text(json.dumps(settings))
    wanted = hugging_face_greedy(source, rows)
    assert not {*plain[::7]} & {token for row in wanted for token in row}
    package = AutoModelForCausalLM.from_pretrained(source).export(tmp_path / "package")
    assert package.features.logit_bias
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    assert package.generate(rows, **options).token_ids == wanted
    with Engine(load(tmp_path / "package"), slots=2) as engine:
        requests = [engine.add_request(row, **options) for row in rows]
        assert [request.result(60).token_ids for request in requests] == wanted
    # A caller's argument replaces the model's, and None lifts it.
    settings |= {"suppress_tokens": plain[1::7], "sequence_bias": None}
    (source / "generation_config.json").write_text(json.dumps(settings))
    changes = {"suppress_tokens": plain[1::7], "sequence_bias": None}
    given = package.generate(rows, **options, **changes).token_ids
    assert given == hugging_face_greedy(source, rows) != wanted


def test_bundled_model(bundled_package: Path) -> None:
    rows = prompts(2048)
    model = AutoModelForCausalLM.from_pretrained(bundled_package)
    output = model.generate(rows, do_sample=False, max_new_tokens=NEW_TOKENS)
    assert output.token_ids == hugging_face_greedy(BUNDLED, rows)
