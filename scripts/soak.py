"""Soaks a server: mixed traffic for half an hour, while its memory, threads, files and sockets must not grow.

    python scripts/soak.py                                    30 minutes
    python scripts/soak.py --minutes 5 --seed 3 --json
    python scripts/soak.py --packages FOLDER                  keep the packages there, and use them again

One `qsample serve` has three packages of the bundled model: `adapters` takes LoRA adapters, `guesses` checks guessed
tokens over an int8 cache, `int4` has quantized weights. Eight clients send every kind of request, whole, streamed and
hung up on, and load and unload adapters. A request that is sent again must have the text that it had. Linux only: the
figures come from /proc.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import qsample
from qsample import AutoModelForCausalLM
from qsample.package.package import read_package
from tests.helpers.adapters import random_adapter
from tests.helpers.servers import ServerProcess

BUNDLED: Final = Path(qsample.__file__).parent / "assets" / "tiny_lm"
REPEATED: Final = (
    12  # requests of a kind that are sent again and again; as many others are sent once
)
PERIOD: Final = 5.0  # seconds between two samples
# The most of a figure: a factor, and an addition for the requests that run at that moment. Caches and the allocator's
# arenas fill ever more slowly. 2 % are 5 MiB in the last 27,000 requests: 200 bytes that each of them leaves are seen.
MOST: Final = {
    "resident": (1.02, 0), "anonymous": (1.02, 0), "threads": (1, 3), "files": (1, 6), "sockets": (1, 6),
    "children": (1, 2),
}  # fmt: skip
TEXT: Final = "And the LORD spake unto Moses saying In the beginning God created heaven and earth king of sons"
WORDS: Final = TEXT.split()
BEGINNINGS: Final = [" ".join(random.Random(number).choices(WORDS, k=70)) for number in range(6)]
REFUSED: Final[list[tuple[int, dict[str, Any]]]] = [
    (400, {"prompt": "And", "temperatur": 1}), (400, {"prompt": TEXT * 100}), (400, {"prompt": [99999]}),
    (400, {"prompt": "And", "structured_outputs": {"regex": "(("}}), (404, {"prompt": "And", "model": "jonah"}),
]  # fmt: skip
# Tokens of {"city": ""} and the stop token. The server refuses a lower limit.
SHORTEST_PLACE: Final = 11
PATHS: Final = ("completions", "chat/completions", "responses", "messages")
STREAM_ENDS: Final = ("[DONE]", "response.completed", "response.incomplete", "message_stop")


def body_of(path: str, number: int, model: str) -> dict[str, Any]:
    """A request, the same for the same arguments."""
    rng = random.Random(f"{path} {number} {model}")
    text = " ".join([rng.choice(["", "", *BEGINNINGS]), *rng.choices(WORDS, k=rng.randint(2, 12))])
    city = {"type": "object", "required": ["city"], "additionalProperties": False}
    schema = {
        **city,
        "properties": {"city": {"type": "string", "maxLength": 4 + rng.randrange(100)}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    options: dict[str, list[dict[str, Any]]] = {
        "completions": [{}, {"n": 3}, {"logprobs": 3}, {"stop": [" the", "and"]}, {"top_k": 20}],
        "chat/completions": [
            {},
            {"n": 2},
            {"logprobs": True, "top_logprobs": 3},
            {"response_format": form},
        ],
    }
    chat = [{"role": "user", "content": text}]
    prompt = {"completions": {"prompt": text}, "responses": {"input": text}}.get(
        path, {"messages": chat}
    )
    guesses = {"prompt_lookup_num_tokens": 7} if model == "guesses" and path in options else {}
    own = {"model": model, "seed": number, "temperature": rng.choice([0, 0.8, 1])}
    chosen = rng.choice(options.get(path, [{}]))
    least = SHORTEST_PLACE if "response_format" in chosen else 1
    limit = rng.randint(least, 40)
    limits = {"max_output_tokens" if path == "responses" else "max_tokens": limit}
    return own | prompt | limits | guesses | chosen


def texts_of(body: Mapping[str, Any], answer: Any) -> list[str]:
    """What an answer says; an error if it is not what `body` asked for."""
    if "choices" not in answer:  # a response or a message
        end = answer["status"] if "output" in answer else answer["stop_reason"]
        assert end in ("completed", "incomplete", "end_turn", "max_tokens"), answer
        return [part["text"] for item in answer.get("output", [answer]) for part in item["content"]]
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(body.get("n", 1))), answer
    texts = [
        choice["text"] if "prompt" in body else choice["message"]["content"] for choice in choices
    ]
    for choice, text in zip(choices, texts, strict=True):
        assert choice["finish_reason"] in ("stop", "length"), answer
        assert choice["logprobs"] or "logprobs" not in body, answer
        if "response_format" in body:
            assert choice["finish_reason"] == "stop", answer
            assert [*json.loads(text)] == ["city"], answer
    return texts


def expect(status: int, answer: httpx.Response) -> Any:
    """The body of an answer, which must have this status."""
    assert answer.status_code == status, (
        f"{status} expected, got {answer.status_code}: {answer.text}"
    )
    return answer.json() if answer.headers["content-type"] == "application/json" else answer.text


class Traffic:
    """Requests of eight clients. `counts`: by kind; `errors`: what went wrong; `samples`: one for each `PERIOD`;
    `slowest`: answer of /health, in seconds."""

    def __init__(self, server: ServerProcess, models: list[str], seed: int) -> None:
        """models: served names; the first takes the adapters "0" to "3"."""
        self.counts, self.errors = Counter[str](), list[str]()
        self.samples, self.slowest = list[dict[str, float]](), 0.0
        self._server, self._models, self._seed, self._end = server, models, seed, 0.0
        self._texts: dict[object, list[str]] = {}  # of the requests that are repeated

    def flow(self, seconds: float) -> None:
        start = time.monotonic()
        self._end = start + seconds
        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(self._send, f"{self._seed} {own}") for own in range(8)]
            while not all(one.done() for one in running):
                began = time.monotonic()
                expect(200, self._server.client.get("/health"))
                self.slowest = max(self.slowest, time.monotonic() - began)
                if began > start + PERIOD * (len(self.samples) + 1):
                    self.samples.append(
                        measured(self._server.process.pid) | {"requests": self.counts.total()}
                    )
                time.sleep(1)

    def _send(self, own: str) -> None:
        rng, limits = (
            random.Random(own),
            httpx.Limits(keepalive_expiry=1),
        )  # idle ones end before the server ends them
        kinds = [self.whole] * 3 + [
            self.stream,
            self.hang_up,
            self.adapter,
            self.refused,
            self.other,
        ]
        with httpx.Client(base_url=self._server.url, timeout=120, limits=limits) as client:
            while time.monotonic() < self._end and self._server.process.poll() is None:
                kind, path, model = rng.choice(kinds), rng.choice(PATHS), rng.choice(self._models)
                number = (
                    rng.randrange(REPEATED)
                    if rng.random() < 0.5
                    else rng.randrange(REPEATED, 1 << 40)
                )
                try:
                    kind(client, path, number, model)
                except Exception as error:  # whatever it is
                    self.errors.append(
                        f"{kind.__name__} {path}: {type(error).__name__}: {error!s:.400}"
                    )
                    print(self.errors[-1], file=sys.stderr)
                    time.sleep(0.2)
                self.counts[kind.__name__] += 1

    def whole(
        self, client: httpx.Client, path: str, number: int, model: str, adapter: str = ""
    ) -> None:
        """adapter: the name `model` stands for it."""
        body = body_of(path, number, adapter or model) | {"model": model}
        texts = texts_of(body, expect(200, client.post(f"/v1/{path}", json=body)))
        if number < REPEATED:
            before = self._texts.setdefault((path, number, adapter or model), texts)
            assert texts == before, f"{body} had {before!r} before, and now {texts!r}"

    def stream(
        self, client: httpx.Client, path: str, number: int, model: str, most: int | None = None
    ) -> None:
        """most: lines to read before the client hangs up; None = all."""
        body, last = body_of(path, number, model) | {"stream": True}, ""
        with client.stream("POST", f"/v1/{path}", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in itertools.islice(filter(None, answer.iter_lines()), most):
                last = line
            assert most is not None or any(end in last for end in STREAM_ENDS), (
                f"{body}: the stream ended with {last}"
            )

    def hang_up(self, client: httpx.Client, path: str, number: int, model: str) -> None:
        self.stream(client, path, number, model, number % 13)

    def adapter(self, client: httpx.Client, path: str, number: int, model: str) -> None:
        name, adapter = threading.current_thread().name, str(number % 4)
        body = {"lora_name": name, "lora_path": adapter, "base_model_name": self._models[0]}
        expect(200, client.post("/v1/load_lora_adapter", json=body))
        self.whole(client, path, number, name, adapter)
        expect(200, client.post("/v1/unload_lora_adapter", json={"lora_name": name}))

    def refused(self, client: httpx.Client, path: str, number: int, model: str) -> None:
        status, body = REFUSED[number % len(REFUSED)]
        assert expect(status, client.post("/v1/completions", json={"model": model, **body}))[
            "error"
        ]["message"]

    def other(self, client: httpx.Client, path: str, number: int, model: str) -> None:
        text = BEGINNINGS[number % len(BEGINNINGS)]
        tokens = expect(200, client.post("/tokenize", json={"model": model, "prompt": text}))[
            "tokens"
        ]
        assert (
            text
            in expect(200, client.post("/detokenize", json={"model": model, "tokens": tokens}))[
                "prompt"
            ]
        )
        for get in ("/metrics", "/v1/models", "/version"):
            expect(200, client.get(get))


def measured(pid: int) -> dict[str, float]:
    """A process's memory in MiB, and its numbers of threads, open files, sockets among them, and child processes."""
    process, files, children = Path(f"/proc/{pid}"), [], 0
    status = dict(
        line.split(":", 1) for line in (process / "status").read_text("ascii").splitlines()
    )
    for file in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            files.append(os.readlink(file))
    for task in (process / "task").iterdir():
        with suppress(OSError):
            children += len((task / "children").read_text("ascii").split())
    sockets = sum(name.startswith("socket:") for name in files)
    numbers = {
        "threads": int(status["Threads"]),
        "files": len(files),
        "sockets": sockets,
        "children": children,
    }
    memory = {"resident": "VmRSS", "anonymous": "RssAnon"}
    return {name: int(status[key].split()[0]) / 1024 for name, key in memory.items()} | numbers


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """What grew by more than it may, in words."""
    most = {
        name: before[name] * factor + more
        for name, (factor, more) in MOST.items()
        if name in before
    }
    found = [name for name in most if after[name] > most[name]]
    return [
        f"{name}: {before[name]:.1f}, then {after[name]:.1f}; at most {most[name]:.1f}"
        for name in found
    ]


def start(packages: Mapping[str, Path], folder: Path) -> ServerProcess:
    """A server of packages by name, whose first takes adapters, with folders for adapters and prefixes in `folder`."""
    interface = read_package(next(iter(packages.values()))).interface
    (folder / "loras").mkdir()
    for number in range(4):
        random_adapter(folder / "loras" / str(number), interface, number)
    models = [word for name, path in packages.items() for word in ("--model", f"{name}={path}")]
    prefixes = (
        "--prefix-cache-dir",
        folder / "prefixes",
        "--prefix-cache-bytes",
        str(8 << 20),
    )  # full within a minute
    others = ("--chat-template", BUNDLED / "chat_template.jinja", "--slots", "4", "--no-access-log")
    return ServerProcess(*models, *prefixes, *others, "--lora-dir", folder / "loras")


def make_packages(folder: Path) -> dict[str, Path]:
    """Served name → a package in `folder`; what is there already is kept."""
    guesses = {"kv_cache_dtype": "int8", "num_speculative_tokens": 7}
    options: dict[str, dict[str, Any]] = {
        "adapters": {},
        "guesses": guesses,
        "int4": {"weights": "int4"},
    }
    for name in options.keys() - {path.name for path in folder.glob("*")}:
        loras = 2 if name == "adapters" else 0
        model = AutoModelForCausalLM.from_pretrained(BUNDLED, for_serving=True, max_loras=loras)
        model.compile(folder / name, ctx_len=256, **options[name])
    return {name: folder / name for name in options}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--packages", type=Path, help="folder of the packages; a temporary one by default"
    )
    parser.add_argument("--json", action="store_true", help="print all samples")
    given = parser.parse_args()
    if not Path("/proc/self/task").exists():
        sys.exit("this machine has no /proc, from which the figures come; run it on Linux")
    with tempfile.TemporaryDirectory() as temporary:
        packages = make_packages(given.packages or Path(temporary, "packages"))
        with start(packages, Path(temporary)) as server:
            traffic = Traffic(server, [*packages], given.seed)
            traffic.flow(given.minutes * 60)
    half, sixth = len(traffic.samples) // 2, max(1, len(traffic.samples) // 6)
    parts = (
        traffic.samples[half : half + sixth],
        traffic.samples[-sixth:],
    )  # the first half fills the caches
    before, after = (
        {name: statistics.median(one[name] for one in part) for name in part[0]} for part in parts
    )
    found = {
        "requests": dict(traffic.counts),
        "errors": len(traffic.errors),
        "slowest /health, s": traffic.slowest,
    }
    if given.json:
        print(json.dumps(found | {"before": before, "after": after, "samples": traffic.samples}))
    else:
        print("| | fourth sixth | last sixth |\n| --- | --- | --- |")
        print(
            "\n".join(f"| {name} | {before[name]:.0f} | {after[name]:.0f} |" for name in before),
            found,
            sep="\n",
        )
    faults = grown(before, after)
    print("\n".join(faults), file=sys.stderr)
    sys.exit(1 if traffic.errors or faults else 0)


if __name__ == "__main__":
    main()
