"""Hub options: what reaches transformers, and what is refused."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from qsample import AutoModelForCausalLM
from qsample.checkpoints import load
from qsample.checkpoints.hub_options import HubOptions

GIVEN = {
    "revision": "v2",
    "cache_dir": "/downloads",
    "token": "hf_secret",
    "local_files_only": True,
    "trust_remote_code": True,
}


def test_every_option_is_a_keyword_of_from_pretrained() -> None:
    keywords = inspect.signature(AutoModelForCausalLM.from_pretrained).parameters
    for option in fields(HubOptions):
        assert keywords[option.name].default == option.default, option.name


def test_loading_takes_all_and_downloading_runs_no_code() -> None:
    options = HubOptions(**GIVEN)
    assert options.loading() == GIVEN
    assert options.downloading() == {name: value for name, value in GIVEN.items() if name != "trust_remote_code"}
    assert HubOptions().loading()["revision"] == "main"


def test_a_revision_is_of_one_repository() -> None:
    assert HubOptions(**GIVEN).for_another_repository() == HubOptions(**(GIVEN | {"revision": None}))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"revision": 2}, "revision is of type int; it must be str or None"),
        ({"cache_dir": b"downloads"}, "cache_dir is of type bytes"),
        ({"local_files_only": "no"}, "local_files_only is of type str; it must be bool"),
        ({"trust_remote_code": None}, "trust_remote_code is of type NoneType; it must be bool"),
    ],
)
def test_values_of_another_type(option: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, **option)


def test_a_token_is_not_shown() -> None:
    assert "hf_secret" not in repr(HubOptions(**GIVEN))
    with pytest.raises(ValueError, match="token is of type bytes") as raised:
        HubOptions(token=b"hf_secret")  # type: ignore[arg-type]
    assert "hf_secret" not in str(raised.value)


def test_options_reach_the_loader_whole(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[load.Checkpoint] = []

    def stop(checkpoint: load.Checkpoint) -> None:
        opened.append(checkpoint)
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "load_tokenizer", stop)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), **GIVEN)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        model.export(tmp_path / "package")
    assert opened[0].hub == HubOptions(**GIVEN)


def test_importing_the_options_is_light() -> None:
    program = (
        "import sys, qsample.checkpoints.hub_options\n"
        "print(sorted({'torch', 'transformers', 'onnx', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
