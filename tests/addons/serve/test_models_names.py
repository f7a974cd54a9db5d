"""The names of packages and adapters, which clients may load and unload; the packages are replaced."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import pytest

from qsample.addons.serve import models
from qsample.addons.serve.http import ApiError
from qsample.addons.serve.models import ServedModels
from qsample.addons.serve.settings import ServeSettings
from qsample.errors import QsampleError


class Package:
    """As a `ServedModel`: notes what is asked of its adapters."""

    def __init__(self, name: str, path: str, settings: ServeSettings) -> None:
        if path == "broken":
            raise QsampleError("it is broken")
        self.name = self.base = name
        self.adapter: str | None = None
        self.model = self
        self.said = list[Any]()

    def with_adapter(self, name: str) -> Package:
        view = copy(self)
        view.name = name
        view.adapter = name
        return view

    def load_adapter(self, name: str, folder: Path, *, hotswap: bool) -> None:
        if folder.name == "odd":
            raise ValueError(f"{folder} is odd")
        self.said.append(("load", name, folder.name, hotswap))

    def unload_adapter(self, name: str) -> None:
        self.said.append(("unload", name))

    def close(self) -> None:
        self.said.append("closed")


def test_adapters_that_clients_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "ServedModel", Package)
    root = tmp_path / "root"
    for name in ("x", "odd", "linked"):
        (root / name).mkdir(parents=True)
    (tmp_path / "secret").touch()
    (root / "linked" / "file").symlink_to(tmp_path / "secret")
    several = {"a": "pa", "b": "pb"}
    served: Any = ServedModels(ServeSettings(models=several, lora_dir=str(root), max_cpu_loras=2))
    assert [served.find(name).name for name in (None, "", "a", "b")] == ["a", "a", "a", "b"]
    served.load_adapter("l", "x")
    served.load_adapter("l2", str(root / "x"), "b")
    assert [model.name for model in served.served] == ["a", "b", "l", "l2"]
    assert [model.name for model in served] == ["a", "b"]
    for given, replaced, words, param in (
        (("l3", "x"), False, "2 adapters are loaded, all that this server takes", "lora_name"),
        (("a", "x"), True, "'a' is served already; give another lora_name", "lora_name"),
        (("l", "x"), False, "'l' is served already; give another, or load_inplace", "lora_name"),
        (("l2", "x"), True, "'l2' is served already", "lora_name"),
        (("l3", "x", "c"), False, "the model 'c' does not exist here; there is 'a', 'b', 'l'", "base_model_name"),
        *((("l", path), True, "give an adapter's folder of plain files below", "lora_path")
          for path in (".", "none", "linked", "../root", "/", "\0", str(tmp_path))),
        (("l", "odd"), True, "^odd is odd", "lora_path"),
    ):  # fmt: skip
        with pytest.raises(ApiError, match=words) as raised:
            served.load_adapter(*given, replaced=replaced)
        assert raised.value.param == param
    served.load_adapter("l", "x", replaced=True)
    for name in ("a", "none"):
        words = f"the adapter '{name}' does not exist here; there is 'l', 'l2'$"
        with pytest.raises(ApiError, match=words) as raised:
            served.unload_adapter(name)
        assert (raised.value.status, raised.value.param) == (404, "lora_name")
    served.unload_adapter("l2")
    served.close()
    loads = [("load", "l", "x", False), ("load", "l", "x", True), "closed"]
    assert served.find("a").said == loads
    assert served.find("b").said == [("load", "l2", "x", False), ("unload", "l2"), "closed"]
    with pytest.raises(QsampleError, match="model 'y': it is broken"):
        ServedModels(ServeSettings(models={"x": "p", "y": "broken"}))
