"""docs/addons.md: its add-on is installed as the page says, and its command and its checkpoint format are used."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qsample.errors import QsampleError, UnsupportedModelError
from qsample.extensions import COMMANDS, extension_names, load_extension
from qsample.models.auto_model import AutoModelForCausalLM
from tests.helpers.command_line import ROOT, qsample
from tests.helpers.tiny_models import random_model

PAGE = ROOT / "docs" / "addons.md"


def files_of_the_page() -> dict[str, str]:
    """The files of the example by name: each code block follows a paragraph that begins with the file's name."""
    files: dict[str, str] = {}
    fence = re.compile(r"^```(?:toml|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    blocks = fence.split(PAGE.read_text("utf-8"))
    for before, block in zip(blocks[::2], blocks[1::2], strict=False):
        last = before.strip().split("\n\n")[-1]
        name = re.match(r"`([\w/]+\.(?:py|toml))`", last)
        assert name is not None, last
        files[name[1]] = block
    return files


def install(site: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay the files out as pip does."""
    project = tomllib.loads(files["pyproject.toml"])["project"]
    for name, text in files.items():
        if name.endswith(".py"):
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(site)


@pytest.fixture
def addon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", files_of_the_page(), monkeypatch)
    for name in [name for name in sys.modules if name.startswith("qsample_power2")]:
        monkeypatch.delitem(sys.modules, name)


def power2_checkpoint(folder: Path) -> torch.nn.Module:
    """Write a small model whose linear layers have the format of the page; return it with these weights."""
    model = random_model("llama")
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            largest = layer.weight.detach().abs().amax(1)
            exponent = torch.ceil(torch.log2(largest / 127))
            levels = torch.round(layer.weight.detach() / torch.exp2(exponent)[:, None])
            layer.weight.data = levels * torch.exp2(exponent)[:, None]
            layer.levels, layer.exponent = levels.to(torch.int8), exponent.to(torch.int8)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, layer in model.named_modules():
        if hasattr(layer, "levels"):
            del tensors[f"{name}.weight"]
            tensors[f"{name}.weight_levels"] = layer.levels
            tensors[f"{name}.weight_exponent"] = layer.exponent
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "power2"}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.usefixtures("addon")
@pytest.mark.ci
def test_the_format_of_an_addon_is_read(tmp_path: Path) -> None:
    model = power2_checkpoint(tmp_path / "checkpoint")
    source = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", include_sampler=True, tokenizer=None
    )
    package = source.export(tmp_path / "package")
    prompt = np.array([[5, 6, 7, 8]])
    expected = model.generate(torch.from_numpy(prompt), max_new_tokens=8, do_sample=False)
    assert (
        package.generate(prompt, max_new_tokens=8, do_sample=False).sequences.tolist()
        == expected.tolist()
    )
    packed = package.package.manifest.packed_weights
    assert packed is not None
    assert packed["bits"] == [8]

    # This process may have built its parser before the add-on was installed.
    search_path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    result = qsample("parameters", tmp_path / "package", PYTHONPATH=search_path)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) == sum(
        file.stat().st_size for file in (tmp_path / "package").glob("*.data")
    )


@pytest.mark.usefixtures("addon")
def test_its_errors_name_the_layer(tmp_path: Path) -> None:
    power2_checkpoint(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("weight_exponent"))
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path, {"format": "pt"})
    source = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", include_sampler=True, tokenizer=None
    )
    with pytest.raises(
        QsampleError, match=r"the quantized layer model\.layers.* rows and .* exponents"
    ):
        source.export(tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_without_the_addon_the_format_is_refused(tmp_path: Path) -> None:
    power2_checkpoint(tmp_path / "checkpoint")
    expected = r"is quantized with power2; only float weights, .*gptq"
    with pytest.raises(UnsupportedModelError, match=expected):
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "checkpoint", include_sampler=True, tokenizer=None
        )


def test_a_name_that_two_distributions_register_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of_the_page()
    install(tmp_path / "one", files, monkeypatch)
    other = files["pyproject.toml"].replace("qsample-power2", "other-power2")
    other = other.replace("qsample_power2.commands", "other.commands")
    install(tmp_path / "two", {"pyproject.toml": other}, monkeypatch)
    with pytest.raises(
        QsampleError, match=r"both register 'parameters' in qsample\.commands; uninstall one"
    ):
        extension_names(COMMANDS)


def test_a_command_that_cannot_be_imported_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from qsample.cli.commands import installed_commands

    files = files_of_the_page()
    files["qsample_power2/commands.py"] = "import a_library_that_is_missing\n"
    install(tmp_path / "site", files, monkeypatch)
    for name in [name for name in sys.modules if name.startswith("qsample_power2")]:
        monkeypatch.delitem(sys.modules, name)
    names = [name for name, _ in installed_commands()]
    assert "parameters" not in names
    assert {"export", "compile", "generate"} <= {*names}
    assert "parameters is left out" in capsys.readouterr().err


def test_every_entry_of_qsample_itself_loads() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    for group, entries in pyproject["project"]["entry-points"].items():
        for name in entries:
            assert load_extension(group, name) is not None
