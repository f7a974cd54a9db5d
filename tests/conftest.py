"""Checkpoints of tiny random models and the packages exported from them, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """model_type → a checkpoint folder of a random model of that type."""
    from tests.tiny_models import save_checkpoint

    folders: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in folders:
            folders[model_type] = save_checkpoint(tmp_path_factory.mktemp(model_type), model_type)
        return folders[model_type]

    return make


@pytest.fixture(scope="session")
def exported(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(model_type, **features) → a portable package of that model; features as `from_pretrained` takes them."""
    from qsample import AutoModelForCausalLM

    packages: dict[tuple[object, ...], Path] = {}

    def make(model_type: str = "llama", **features: object) -> Path:
        key = (model_type, *sorted(features.items()))
        if key not in packages:
            path = tmp_path_factory.mktemp(f"{model_type}_package") / "package"
            AutoModelForCausalLM.from_pretrained(checkpoint(model_type), **features).export(path)
            packages[key] = path
        return packages[key]

    return make


@pytest.fixture(scope="session")
def llama_package(exported: Callable[..., Path]) -> Path:
    """A portable package of a random Llama with the sampler in its graph."""
    return exported("llama")
