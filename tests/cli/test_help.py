"""The help of every command, at the width of a plain terminal."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from qsample import cli
from qsample.cli import inspect

COMMANDS = {
    (name,): command
    for name, command in cli.commands().items()
    if command.params and name != "cache"
}
COMMANDS |= {
    ("cache", name): one for name, one in typer.main.get_command(inspect.cache_app).commands.items()
}  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS, ids="-".join)
def test_every_name_is_whole(
    name: tuple[str, ...], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = run(*name, "--help")
    assert (status, err) == (0, "")
    words = out.replace(",", " ").split()
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "option":
            assert {*parameter.opts, *parameter.secondary_opts} <= {*words}
    assert max(map(len, out.partition("Examples")[0].splitlines())) <= 80
    assert "…" not in out
