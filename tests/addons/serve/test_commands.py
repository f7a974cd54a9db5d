"""What `qsample serve` makes of its arguments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import typer

from qsample.addons.serve.commands import ServedModels, models_by_name
from qsample.addons.serve.settings import ServeSettings
from qsample.cli.opening import CompileChoices, FeatureNeeds
from qsample.models.model import PackagedModel
from qsample.package.package import Package
from tests.helpers.fake_package import compilation, fake_package
from tests.helpers.flags import unlike


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


SERVE_FLAGS = """
    package [PACKAGE_OR_MODEL]; --model NAME=PACKAGE repeated; --served-model-name; --host = 127.0.0.1
    --port >=0 <=65535 = 8000; --ssl-keyfile FILE; --ssl-certfile FILE; --ctx-len >=2; --chat-template FILE
    --lora NAME=DIR repeated; --log-level = info; --text-only; --threads >=1
    --batch-invariant/--no-batch-invariant = True
"""
WEB_FLAGS = """
    package [PACKAGE_OR_MODEL]; --host = 127.0.0.1; --port >=0 <=65535 = 8080; --provider web|webgpu; --ctx-len >=2
    --weights int2|int4|int8|float16; --preset quick|balanced|speed
"""


def test_the_flags_of_the_commands() -> None:
    assert unlike(SERVE_FLAGS, "serve") == []
    assert unlike(WEB_FLAGS, "web") == []


def test_names_and_packages_of_the_models(tmp_path: Path) -> None:
    path = str(fake_package(tmp_path / "p").path)
    a = f"a={path}"
    for given, wanted in (
        ({}, {"tiny_lm": ""}), ({"served_model_name": "x"}, {"x": ""}), ({"package": "some/w/"}, {"w": "some/w/"}),
        ({"package": "w", "served_model_name": "x"}, {"x": "w"}), ({"model": [a]}, {"a": path}),
        ({"package": "q", "model": [a]}, {"q": "q", "a": path}),
        ({"served_model_name": ""}, "--served-model-name is empty"), ({"model": ["=a"]}, "--model is =a; give NAME"),
        ({"served_model_name": "x", "model": [a]}, "only --model is given"), ({"model": ["a"]}, "--model is a; give"),
        ({"model": ["a="]}, "--model is a=; give NAME"), ({"model": [a, a]}, "--model names a twice"),
        ({"model": [f"a={tmp_path}"]}, "is not a package; make it with"),
    ):  # fmt: skip
        served = ServedModels(**given)
        if isinstance(wanted, str):
            with pytest.raises(typer.BadParameter, match=wanted):
                models_by_name(served)
        else:
            assert [*models_by_name(served).items()] == [*wanted.items()]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments with which the commands open a model, which is a package for WebAssembly."""
    seen = list[Any]()
    package = fake_package(tmp_path / "opened", compilation=compilation(provider="web"))

    def open_exported(*arguments: Any, **options: Any) -> PackagedModel:
        seen.append((*arguments, options))
        return PackagedModel(package, None)

    monkeypatch.setattr("qsample.addons.serve.commands.open_exported", open_exported)
    return seen


CHOSEN: dict[str, Any] = {"weights": "int4", "preset": "speed", "ctx_len": 64}
CHOICES = ["--weights", "int4", "--preset", "speed", "--ctx-len", "64"]


def test_a_checkpoint_is_compiled_for_all_that_a_server_may_be_asked_for(
    run: Any, opened: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, package = list[Any](), str(tmp_path / "opened")
    monkeypatch.setattr(
        "qsample.addons.serve.run.run",
        lambda settings, *address, ready, **options: given.append(
            (settings, address, options, ready("http://here"))
        ),
    )
    (tmp_path / "adapter_config.json").write_text("{}")
    lora = ["--lora", f"a={tmp_path}", "--trusted-keys", "key", "--provider", "cuda", "--text-only"]
    more = ["--ssl-keyfile", "k", "--ssl-certfile", "c", "--log-level", "trace", "--host", "::1"]
    status, _, told = run("serve", "m", *CHOICES, *lora, *more, "--no-batch-invariant")
    assert (status, "Serving m, a on http://here" in told) == (0, True)
    choices = CompileChoices(provider="cuda", text_only=True, **CHOSEN)
    needs = FeatureNeeds(for_serving=True, loras={"a": str(tmp_path)}, max_loras=0)
    assert opened == [("m", choices, needs, {"trusted_keys": ("key",)})]
    ((settings, address, options, _),) = given
    assert (settings.models, settings.loras) == ({"m": package}, {"a": str(tmp_path)})
    assert (settings.provider, settings.batch_invariant, address) == ("cuda", False, ("::1", 8000))
    assert options == {"ssl_keyfile": "k", "ssl_certfile": "c", "log_level": "trace"}
    run("serve", "m", "--lora-dir", tmp_path)
    assert opened[1][2] == FeatureNeeds(for_serving=True, max_loras=4)
    run("serve", "--model", f"x={package}")
    for wrong in (["--log-level", "loud"], ["--speculative-config", "{"], ["--drain-timeout", "-1"]):  # fmt: skip
        status, _, told = run("serve", "m", *wrong)
        assert (status, wrong[0] in told) == (2, True)
    assert (len(opened), len(given)) == (2, 3), "wrong usage is told before anything is compiled"


def test_web_serves_what_it_opened_and_says_where(
    run: Any, opened: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server(MagicMock):
        url = "http://there"

        def __enter__(self) -> Any:
            self.serve_forever.side_effect = KeyboardInterrupt
            return self

    made = MagicMock(side_effect=lambda *_: Server())
    monkeypatch.setattr("qsample.addons.serve.web.check_built", checked := MagicMock())
    monkeypatch.setattr("qsample.addons.serve.web.WebServer", made)
    path = str(tmp_path / "opened")
    cases = (
        ("m", None, "web"),
        ("m", "webgpu", "webgpu"),
        (path, None, "webgpu"),
        (path, "web", "web"),
    )
    for model, given, wanted in cases:
        provider = [] if given is None else ["--provider", given]
        status, _, told = run("web", model, "--host", "h", "--port", 9, *CHOICES, *provider)
        assert (status, f"Serving {path} on http://there" in told) == (0, True)
        package, *address = made.call_args.args
        assert (str(package.path), address) == (path, ["h", 9])
        choices = CompileChoices(provider=wanted, **CHOSEN)
        assert opened.pop() == (model, choices, FeatureNeeds(for_serving=True), {})
    assert checked.call_count == 4
