"""What `qsample serve` makes of its arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qsample.addons.serve.commands import ServedModels, models_by_name
from qsample.addons.serve.settings import ServeSettings
from qsample.package.package import Package
from tests.helpers.fake_package import compilation, fake_package


@pytest.mark.parametrize("named", [".", "../tiny", "../tiny/", "sub/.."])
def test_a_package_is_called_like_its_folder(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = fake_package(tmp_path / "tiny")
    (package.path / "sub").mkdir()
    monkeypatch.chdir(package.path)
    assert list(models_by_name(ServedModels(package=named))) == ["tiny"]


def test_web_names_the_provider_that_has_a_gpu(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = list[Package]()

    class Server:
        url = "http://localhost"

        def __init__(self, package: Package, host: str, port: int) -> None:
            served.append(package)

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None: ...

        def serve_forever(self) -> None: ...

    monkeypatch.setattr("qsample.addons.serve.web.check_built", lambda: None)
    monkeypatch.setattr("qsample.addons.serve.web.WebServer", Server)
    for provider, told in ((None, False), ("cpu", True), ("webgpu", False)):
        package = fake_package(
            tmp_path / str(provider), compilation=provider and compilation(provider=provider)
        )
        status, _, err = run("web", package.path)
        assert (status, served.pop().path) == (0, package.path), err
        assert ("--provider webgpu" in err) == told


def test_options_become_settings(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, given = fake_package(tmp_path / "tiny"), list[Any]()
    monkeypatch.setattr(
        "qsample.addons.serve.run.run",
        lambda settings, *address, **options: given.append((settings, address)),
    )
    (tmp_path / "loras").mkdir()
    plain = ServeSettings(models={"tiny": str(package.path)})
    cases: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "plain": ([], {}),
        "numbers": (["--slots", 3, "--request-timeout", "0.5"], {"slots": 3, "request_timeout": 0.5}),
        "repeated": (
            ["--api-key", "a", "--api-key", "b", "--prefix", "f"],
            {"api_keys": ("a", "b"), "prefixes": ("f",)},
        ),
        "switches": (["--spinning", "--no-access-log"], {"spinning": True, "access_log": False}),
        "texts": (
            ["--tool-call-parser", "hermes", "--lora-dir", tmp_path / "loras"],
            {"tool_call_parser": "hermes", "lora_dir": str(tmp_path / "loras")},
        ),
        "json": (
            ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        "shared": (["--threads", 1, "--ctx-len", 64, "--chat-template", "x"],
                   {"threads": 1, "ctx_len": 64, "chat_template": "x"}),
    }  # fmt: skip
    for arguments, fields in cases.values():
        assert run("serve", package.path, "--port", "9", *arguments)[0] == 0
        assert given.pop() == (replace(plain, **fields), ("127.0.0.1", 9))
    monkeypatch.setenv("QSAMPLE_API_KEY", "one")
    run("serve", package.path)
    assert given.pop()[0].api_keys == ("one",)
    status, _, told = run("serve", package.path, "--slots", "0")
    assert (status, "--slots" in told) == (2, True)
