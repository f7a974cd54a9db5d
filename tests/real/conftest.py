"""SmolLM2-135M-Instruct, which scripts/real_model.py fetches; transformers over it, and packages of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import made_once

ROOT = Path(__file__).resolve().parents[2]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Reference:
    """The checkpoint in transformers, the oracle of these tests."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """The new tokens, a stop token included."""
        import torch

        key = (count, *ids)
        if key in self._known:
            return self._known[key]
        output = self.model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
        self._known[key] = output[0, len(ids) :].tolist()
        return self._known[key]

    def encoded(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a conversation, with the beginning of an answer."""
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

    def answer(self, messages: list[dict[str, str]], count: int) -> str:
        return self.tokenizer.decode(
            self.greedy(self.chat(messages), count), skip_special_tokens=True
        )


@pytest.fixture(scope="session")
def real_folder() -> Path:
    folder = Path(os.environ.get("QSAMPLE_REAL_MODEL") or ROOT / "build" / "smollm2")
    if not all((folder / part).exists() for part in (GGUF, "checkpoint", "dithered")):
        pytest.skip(f"{folder} has no real model; `python scripts/real_model.py` fetches it")
    return folder


@pytest.fixture(scope="session")
def reference(real_folder: Path) -> Reference:
    return Reference(real_folder / "checkpoint")


@pytest.fixture(scope="session")
def float_package(real_folder: Path, shared_folder: Path) -> Path:
    """A portable package of the checkpoint with the features for serving; it takes LoRA adapters."""
    from qsample import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        real_folder / "checkpoint", for_serving=True, max_loras=1, max_lora_rank=4
    )
    return made_once(shared_folder / "smollm2-float", model.export)


@pytest.fixture(scope="session")
def gguf_package(real_folder: Path, shared_folder: Path) -> Path:
    """A portable package of the GGUF file, with its integers."""
    from qsample import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(real_folder / GGUF)
    return made_once(shared_folder / "smollm2-gguf", model.export)


@pytest.fixture(scope="session")
def compiled(float_package: Path, shared_folder: Path) -> Callable[[str], Path]:
    """weights → the float package compiled with them, as by default."""
    from qsample import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(float_package)
    return lambda weights: made_once(
        shared_folder / f"smollm2-{weights}",
        lambda path: model.compile(path, ctx_len=1024, weights=weights),
    )


@pytest.fixture(scope="session")
def guessing_package(gguf_package: Path, shared_folder: Path) -> Path:
    """The integers of the GGUF file, compiled with an int8 cache; a step checks up to 7 guesses."""
    from qsample import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf_package)
    options: Any = {"ctx_len": 1024, "kv_cache_dtype": "int8", "num_speculative_tokens": 7}
    return made_once(shared_folder / "smollm2-guesses", lambda path: model.compile(path, **options))
