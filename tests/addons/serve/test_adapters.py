"""LoRA adapters over HTTP: the real `openai` client against a real server, and everything that clients must not do.

The oracle is `generate` in this process, with the same adapter.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from starlette.testclient import TestClient

from qsample.addons.serve.http import ApiError
from qsample.runtime import CausalLM, SamplingParams, load
from tests.helpers.adapters import random_adapter
from tests.helpers.servers import ServerProcess, watched

pytestmark = pytest.mark.ci
PROMPT = "And the LORD spake unto Moses"
NAMES = ("judges", "kings", "ruth", "esther")
SAMPLED: Any = {"max_tokens": 12, "temperature": 0.9}


@pytest.fixture(scope="module")
def model(adapted_server_package: Path) -> CausalLM:
    return load(adapted_server_package, intra_op_num_threads=1)


@pytest.fixture(scope="module")
def folder(model: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`--lora-dir`, with an adapter of each name, and one outside of it."""
    parent = tmp_path_factory.mktemp("adapters")
    (parent / "allowed").mkdir()
    for seed, name in enumerate((*NAMES, "job")):
        random_adapter(parent / "allowed" / name, model.interface, seed, rank=2 + seed)
    random_adapter(parent / "outside", model.interface, 9, rank=2)
    return parent / "allowed"


@pytest.fixture(scope="module")
def server(
    adapted_server_package: Path, folder: Path, chat_template: Path
) -> Iterator[ServerProcess]:
    loras = [argument for name in NAMES for argument in ("--lora", f"{name}={folder / name}")]
    options = [
        "--served-model-name",
        "tiny",
        "--chat-template",
        chat_template,
        "--slots",
        "5",
        "--threads",
        "1",
    ]
    with ServerProcess(adapted_server_package, *options, *loras, "--lora-dir", folder) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def app(
    adapted_server_package: Path, folder: Path, local_app: Callable[..., TestClient]
) -> Iterator[TestClient]:
    settings = {
        "models": {"tiny": str(adapted_server_package)},
        "lora_dir": str(folder),
        "max_cpu_loras": 2,
    }
    with local_app(**settings) as running:
        yield running


def expected(
    model: CausalLM, folder: Path, name: str | None, seed: int, prompt: Any = PROMPT, **options: Any
) -> Any:
    """What `generate` gives with an adapter."""
    if name is not None:
        model.load_adapter("own", folder / name, hotswap=True)
    own = None if name is None else "own"
    return model.generate(
        prompt,
        SamplingParams(adapter=own, max_new_tokens=12, temperature=0.9),
        seed=seed,
        **options,
    )


def test_four_adapters_and_none_in_a_batch(
    server: ServerProcess, client: openai.OpenAI, model: CausalLM, folder: Path
) -> None:
    def ask(name: str) -> Any:
        return client.completions.create(model=name, prompt=PROMPT, seed=3, **SAMPLED)

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, ["tiny", *NAMES] * 2))
    wanted = [expected(model, folder, name, 3).texts[0] for name in (None, *NAMES)]
    assert [answer.choices[0].text for answer in answers] == wanted * 2
    assert [answer.model for answer in answers] == ["tiny", *NAMES] * 2
    assert len(set(wanted)) == 5
    assert server.metric("request_success_total") >= 10


def test_chats_and_streams_have_the_adapter(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": PROMPT}]
    whole = client.chat.completions.create(model="ruth", messages=messages, seed=1, **SAMPLED)
    other = client.chat.completions.create(model="tiny", messages=messages, seed=1, **SAMPLED)
    assert whole.choices[0].message.content != other.choices[0].message.content
    stream = client.chat.completions.create(
        model="ruth", messages=messages, seed=1, stream=True, **SAMPLED
    )
    events = list(stream)
    assert (
        "".join(event.choices[0].delta.content or "" for event in events)
        == whole.choices[0].message.content
    )
    assert {event.model for event in events} == {"ruth"}
    response = client.responses.create(
        model="ruth", input=PROMPT, max_output_tokens=12, temperature=0
    )
    assert response.model == "ruth"


def test_log_probabilities_of_a_prompt_are_the_adapters(
    client: openai.OpenAI, model: CausalLM, folder: Path
) -> None:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(PROMPT)
    answer = client.completions.create(
        model="kings", prompt=PROMPT, echo=True, logprobs=0, max_tokens=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    mask = np.zeros(-(-model.interface.vocab_size // 32), np.int32)
    mask[ids[-1] // 32] = np.uint32(1 << ids[-1] % 32).astype(np.int32)
    forced = expected(model, folder, "kings", 0, [ids[:-1]], allowed_tokens=mask)
    assert logprobs.token_logprobs[-1] == pytest.approx(float(forced.logprobs[0, 0]), abs=1e-4)


def test_models_and_adapters_are_listed(client: openai.OpenAI) -> None:
    listed = {entry.id: entry.to_dict() for entry in client.models.list()}
    assert [*listed] == ["tiny", *NAMES]
    assert "parent" not in listed["tiny"]
    assert {listed[name]["parent"] for name in NAMES} == {"tiny"}
    assert client.models.retrieve("ruth").id == "ruth"
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="jonah", prompt=PROMPT)
    assert caught.value.code == "model_not_found"
    assert "'ruth'" in caught.value.message


def post(server: ServerProcess, what: str, **body: Any) -> httpx.Response:
    return server.client.post(f"/v1/{what}_lora_adapter", json=body)


def test_an_adapter_is_loaded_replaced_and_unloaded_while_others_run(
    server: ServerProcess, client: openai.OpenAI, model: CausalLM, folder: Path
) -> None:
    def text(name: str) -> str:
        return (
            client.completions.create(model=name, prompt=PROMPT, seed=3, **SAMPLED).choices[0].text
        )

    long = client.completions.create(
        model="ruth", prompt=PROMPT, max_tokens=150, seed=1, stream=True
    )
    pieces = [next(long).choices[0].text]
    loaded = post(server, "load", lora_name="new", lora_path="job")
    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'new' added successfully.",
    )
    assert text("new") == expected(model, folder, "job", 3).texts[0]
    again = post(server, "load", lora_name="new", lora_path="ruth")
    assert (again.status_code, again.json()["error"]["param"]) == (400, "lora_name")
    assert (
        post(
            server, "load", lora_name="new", lora_path=str(folder / "kings"), load_inplace=True
        ).status_code
        == 200
    )
    assert text("new") == expected(model, folder, "kings", 3).texts[0]
    removed = post(server, "unload", lora_name="new")
    assert (removed.status_code, removed.text) == (
        200,
        "Success: LoRA adapter 'new' removed successfully.",
    )
    with pytest.raises(openai.NotFoundError):
        text("new")
    assert post(server, "unload", lora_name="new").status_code == 404
    # The stream's own adapter leaves, and comes back with other weights.
    assert post(server, "unload", lora_name="ruth").status_code == 200
    assert post(server, "load", lora_name="ruth", lora_path="esther").status_code == 200
    pieces += [event.choices[0].text for event in long]
    model.load_adapter("own", folder / "ruth", hotswap=True)
    whole = model.generate(PROMPT, SamplingParams(adapter="own", max_new_tokens=150), seed=1)
    assert "".join(pieces) == whole.texts[0]
    assert text("ruth") == expected(model, folder, "esther", 3).texts[0]
    assert (
        post(server, "load", lora_name="ruth", lora_path="ruth", load_inplace=True).status_code
        == 200
    )


def test_metrics_name_the_adapters_of_requests_and_no_others(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    stream = client.completions.create(model="ruth", prompt=PROMPT, max_tokens=200, stream=True)
    next(stream)
    text = server.client.get("/metrics").text
    stream.close()
    found = re.findall(r"^qsample:lora_requests_info\{(.*)\} ", text, re.M)
    assert len(found) == 1
    assert 'max_lora="4"' in found[0]
    assert 'running_lora_adapters="ruth"' in found[0]
    assert set(re.findall(r'model_name="(.*?)"', text)) == {"tiny"}


@pytest.mark.parametrize(
    "path",
    [
        *(
            "",
            ".",
            "..",
            "../outside",
            "judges/..",
            "judges/../../outside",
            "/etc",
            "nowhere",
            "judges\0",
            "j" * 5000,
        ),
        *("plain", "link", "linked_file", "pipe", "judges/adapter_config.json", "\ud800"),
    ],
)
def test_no_path_leads_out_of_the_folder(app: TestClient, folder: Path, path: str) -> None:
    outside = folder.parent / "outside"
    for name in ("plain", "link", "linked_file", "pipe"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).unlink(missing_ok=True)
    (folder / "plain").write_text("a file")
    (folder / "link").symlink_to(outside)
    for name in ("linked_file", "pipe"):
        shutil.copytree(folder / "judges", folder / name)
        (folder / name / "adapter_model.safetensors").unlink()
    (folder / "linked_file" / "adapter_model.safetensors").symlink_to(
        outside / "adapter_model.safetensors"
    )
    os.mkfifo(folder / "pipe" / "adapter_model.safetensors")
    body = json.dumps({"lora_name": "new", "lora_path": path})
    answer = app.post(
        "/v1/load_lora_adapter", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "lora_path"
    assert [entry["id"] for entry in app.get("/v1/models").json()["data"]] == ["tiny"]


WAYS_BACK = [
    "../PLACE/../allowed/judges",
    "FOLDER/../../PLACE/../adapters/allowed/judges",
    "FOLDER/../PLACE/../allowed/judges",
    "/PLACE/../FOLDER/judges",
    "PLACE/back/judges",
    "/PARENT/PLACE/back/judges",
    "out/PLACE/back/judges",
    "out/PLACE",
    "/PARENT/PLACE",
]


@pytest.mark.parametrize("way", WAYS_BACK)
def test_answers_do_not_tell_what_exists_elsewhere(
    server: ServerProcess, folder: Path, way: str
) -> None:
    """Nor by ways that leave the folder and come back: through .., or through links on both ways."""
    parent = folder.parent
    there = parent / "there"
    if not there.exists():
        there.mkdir()
        (there / "back").symlink_to(folder)
        (folder / "out").symlink_to(parent)
    words = []
    for place in ("there", "never"):
        path = (
            way.replace("PLACE", place)
            .replace("FOLDER", str(folder))
            .replace("PARENT", str(parent))
        )
        answer = post(server, "load", lora_name=f"{place}{WAYS_BACK.index(way)}", lora_path=path)
        assert answer.status_code == 400, (path, answer.text)
        words.append(answer.text.replace(place, "PLACE"))
    assert words[0] == words[1]
    (folder / "out").unlink()
    shutil.rmtree(there)


def test_names_are_no_paths(server: ServerProcess, folder: Path) -> None:
    """Of models, templates, scripts and adapters: a file that exists, and one that does not, have the same answer."""
    messages = [{"role": "user", "content": "x"}]
    (folder.parent / "zqthere.txt").write_text("x")
    answers = []
    for name in ("zqthere.txt", "zqnever.txt"):
        path = str(folder.parent / name)
        quoted = path.replace("/", "%2f")
        chat = {"messages": messages, "max_tokens": 1}
        asked = [
            server.client.post("/v1/completions", json={"model": path, "prompt": "x"}),
            server.client.post("/v1/chat/completions", json={**chat, "chat_template": path}),
            server.client.get(f"/v1/models/{quoted}"),
            server.client.get(f"/docs/..{quoted}"),
            server.client.get(f"/markdown/{quoted}"),
            post(server, "unload", lora_name=path),
            post(server, "load", lora_name="new", lora_path="judges", base_model_name=path),
        ]
        assert {answer.status_code for answer in asked} <= {400, 404}
        # Long paths are cut, perhaps within the name.
        answers.append([re.sub(r"zq[a-z.]*", "NAME", answer.text) for answer in asked])
    assert answers[0] == answers[1]


def test_errors_name_folders_in_the_words_of_the_client(
    server: ServerProcess, folder: Path
) -> None:
    shutil.copytree(folder / "judges", folder / "no_config")
    (folder / "no_config" / "adapter_config.json").unlink()
    shutil.copytree(folder / "judges", folder / "no_json")
    (folder / "no_json" / "adapter_config.json").write_text("{")
    for name in ("no_config", "no_json"):
        refused = post(server, "load", lora_name="new", lora_path=name)
        assert refused.status_code == 400
        assert name in refused.text
        assert str(folder) not in refused.text
        shutil.rmtree(folder / name)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_path": "judges"}, "lora_name"),
        ({"lora_name": "new"}, "lora_path"),
        ({"lora_name": "", "lora_path": "judges"}, "lora_name"),
        ({"lora_name": "a,b", "lora_path": "judges"}, "lora_name"),
        ({"lora_name": "n" * 300, "lora_path": "judges"}, "lora_name"),
        ({"lora_name": "tiny", "lora_path": "judges"}, "lora_name"),
        ({"lora_name": "tiny", "lora_path": "judges", "load_inplace": True}, "lora_name"),
        (
            {"lora_name": "new", "lora_path": "judges", "base_model_name": "other"},
            "base_model_name",
        ),
        ({"lora_name": "new", "lora_path": "damaged"}, "lora_path"),
        ({"lora_name": "new", "lora_path": "too_wide"}, "lora_path"),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(
    app: TestClient, folder: Path, model: CausalLM, body: dict[str, Any], param: str
) -> None:
    if not (folder / "damaged").exists():
        shutil.copytree(folder / "judges", folder / "damaged")
        weights = folder / "damaged" / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-10])
        random_adapter(
            folder / "too_wide", model.interface, 1, rank=model.features.max_lora_rank + 1
        )
    answer = app.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
    assert [entry["id"] for entry in app.get("/v1/models").json()["data"]] == ["tiny"]


PATTERN = {"rank_pattern": {"([a-z_.0-9]+)+X": 4}}
MANY = {"rank_pattern": {f"x{number}": 4 for number in range(200_000)}}
NESTED = b'{"__metadata__":' + b"[" * 100_000
SPARSE = json.dumps(
    {"a": {"dtype": "F32", "shape": [1 << 50], "data_offsets": [0, 1 << 52]}}
).encode()


@pytest.mark.parametrize(
    ("config", "weights", "size", "words"),
    [
        (
            PATTERN,
            b"",
            0,
            "it is not simple",
        ),  # it kept Python's lock, and with it the whole server, for ever
        (MANY, b"", 0, "too many ways"),
        ({"auto_mapping": "x" * 200_000_000}, b"", 0, "larger than 4 MiB"),
        ({}, NESTED, 0, "nested more than 64 deep"),
        ({}, SPARSE, 1 << 40, "and may have"),
        ({}, b"{" * (1 << 24), 0, "arrays and objects"),
    ],
    ids=["pattern", "patterns", "large", "nested", "sparse", "braces"],
)
def test_hostile_adapters_hold_nobody_up(
    server: ServerProcess,
    folder: Path,
    config: dict[str, Any],
    weights: bytes,
    size: int,
    words: str,
) -> None:
    hostile = folder / "hostile"
    shutil.rmtree(hostile, ignore_errors=True)
    shutil.copytree(folder / "judges", hostile)
    settings = json.loads((hostile / "adapter_config.json").read_text())
    (hostile / "adapter_config.json").write_text(json.dumps(settings | config))
    if weights:
        file = hostile / "adapter_model.safetensors"
        file.write_bytes(len(weights).to_bytes(8, "little") + weights)
        if size:
            os.truncate(file, size)
    with watched(server):
        refused = post(server, "load", lora_name="hostile", lora_path="hostile")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path"), (
        refused.text
    )
    assert words in refused.json()["error"]["message"]
    shutil.rmtree(hostile)


def test_no_more_adapters_than_the_server_takes(app: TestClient) -> None:
    for name, status in (("judges", 200), ("kings", 200), ("ruth", 400)):
        answer = app.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": name})
        assert answer.status_code == status
    assert "--max-cpu-loras" in answer.json()["error"]["message"]
    assert app.post("/v1/unload_lora_adapter", json={"lora_name": "kings"}).status_code == 200
    assert (
        app.post(
            "/v1/load_lora_adapter", json={"lora_name": "ruth", "lora_path": "ruth"}
        ).status_code
        == 200
    )
    for name in ("judges", "ruth"):
        assert app.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200


def test_an_adapter_that_leaves_while_a_prompt_is_encoded(app: TestClient) -> None:
    assert (
        app.post(
            "/v1/load_lora_adapter", json={"lora_name": "ruth", "lora_path": "ruth"}
        ).status_code
        == 200
    )
    models = app.app.state.server.models  # type: ignore[attr-defined]
    served = models.find("ruth")
    models.unload_adapter("ruth")
    with pytest.raises(ApiError, match="'ruth' does not exist here") as caught:
        served.add([5], SamplingParams(max_new_tokens=1))
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_loading_is_off_unless_a_folder_is_given(
    adapted_server_package: Path, folder: Path, local_app: Callable[..., TestClient]
) -> None:
    settings = {
        "models": {"tiny": str(adapted_server_package)},
        "loras": {"ruth": str(folder / "ruth")},
    }
    with local_app(**settings) as app:
        for what, body in (
            ("load", {"lora_name": "new", "lora_path": "job"}),
            ("unload", {"lora_name": "ruth"}),
        ):
            answer = app.post(f"/v1/{what}_lora_adapter", json=body)
            assert answer.status_code == 404
            assert "--lora-dir" in answer.json()["error"]["message"]
        assert [entry["id"] for entry in app.get("/v1/models").json()["data"]] == ["tiny", "ruth"]
