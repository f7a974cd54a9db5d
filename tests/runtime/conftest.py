"""Fake packages and models loaded from them, made once a session; and a gate in front of decode steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from qsample.package import Package
from qsample.runtime import CausalLM, load
from qsample.runtime.decode.slots import Slots
from tests.helpers.fake_package import PIECE_SIZE, fake_package


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Package]:
    """features and options → a fake package."""
    made: dict[str, Package] = {}

    def make(**options: Any) -> Package:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = fake_package(tmp_path_factory.mktemp("fake") / "package", **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def fake_model(fake: Callable[..., Package]) -> Callable[..., CausalLM]:
    """features and options → a model loaded from a fake package, which reads short prompts in several pieces."""
    loaded: dict[str, CausalLM] = {}

    def make(**options: Any) -> CausalLM:
        key = repr(sorted(options.items()))
        if key not in loaded:
            plain = load(fake(**options).path)
            loaded[key] = CausalLM(plain.package, replace(plain.sessions, piece_size=PIECE_SIZE))
        return loaded[key]

    return make


@pytest.fixture
def model(fake_model: Callable[..., CausalLM]) -> CausalLM:
    return fake_model()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """The engine makes one decode step for each release."""
    steps = threading.Semaphore(0)
    plain = Slots.decode

    def decode(self: Slots, rows: range, *, wait: bool = True) -> None:
        assert steps.acquire(timeout=60)
        plain(self, rows, wait=wait)

    monkeypatch.setattr(Slots, "decode", decode)
    yield steps
    steps.release(100_000)
