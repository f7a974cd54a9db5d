"""Every JSON file that qsample reads, changed at random: an error of qsample's own comes out, or nothing at all."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from qsample.addons.bake.files import locate, read_settings
from qsample.checkpoints.mapped_weights import weight_files
from qsample.contract.tensors import BATCH, CAPACITY
from qsample.errors import QsampleError
from qsample.models import cache
from qsample.models.cache import Recipe, open_cached
from qsample.ort.model_package import package_in
from qsample.package.disk.tensor_file import write_tensors
from qsample.package.manifest import MANIFEST_NAME, MODEL_PACKAGE_NAME
from qsample.package.package import read_package
from qsample.request.huggingface.lora import read_changes
from qsample.request.sampling_params import SamplingParams, settings_of
from qsample.request.text.chat import ChatOptions, ChatTemplates
from qsample.runtime import load
from qsample.runtime.decode.prefix_file import PrefixFile, write_prefix
from tests.helpers.fake_package import fake_package

Reader = Callable[[], object]
SIGNATURE = dict.fromkeys(
    ("package", "execution_provider", "onnxruntime", "pieces", "kernels"), "x"
)
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    2**63,
    1e308,
    -0.5,
    float("inf"),
    "",
    "x",
    "\ud800",
    "\x1b[31m",
    "../x",
    [],
    [[]],
]
ODD += [{}, {"": {}}, {"x": [None]}, [{"name": ["x"], "template": 1}], ["x"], "x" * 300, 10**399]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a document."""
    yield path
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from places(inner, (*path, key))


def changed(document: Any, data: st.DataObject) -> bytes:
    """A document with some values replaced, left out or added; sometimes its text is damaged, too."""
    document = json.loads(json.dumps(document))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(sorted(places(document), key=repr)))
        odd = deepcopy(data.draw(st.sampled_from(ODD)))
        if not path:
            document = odd if data.draw(st.integers(0, 9)) == 0 else document
            continue
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        action = data.draw(st.sampled_from(["replace", "replace", "leave out", "add"]))
        if action == "leave out":
            del parent[path[-1]]
        elif action == "replace" or isinstance(parent, list):
            parent[path[-1]] = odd
        else:
            parent[data.draw(st.sampled_from(["x", "", "__metadata__", "default"]))] = odd
    text = json.dumps(document).encode()
    if data.draw(st.integers(0, 9)) == 0:
        place = data.draw(st.integers(0, len(text)))
        text = (
            text[:place]
            + data.draw(st.sampled_from([b"", b"[" * 2000, b"\xff", b"\0", b'"', b"NaN"]))
            + text[place:]
        )
    return text


def in_header(file: Path, text: bytes) -> None:
    """Give a tensor file another header."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def header(file: Path) -> Any:
    content = file.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


Case = tuple[Path, Any, Reader]


def manifest(folder: Path) -> Case:
    file = fake_package(folder / "package").path / MANIFEST_NAME
    return file, json.loads(file.read_text()), lambda: read_package(file.parent)


def adapter_config(folder: Path) -> Case:
    (folder / "adapter").mkdir()
    file, weights = (
        folder / "adapter" / "adapter_config.json",
        folder / "adapter" / "adapter_model.safetensors",
    )
    tensors = {"base_model.model.q.lora_A.weight": np.zeros((2, 3), np.float32)}
    tensors["base_model.model.q.lora_B.weight"] = np.zeros((4, 2), np.float32)
    with weights.open("wb") as opened:
        write_tensors(opened, {"format": "pt"}, tensors)
    patterns = {"rank_pattern": {"^q$": 2, r"layers\.\d+.*": 4}, "alpha_pattern": {"(q|k)": 3.5}}
    document = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "bias": "none",
        "use_rslora": False,
        **patterns,
    }
    file.write_text(json.dumps(document))
    return file, document, lambda: read_changes(file, weights)


def adapter_header(folder: Path) -> Case:
    _, _, read = adapter_config(folder)
    file = folder / "adapter" / "adapter_model.safetensors"
    return file, header(file), read


def prefix_header(folder: Path) -> Case:
    interface = fake_package(folder / "package").interface
    sizes = {CAPACITY: 3, BATCH: 1}
    states = {
        spec.name: np.zeros(spec.shape(sizes)[1:], np.float32) for spec in interface.cache_states
    }
    write_prefix(folder / "prefix.safetensors", SIGNATURE, np.array([5, 6, 7]), states)
    file = folder / "prefix.safetensors"
    PrefixFile.open(file, SIGNATURE, interface)
    return file, header(file), lambda: PrefixFile.open(file, SIGNATURE, interface)


def seal(folder: Path) -> Case:
    source = fake_package(folder / "package").path
    package, holding = open_cached(Recipe("model", {}), lambda path: shutil.copytree(source, path))
    holding.close()
    file = package.path / cache._SEAL_FILE

    def read() -> None:
        again, holding = open_cached(
            Recipe("model", {}), lambda path: shutil.copytree(source, path)
        )
        holding.close()
        assert again.path == package.path

    return file, json.loads(file.read_text()), read


def bundle(folder: Path) -> Case:
    (folder / "bundle" / "cpu").mkdir(parents=True)
    file = folder / "bundle" / MODEL_PACKAGE_NAME
    variants = {"cpu": {"variant_directory": "cpu", "executor_info": {"qsample": {}}}}
    document = {"components": {"decoder": {"variants": variants}}}
    return file, document, lambda: package_in(file.parent, "cpu")


def weight_index(folder: Path) -> Case:
    file = folder / "model.safetensors.index.json"
    document = {
        "metadata": {"total_size": 5},
        "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"},
    }
    return file, document, lambda: weight_files(folder)


def generation_config(folder: Path) -> Case:
    file = folder / "generation_config.json"
    document = {
        "temperature": 0.5,
        "top_k": 5,
        "eos_token_id": [1, 2],
        "do_sample": True,
        "bad_words_ids": [[3]],
    }
    return file, document, lambda: SamplingParams.from_generation_config(settings_of(file))


def of_package(name: str, document: Any, use: Callable[[Path], object]) -> Callable[[Path], Case]:
    """A JSON file of a package, which its manifest lists."""

    def case(folder: Path) -> Case:
        package = fake_package(folder / "package")
        file = package.path / name
        listed = json.loads((package.path / MANIFEST_NAME).read_text())

        def read() -> object:
            listed["files"][name] = {"bytes": file.stat().st_size, "sha256": "0" * 64}
            (package.path / MANIFEST_NAME).write_text(json.dumps(listed))
            return use(package.path)

        return file, document, read

    return case


def use_templates(path: Path) -> None:
    templates = ChatTemplates.of(read_package(path, verify=False))
    templates.render([{"role": "user", "content": "x"}], ChatOptions())


def genai_config(folder: Path) -> Case:
    """Of a folder with two decoders, of which it names one."""
    for name in ("model.onnx", "other.onnx"):
        shutil.copy(fake_package(folder / name[:5]).path / "decoder.onnx", folder / name)
    document = {
        "model": {
            "decoder": {"filename": "model.onnx", "head_size": 8},
            "vocab_size": 5,
            "eos_token_id": [1],
            "pad": 0,
        },
        "search": {"temperature": 0.5, "top_k": 3, "do_sample": True},
    }

    def read() -> None:
        found = read_settings(locate(folder))
        _ = (
            found.context,
            found.head_dim,
            found.vocab_size,
            found.model_type,
            found.window,
            found.token_ids(100),
        )

    return folder / "genai_config.json", document, read


TEMPLATES = {
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
    "bos_token": {"content": "b"},
}
CASES: dict[str, Callable[[Path], Case]] = {
    "qsample.json": manifest,
    "adapter_config.json": adapter_config,
    "adapter_model.safetensors": adapter_header,
    "prefix.safetensors": prefix_header,
    "sealed.json": seal,
    "manifest.json": bundle,
    "model.safetensors.index.json": weight_index,
    "generation_config.json": generation_config,
    "tokenizer_config.json": of_package("tokenizer_config.json", TEMPLATES, use_templates),
    "genai_config.json": genai_config,
    "generation_config.json of a package": of_package(
        "generation_config.json",
        {"temperature": 0.5, "eos_token_id": [1, 2]},
        lambda path: load(path).generate([[5]]),
    ),
    "config.json of a package": of_package(
        "config.json",
        {"vocab_size": 5, "rope": {"theta": 1.0}},
        lambda path: repr(load(path).config),
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", CASES)
def test_only_errors_of_qsample_come_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    file, document, read = CASES[name](tmp_path)
    whole = file.read_bytes() if file.exists() else b""
    came: Counter[str] = Counter()

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        text = changed(document, data)
        if file.suffix == ".safetensors":
            file.write_bytes(whole)
            in_header(file, text)
        else:
            file.write_bytes(text)
        try:
            read()
            came["nothing"] += 1
        except UnicodeError:
            raise
        except (QsampleError, ValueError) as error:
            came["an error" if len(str(error)) < 2000 else "a long error"] += 1

    attempt()
    assert came["a long error"] == 0
    assert came["an error"] > 0 or name in ("sealed.json", "config.json of a package"), came
