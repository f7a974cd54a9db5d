"""Attacks on signed packages, each against a process of the command line: what is opened later than the start, and
folders that change their names meanwhile."""

from __future__ import annotations

import base64
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
from PIL import Image

from qsample.addons.trust.signing import sign
from qsample.errors import PackageError
from qsample.package.disk.replace import exchange
from qsample.package.package import Package
from qsample.runtime import load
from tests.helpers import fake_images
from tests.helpers.fake_package import fake_package
from tests.helpers.servers import ServerProcess

pytest.importorskip("model_signing")
from tests.helpers.signing_keys import key_pair


def ask(server: ServerProcess) -> Any:
    """The answer to a request with an image."""
    file = io.BytesIO()
    Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    content = [image, {"type": "text", "text": "a"}]
    body = {
        "model": "package",
        "max_tokens": 8,
        "temperature": 0,
        "messages": [{"role": "user", "content": content}],
    }
    return server.client.post("/v1/chat/completions", json=body)


def upside_down(graph: onnx.ModelProto, name: str) -> None:
    """Change the sign of a weight, and its size."""
    for weight in graph.graph.initializer:
        if weight.name == name:
            values = onnx.numpy_helper.to_array(weight)
            weight.CopyFrom(onnx.numpy_helper.from_array(-3 * values, name))


def other_vision(folder: Path) -> None:
    """Replace vision.onnx by another graph with the same inputs and outputs."""
    graph = onnx.load(folder / "vision.onnx")
    upside_down(graph, "w")
    (folder / "new").write_bytes(graph.SerializeToString())
    (folder / "new").replace(folder / "vision.onnx")


@pytest.mark.ci
def test_a_graph_that_is_opened_later_is_verified_then(
    fake: Callable[..., Package], tmp_path: Path
) -> None:
    private, public = key_pair(tmp_path / "keys")
    package = fake(image=fake_images.ROWS, files={"chat_template.jinja": fake_images.CHAT_TEMPLATE})
    folder = tmp_path / "package"
    shutil.copytree(package.path, folder)
    sign(folder, private_key=private)
    shutil.copytree(folder, tmp_path / "genuine")
    with ServerProcess(folder, "--trusted-keys", public) as server:
        right = ask(server)
        assert right.status_code == 200, right.text
    with ServerProcess(folder, "--trusted-keys", public) as server:
        other_vision(folder)
        answer = ask(server)
        assert answer.status_code == 500
        assert "is no longer the package that was opened" in "".join(server.log)
        # The server lives on, and reads images as soon as the file is the signed one again.
        shutil.copy(tmp_path / "genuine" / "vision.onnx", folder)
        assert ask(server).json()["choices"] == right.json()["choices"]


# Exchanges two folders until it is killed, and stays longer with the first pair of names.
EXCHANGES: Final = """
import sys, time
from pathlib import Path
from qsample.package.disk.replace import exchange
first, second = Path(sys.argv[1]), Path(sys.argv[2])
print("started", flush=True)
while True:
    exchange(first, second)
    time.sleep(float(sys.argv[3]))
    exchange(first, second)
    time.sleep(float(sys.argv[3]))
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins a folder")
@pytest.mark.parametrize("exchanged", ["the package", "the folder around it"])
def test_folders_that_change_their_names(
    fake: Callable[..., Package], exchanged: str, tmp_path: Path
) -> None:
    private, public = key_pair(tmp_path / "keys")
    good, evil = tmp_path / "good" / "package", tmp_path / "evil" / "package"
    shutil.copytree(fake().path, good)
    sign(good, private_key=private)
    fake_package(evil, edit=lambda graph: upside_down(graph, "w_head"))
    prompt = [[5, 6, 7]]

    def tokens() -> list[int]:
        model = load(good, trusted_keys=public)
        output = model.generate(prompt, max_new_tokens=6, do_sample=False)
        return list(map(int, output[0]))

    right = tokens()
    assert list(load(evil).generate(prompt, max_new_tokens=6, do_sample=False)[0]) != right
    names = (good, evil) if exchanged == "the package" else (good.parent, evil.parent)
    answers: list[list[int] | None] = []
    for pause in ("0.01", "0.03", "0.1"):
        attacker = subprocess.Popen(
            [sys.executable, "-c", EXCHANGES, *names, pause], stdout=subprocess.PIPE
        )
        try:
            assert attacker.stdout is not None
            attacker.stdout.readline()
            for _ in range(10):
                try:
                    answers.append(tokens())
                except PackageError:
                    answers.append(None)
        finally:
            attacker.kill()
            attacker.communicate()
            if not (good / "model.sig").exists():
                assert exchange(*names)
    refused = answers.count(None)
    wrong = [answer for answer in answers if answer not in (None, right)]
    print(f"{len(answers)} loads: {refused} refused, {len(wrong)} wrong")
    assert not wrong
