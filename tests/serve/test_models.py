"""What a package is served with, and what is refused at the start."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from qsample.serve.models import ServedModels
from qsample.serve.settings import ServeSettings
from qsample.text.chat import ChatOptions
from tests.helpers.fake_package import fake_package


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {
        "chat_template.jinja": "own {{ messages[0].content }}",
        "additional_chat_templates/short.jinja": "short {{ messages[0].content }}",
    }
    return fake_package(tmp_path_factory.mktemp("served") / "package", files=files).path


@pytest.mark.parametrize(
    ("template", "prompt"),
    [(None, "own hello"), ("short", "short hello"), ("given {{ messages[0].content }}", "given hello")],
)
def test_a_chat_template_by_name_or_as_text(package: Path, template: str | None, prompt: str) -> None:
    models = ServedModels(ServeSettings(models={"tiny": str(package)}, slots=1, chat_template=template))
    try:
        tokenizer = models.find("tiny").tokenizer
        assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hello"}])) == prompt
    finally:
        models.close()


def test_developer_messages_are_system_messages_for_templates_that_do_not_know_them(package: Path) -> None:
    models = ServedModels(ServeSettings(models={"tiny": str(package)}, slots=1))
    try:
        for template, text in (
            ("{{ messages[0].role }}", "system"),
            ("{{ messages[0].role }}{# developer #}", "developer"),
        ):
            options = ChatOptions(chat_template=template)
            assert models.find("tiny").render_chat([{"role": "developer", "content": "hello"}], options) == text
    finally:
        models.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": "shrot"}, "chat_template is 'shrot', which is neither Jinja nor a template of the package"),
        ({"chat_template": "{% if %}"}, "the chat template is not valid Jinja"),
        ({"slots": 0}, "slots is 0"),
    ],
)
def test_a_mistake_is_told_at_the_start_and_leaves_no_engine(
    package: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ServedModels(ServeSettings(models={"tiny": str(package)}, **options))
    assert not [thread for thread in threading.enumerate() if thread.name == "qsample-engine"]


def test_a_generation_config_that_asks_for_a_filter_that_the_package_lacks(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package", generation_config={"typical_p": 0.9})
    with pytest.raises(ValueError, match=r"typical_p is 0\.9, and the package was exported with no filters"):
        ServedModels(ServeSettings(models={"tiny": str(package.path)}, slots=1, generation_config="auto"))


def test_a_generation_config_that_is_wrong_leaves_no_engine(tmp_path: Path) -> None:
    package = fake_package(tmp_path / "package", generation_config={"temperature": -1})
    with pytest.raises(ValueError, match="temperature is -1"):
        ServedModels(ServeSettings(models={"tiny": str(package.path)}, slots=1, generation_config="auto"))
    assert not [thread for thread in threading.enumerate() if thread.name == "qsample-engine"]
