"""Model types of different kinds, exported and sampled from; and the page that lists all of them."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.architectures.document import all_types
from tests.architectures.run import run

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
# The families of tests/helpers/tiny_models.py have attention. The slow test takes every other type.
REPRESENTATIVES = ["mamba"]


def listed() -> dict[str, str]:
    """Model type → result, as the page has them."""
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE))


def test_the_page_lists_every_model_type() -> None:
    results = listed()
    if f"transformers {version('transformers')} " not in PAGE.read_text():
        pytest.skip("the page is of another transformers, which has other types; scripts/architectures.py writes it")
    assert sorted(results) == all_types()
    passed = sum(result == "passed" for result in results.values())
    assert f"**{passed} of {len(results)} pass**" in PAGE.read_text()


@pytest.mark.ci
@pytest.mark.parametrize("model_type", REPRESENTATIVES)
def test_representatives(model_type: str) -> None:
    row = run(model_type, compiled=False)
    assert row.passed, row.reason
    assert row.tokens > 20


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(all_types()) - set(REPRESENTATIVES)))
def test_the_page_is_true(model_type: str) -> None:
    row = run(model_type)
    assert row.result == listed()[model_type], row.reason
