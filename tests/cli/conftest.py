"""A package with every feature."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def forms_package(exported: Callable[..., Path]) -> Path:
    """A package whose answers follow forms, by tables and by masks."""
    return exported("llama", grammars=True, allowed_tokens=True)


@pytest.fixture(scope="session")
def everything(exported: Callable[..., Path]) -> Path:
    """A package with every feature."""
    shown = {"logprobs": True, "top_logprobs": 3, "return_pdfs": True}
    return exported("llama", logit_bias=True, allowed_tokens=True, **shown)
