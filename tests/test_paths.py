"""Empty paths are refused by every option and argument that takes a path, and by every function of Python."""

from __future__ import annotations

import inspect
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, get_type_hints

import pytest

import qsample
from qsample.addons.policy.files import replace_sampler, write_policy
from qsample.addons.serve.settings import ServeSettings
from qsample.addons.trust.signing import sign
from qsample.checkpoints.source import HubOptions
from qsample.cli import commands
from qsample.cli.help import takes_path
from qsample.errors import QsampleError
from qsample.ort.model_package import bundle
from qsample.package.package import Package, read_package
from qsample.request.structured.tables import TokenGrammar
from qsample.runtime import Engine, load
from qsample.runtime.adapters import read_adapter
from tests.helpers.command_line import COMMAND
from tests.helpers.fake_package import fake_interface


def leaves(found: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Each command, with its words."""
    for name, command in found.items():
        if hasattr(command, "commands"):
            yield from leaves(command.commands, (*prefix, name))
        else:
            yield (*prefix, name), command


PARAMETERS: Final = [
    (words, command, parameter)
    for words, command in leaves(commands())
    for parameter in command.params
    if takes_path(parameter)
]


@pytest.mark.parametrize(
    ("words", "command", "parameter"),
    PARAMETERS,
    ids=[" ".join((*words, parameter.name)) for words, _, parameter in PARAMETERS],
)
def test_an_option_refuses_an_empty_path(
    run: Any, words: tuple[str, ...], command: Any, parameter: Any
) -> None:
    line: list[str] = []
    for other in command.params:
        if other.param_type_name == "argument":
            if other is parameter:
                line.append("")
            elif other.required or parameter.param_type_name == "argument":
                line.append("x")
    if parameter.param_type_name == "option":
        line = [*line, parameter.opts[0], ""]
    status, _, err = run(*words, *line)
    name = parameter.metavar if parameter.param_type_name == "argument" else parameter.opts[0]
    assert status == 2, err
    assert f"{name} is empty; give a path" in " ".join(err.split())
    if "=" in (parameter.metavar or ""):
        status, _, err = run(*words, *line[:-1], "name=")
        assert status == 2
        assert "is empty" in err


def test_every_parameter_that_is_a_path_says_so() -> None:
    """By its placeholder: FILE, DIR and so on. So the test above has seen it."""
    seen = {parameter.name for _, _, parameter in PARAMETERS}
    assert {"trusted_keys", "out", "private_key", "prompt_file", "lora_dir", "adapter"} <= seen
    assert len(PARAMETERS) > 50
    for words, command in leaves(commands()):
        hints = get_type_hints(inspect.unwrap(command.callback))
        for parameter in command.params:
            is_path = "Path" in str(hints.get(parameter.name, ""))
            assert takes_path(parameter) or not is_path, (words, parameter.name)


def test_an_unset_variable_of_a_shell_trusts_nothing(tmp_path: Path) -> None:
    """`--trusted-keys "$KEYS"` in a folder with a stranger's key."""
    (tmp_path / "stranger.pem").write_text("")
    done = subprocess.run(
        [*COMMAND, "verify", "x", "--trusted-keys", ""],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(qsample.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--trusted-keys is empty; give a path" in done.stderr


def doors(package: Package, model: Any) -> dict[str, Callable[[], Any]]:
    """The functions of Python that take a path, called with an empty one, by the name of the argument and what
    they are."""
    opened = qsample.AutoModelForCausalLM.from_pretrained(package.path)
    folder = str(package.path)
    return {
        "path: load": lambda: load(""),
        "pretrained_model_name_or_path": lambda: qsample.AutoModelForCausalLM.from_pretrained(""),
        "trusted_keys: load": lambda: load(folder, trusted_keys=""),
        "trusted_keys: several": lambda: load(folder, trusted_keys=["x.pem", ""]),
        "trusted_keys: from_pretrained": lambda: qsample.AutoModelForCausalLM.from_pretrained(
            folder, trusted_keys=""
        ),
        "path: save_pretrained": lambda: opened.save_pretrained(""),
        "path: compile": lambda: opened.compile(""),
        "path: export": lambda: opened.export(""),
        "path: read_package": lambda: read_package(""),
        "path: save_prefix": lambda: model.save_prefix([5, 6, 7, 8], ""),
        "path: load_adapter": lambda: read_adapter("a", "", fake_interface()),
        "path: TokenGrammar.load": lambda: TokenGrammar.load(""),
        "path: TokenGrammar.save": lambda: TokenGrammar.save(None, ""),  # type: ignore[arg-type]
        "prefixes": lambda: Engine(model, prefixes=[""]),
        "prefix_cache_dir": lambda: Engine(model, prefix_cache_dir=""),
        "cache_dir": lambda: HubOptions(cache_dir=""),
        "adapter": lambda: qsample.AutoModelForCausalLM.from_pretrained("x", adapter=""),
        "tokenizer": lambda: qsample.AutoModelForCausalLM.from_pretrained("x", tokenizer=""),
        "gguf_file": lambda: qsample.AutoModelForCausalLM.from_pretrained("x", gguf_file=""),
        "debug_dump": lambda: qsample.CompileOptions(debug_dump=""),
        "path: bake": lambda: qsample.bake(""),
        "path: bake to": lambda: qsample.bake("x", ""),
        "out: bundle": lambda: bundle("", [folder]),
        "path: bundle of": lambda: bundle("x", [""]),
        "private_key": lambda: sign(package.path, private_key=""),
        "certificate": lambda: sign(package.path, "x", certificate=""),
        "certificate_chain": lambda: sign(package.path, "x", "x", certificate_chain=[""]),
        "out: write_policy": lambda: write_policy("", 5),
        "package": lambda: replace_sampler("", vocab_size=5),
        "generation_config": lambda: qsample.SamplingParams.from_generation_config(""),
        "lora_dir": lambda: ServeSettings(models={"a": folder}, lora_dir=""),
        "allowed_local_media_path": lambda: ServeSettings(
            models={"a": folder}, allowed_local_media_path=""
        ),
    }


def test_functions_refuse_an_empty_path(
    fake: Callable[..., Package], model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, call in doors(fake(), model).items():
        with pytest.raises(
            (ValueError, QsampleError), match=rf"^{name.partition(':')[0]} is (empty|''); give"
        ):
            call()
    assert not any(tmp_path.iterdir())
