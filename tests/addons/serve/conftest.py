"""A server as a process, over the bundled model with every optional input and output, or with some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from qsample.addons.serve import ServeSettings, make_app
from qsample.contract.interface import Features
from qsample.package.package import read_package
from qsample.runtime import CausalLM, load
from tests.conftest import made_once
from tests.helpers.servers import TOOL_TEMPLATE, ServerProcess

SERVED = Features(logprobs=True, top_logprobs=5, logit_bias=True)


@pytest.fixture(scope="session")
def served_package(bundled_package: Path, shared_folder: Path) -> Path:
    """The bundled model without a chat template, with most features for serving."""
    from tests.helpers.tiny_models import with_features

    features = replace(SERVED, grammars=True, allowed_tokens=True)
    return made_once(
        shared_folder / "tiny_lm-served-package",
        lambda path: with_features(read_package(bundled_package), path, features),
    )


@pytest.fixture(scope="session")
def masked_package(bundled_package: Path, shared_folder: Path) -> Path:
    """The same without tables: the host keeps answers to their forms."""
    from tests.helpers.tiny_models import with_features

    features = replace(SERVED, allowed_tokens=True)
    return made_once(
        shared_folder / "tiny_lm-masked-package",
        lambda path: with_features(read_package(bundled_package), path, features),
    )


@pytest.fixture(scope="session")
def tables_package(bundled_package: Path, shared_folder: Path) -> Path:
    """The same without masks: the graph keeps answers to their forms, which have to be regular."""
    from tests.helpers.tiny_models import with_features

    features = replace(SERVED, grammars=True)
    return made_once(
        shared_folder / "tiny_lm-tables-package",
        lambda path: with_features(read_package(bundled_package), path, features),
    )


@pytest.fixture(scope="session")
def chat_template(shared_folder: Path) -> Path:
    return made_once(shared_folder / "served.jinja", lambda path: path.write_text(TOOL_TEMPLATE))


@pytest.fixture(scope="session")
def served_model(served_package: Path) -> CausalLM:
    """The same package in this process, to say what the server has to answer."""
    return load(served_package, intra_op_num_threads=1)


@pytest.fixture(scope="session")
def start_server(served_package: Path, chat_template: Path) -> Callable[..., ServerProcess]:
    """(options) → a server of its own; use it as a context."""

    def start(*options: str, **more: Any) -> ServerProcess:
        fixed = ("--served-model-name", "tiny", "--chat-template", chat_template, "--threads", "1")
        return ServerProcess(served_package, *fixed, *options, **more)

    return start


@pytest.fixture(scope="session")
def server(start_server: Callable[..., ServerProcess]) -> Iterator[ServerProcess]:
    with start_server("--slots", "4", "--max-waiting", "64") as running:
        yield running


@pytest.fixture(scope="module", params=[False, True], ids=["token by token", "whole pieces"])
def scores_pieces(request: pytest.FixtureRequest) -> bool:
    """Whether a package scores prompts in whole pieces; otherwise, they are sampled."""
    chosen: bool = request.param
    return chosen


@pytest.fixture(scope="module")
def scoring_server(
    scores_pieces: bool,
    request: pytest.FixtureRequest,
    bundled_package: Path,
    shared_folder: Path,
    chat_template: Path,
) -> Iterator[ServerProcess]:
    """`server`, whose package has the feature `prompt_logprobs` or not."""
    if not scores_pieces:
        yield request.getfixturevalue("server")
        return
    from tests.helpers.tiny_models import with_features

    features = replace(SERVED, grammars=True, prompt_logprobs=True)
    package = made_once(
        shared_folder / "tiny_lm-scoring-package",
        lambda path: with_features(read_package(bundled_package), path, features),
    )
    named = ("--served-model-name", "tiny", "--chat-template", chat_template)
    limits = ("--threads", "1", "--slots", "4", "--max-waiting", "64")
    with ServerProcess(package, *named, *limits) as running:
        yield running


@pytest.fixture(scope="session")
def local_app(served_package: Path, chat_template: Path) -> Callable[..., TestClient]:
    """(settings) → the application in this process, for what only happens when something is missing or breaks; use it
    as a context."""

    def make(**settings: Any) -> TestClient:
        fixed = {
            "models": {"tiny": str(served_package)},
            "chat_template": chat_template.read_text(encoding="utf-8"),
            "threads": 1,
        }
        return TestClient(
            make_app(ServeSettings(**{**fixed, **settings})), raise_server_exceptions=False
        )

    return make
