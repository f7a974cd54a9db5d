"""Model types of different kinds, exported and sampled from; and the page that lists all of them."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.architectures.document import all_types
from tests.architectures.images import IMAGE, image_names, run_images
from tests.architectures.run import run

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
# The families of tests/helpers/tiny_models.py have attention. The slow test takes every other type.
REPRESENTATIVES = ["mamba"]
# Patches, positions of three parts, and deepstack.
READING_IMAGES = f"{IMAGE}qwen3_vl"


def listed(table: int = 0) -> dict[str, str]:
    """Model type → result, as the page's first table has them, or the second, of types that read images."""
    text = PAGE.read_text("utf-8").split("## Types that read images")[table]
    return dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", text, re.MULTILINE))


def test_the_page_lists_every_model_type() -> None:
    results = listed()
    if f"transformers {version('transformers')} " not in PAGE.read_text():
        pytest.skip(
            "the page is of another transformers, which has other types; scripts/architectures.py writes it"
        )
    assert sorted(results) == all_types()
    assert sorted(f"{IMAGE}{name}" for name in listed(1)) == image_names()
    for table in (results, listed(1)):
        passed = sum(result == "passed" for result in table.values())
        assert f"**{passed} of {len(table)} pass**" in PAGE.read_text()


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


@pytest.mark.ci
def test_a_type_that_reads_images() -> None:
    row = run_images(READING_IMAGES, compiled=False)
    assert row.passed, row.reason
    assert row.tokens > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", image_names())
def test_the_page_is_true_of_images(name: str) -> None:
    row = run_images(name)
    assert row.result == listed(1)[name.removeprefix(IMAGE)], row.reason
