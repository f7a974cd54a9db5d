"""A real Ray cluster on this machine: actors and nodes that die, and replicas of the server.

Needs the extra `ray`:

    pip install -e '.[cpu,export,test,ray]' && pytest -m slow tests/addons/ray
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from qsample.runtime import load

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

PROMPTS = ["And the LORD spake unto", "In the beginning", "Blessed are", "And Jesus said unto them"]
ROWS = 600


def rows() -> list[dict[str, Any]]:
    return [
        {
            "id": index,
            "prompt": PROMPTS[index % 4],
            "sampling_params": {"max_new_tokens": 8 + index * 37 % 90},
        }
        for index in range(ROWS)
    ]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without CPUs for actors, and two nodes of one CPU."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    store = 100 * 2**20
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": store}
    )
    try:
        ray.init(address=made.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def test_rows_survive_a_killed_actor_and_a_lost_node(
    cluster: Any, bundled_package: Path, tmp_path: Path
) -> None:
    from qsample.addons.ray import QsampleProcessorConfig, build_processor

    nodes = [cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20) for _ in range(2)]
    cluster.wait_for_nodes()
    seen: set[int] = set()

    def note(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": row["id"],
            "tokens": list(map(int, row["generated_tokens"])),
            "text": row["generated_text"],
        }

    config = QsampleProcessorConfig(
        package=str(bundled_package),
        concurrency=2,
        batch_size=20,
        slots=8,
        num_cpus=1,
        send_package=True,
    )
    dataset = build_processor(config, postprocess=note)(
        ray.data.from_items(rows(), override_num_blocks=30)
    )

    def disturb() -> None:
        end = time.monotonic() + 120
        while len(pids := engine_processes()) < 2 and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(2)
        os.kill(pids[0], signal.SIGKILL)
        seen.add(pids[0])
        time.sleep(3)
        cluster.remove_node(nodes[0])

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    done = dataset.take_all()
    disturbing.join()
    assert seen  # an actor was killed
    assert sorted(row["id"] for row in done) == list(range(ROWS))

    from qsample.addons.ray.processor import seed_of
    from qsample.runtime import Engine

    with Engine(load(bundled_package), slots=8, max_waiting=ROWS) as engine:
        requests = [
            engine.add_request(row["prompt"], seed=seed_of(row, "id"), **row["sampling_params"])
            for row in rows()
        ]
        expected = {
            row["id"]: request.result().token_ids
            for row, request in zip(rows(), requests, strict=True)
        }
    assert {row["id"]: row["tokens"] for row in done} == expected


def test_serve_streams_from_replicas(cluster: Any, bundled_package: Path) -> None:
    import httpx
    from ray import serve

    from qsample.addons.ray import serve_app
    from qsample.addons.serve import ServeSettings
    from qsample.runtime import SamplingParams

    cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)
    cluster.wait_for_nodes()
    settings = ServeSettings(models={"tiny": str(bundled_package)}, slots=4)
    try:
        port = _free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(serve_app(settings, num_replicas=2, num_cpus=1))
        url = f"http://127.0.0.1:{port}/v1/completions"
        model = load(bundled_package)
        texts = {}
        for seed in range(12):
            texts[seed] = stream(url, {"prompt": PROMPTS[1], "max_tokens": 20, "seed": seed})
        for seed, text in texts.items():
            output = model.generate(PROMPTS[1], SamplingParams(max_new_tokens=20), seed=seed)
            assert output.texts is not None
            assert text == output.texts[0]
        assert httpx.post(url, json={"prompt": "x", "temperature": -1}).status_code == 400
    finally:
        serve.shutdown()


def test_replicas_follow_the_queue(cluster: Any, bundled_package: Path) -> None:
    """One more under load, one fewer after it; no stream is lost on the way, and all have the tokens of `generate`."""
    import httpx
    from ray import serve

    from qsample.addons.ray import serve_app
    from qsample.addons.serve import ServeSettings
    from qsample.runtime import SamplingParams

    cluster.add_node(num_cpus=3, object_store_memory=100 * 2**20)
    cluster.wait_for_nodes()
    settings = ServeSettings(models={"tiny": str(bundled_package)}, slots=2)
    scaling = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1, "downscale_delay_s": 3}
    texts: dict[int, str] = {}
    errors: list[BaseException] = []
    seeds = itertools.count()
    quiet = threading.Event()

    def ask(url: str) -> None:
        try:
            while not quiet.is_set():
                seed = next(seeds)
                texts[seed] = stream(url, {"prompt": PROMPTS[1], "max_tokens": 100, "seed": seed})
        except BaseException as error:
            errors.append(error)

    try:
        port = _free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        handle = serve.run(
            serve_app(
                settings, autoscaling_config={**scaling, "look_back_period_s": 12}, num_cpus=1
            )
        )
        assert handle.check_health.remote().result() is None
        assert replicas(serve) == 1
        url = f"http://127.0.0.1:{port}/v1/completions"
        asking = [threading.Thread(target=ask, args=(url,)) for _ in range(8)]
        for thread in asking:
            thread.start()
        try:
            assert becomes(lambda: replicas(serve), 2)
            time.sleep(2)  # both answer
        finally:
            quiet.set()
            for thread in asking:
                thread.join()
        assert errors == []
        assert becomes(lambda: replicas(serve), 1)
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        model = load(bundled_package)
        assert len(texts) > 8
        for seed in sorted(texts)[:4] + sorted(texts)[-8:]:
            output = model.generate(PROMPTS[1], SamplingParams(max_new_tokens=100), seed=seed)
            assert output.texts is not None
            assert texts[seed] == output.texts[0]
    finally:
        quiet.set()
        serve.shutdown()


def replicas(serve: Any) -> int:
    """How many answer."""
    (deployment,) = serve.status().applications["default"].deployments.values()
    return int(deployment.replica_states.get("RUNNING", 0))


def becomes(look: Callable[[], int], wanted: int, seconds: float = 150) -> bool:
    end = time.monotonic() + seconds
    while look() != wanted:
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def stream(url: str, body: dict[str, Any]) -> str:
    """The text of an answer that comes in events."""
    import httpx

    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        lines = list(answer.iter_lines())
    assert "data: [DONE]" in lines
    events = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    return "".join(event["choices"][0]["text"] for event in events)


def engine_processes() -> list[int]:
    """The processes of actors with an engine, by the title that Ray gives them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if b"EngineActor" in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port
