"""The guided example gives JSON of its schema, whatever the model would say."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from qsample.runtime import load
from tests.helpers.fake_package import fake_package

SCRIPT = Path(__file__).parents[2] / "examples" / "guided_json.py"


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("guided_json", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_follows_the_schema(value: dict[str, object]) -> None:
    assert value.keys() == {"chapter", "text"}
    assert isinstance(value["chapter"], int)
    assert 1 <= value["chapter"] <= 150
    assert re.fullmatch("[A-Za-z ,;]{0,60}", str(value["text"]))


@pytest.mark.parametrize("sampler", [True, False])
def test_every_row_is_json_of_the_schema(sampler: bool, tmp_path: Path) -> None:
    model = load(fake_package(tmp_path / "package", sampler=sampler, allowed_tokens=True).path)
    guided_json = example()
    texts = guided_json.generate_json(
        model, ["In the", "And", "Blessed are"], guided_json.SCHEMA, seed=3
    )
    assert len(set(texts)) == 3
    for text in texts:
        assert_follows_the_schema(json.loads(text))


def test_a_package_without_a_prompt(tmp_path: Path) -> None:
    package = fake_package(
        tmp_path / "package"
    )  # which takes no masks: the bundled model was taken in its place
    result = subprocess.run(
        [sys.executable, SCRIPT, package.path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "allowed_tokens" in result.stderr


@pytest.mark.slow
def test_with_the_bundled_model() -> None:
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    decoder, place, values = json.JSONDecoder(), 0, 0
    while place < len(result.stdout.rstrip()):
        value, place = decoder.raw_decode(result.stdout, place)
        assert_follows_the_schema(value)
        place, values = place + 1, values + 1
    assert values == 2
