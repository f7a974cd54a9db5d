"""Prompts that continue from files get the tokens of a fresh `generate`, whatever became of the files
meanwhile."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.contract.arrays import DTYPES
from qsample.contract.tensors import BATCH, CAPACITY
from qsample.errors import PackageError
from qsample.runtime import CausalLM, Engine, RequestOutput, SamplingParams, load
from qsample.runtime.decode import stored_prefixes
from qsample.runtime.decode.prefix_file import PrefixFile, signature_of
from qsample.runtime.decode.stored_prefixes import StoredPrefixes
from tests.helpers.requests import wait_until
from tests.helpers.sessions import with_prompt_calls

PIECE = 16
CTX_LEN = 256
SAMPLED_PARAMS = SamplingParams(temperature=1.0, max_new_tokens=6, eos_token_id=())


@pytest.fixture(
    scope="module", params=["llama", "qwen3_5_text", pytest.param("mamba", marks=pytest.mark.slow)]
)
def model(request: pytest.FixtureRequest, exported: Callable[..., Path]) -> CausalLM:
    """Models with attention, with recurrences, and with both. Their pieces are short, so that a short
    prompt has several."""
    return with_short_pieces(exported(request.param, logprobs=True))


@pytest.fixture(scope="module")
def llama(exported: Callable[..., Path]) -> CausalLM:
    return with_short_pieces(exported("llama", logprobs=True))


def with_short_pieces(path: Path) -> CausalLM:
    opened = load(path, ctx_len=CTX_LEN)
    return CausalLM(opened.package, with_prompt_calls(opened.sessions, piece_size=PIECE), CTX_LEN)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=length)


def ask_and_count_read(engine: Engine, model: CausalLM, tokens: list[int], seed: int = 0) -> int:
    """The number of tokens that were not read; the answer is checked."""
    output = engine.add_request(tokens, SAMPLED_PARAMS, seed=seed).result(120)
    check(output, model, tokens, seed)
    return output.usage.cached_tokens


def check(output: RequestOutput, model: CausalLM, tokens: list[int], seed: int) -> None:
    """Compare an output with a fresh batch, log-probabilities included: tokens hardly show what a
    recurrence forgot."""
    fresh = model.generate([tokens], SAMPLED_PARAMS, seed=seed)
    assert output.token_ids == fresh.token_ids[0]
    assert fresh.logprobs is not None
    np.testing.assert_array_equal(output.outputs["logprobs"].ravel(), fresh.logprobs[0].ravel())


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def parts_in(folder: Path, model: CausalLM) -> list[tuple[int, int]]:
    """(start, end) of the parts, those used longest ago first."""
    signature = signature_of(model.package, model.sessions)
    opened = [PrefixFile.open(path, signature, model.interface) for path in files(folder)]
    return [(file.start, len(file.tokens)) for file in opened]


def test_prompts_continue_from_a_file(model: CausalLM, tmp_path: Path) -> None:
    rules = prompt(1, 53)
    assert model.save_prefix(rules, tmp_path / "rules") == 48
    with Engine(model, slots=3, prefixes=[tmp_path / "rules"]) as engine:
        requests = [
            engine.add_request([*rules[:48], *prompt(seed, 9)], SAMPLED_PARAMS, seed=seed)
            for seed in range(4)
        ]
        for seed, request in enumerate(requests):
            output = request.result(120)
            check(output, model, [*rules[:48], *prompt(seed, 9)], seed)
            assert output.usage.cached_tokens == 48
        assert ask_and_count_read(engine, model, prompt(2, 60)) == 0
        # A prompt that leaves the prefix earlier can use the keys and values of attention, but the states
        # follow the end of the prefix.
        assert ask_and_count_read(engine, model, [*rules[:40], *prompt(3, 5)]) == (
            0 if model.interface.recurrent else 32
        )
        (tmp_path / "rules").unlink()
        assert ask_and_count_read(engine, model, [*rules[:48], *prompt(9, 5)]) == 48, "it is open"


def test_a_file_of_the_caller_may_be_written_to_and_cut_off(
    llama: CausalLM, tmp_path: Path
) -> None:
    """The numbers are in memory. A memory map of the file would show every change, and end the process
    where the file is cut off."""
    rules, file = prompt(1, 53), tmp_path / "rules"
    assert llama.save_prefix(rules, file) == 48
    with Engine(llama, slots=1, prefixes=[file]) as engine:
        for seed, size in enumerate((file.stat().st_size, 4096)):
            ask_and_count_read(engine, llama, prompt(20 + seed, 60))  # whose slot forgets the rules
            file.write_bytes(b"\xff" * size)
            assert ask_and_count_read(engine, llama, [*rules[:48], *prompt(30 + seed, 5)]) == 48


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
@pytest.mark.parametrize("damage", ["nested", "pipe", "swapped", "sparse"])
def test_hostile_files_of_the_folder(llama: CausalLM, tmp_path: Path, damage: str) -> None:
    """They are deleted without harm: the engine neither waits nor ends, and uses no numbers of them."""
    turns, other = prompt(17, 60), prompt(18, 60)
    for one in (turns, other):
        with Engine(llama, slots=1, prefix_cache_dir=tmp_path) as engine:
            ask_and_count_read(engine, llama, one)
    old, new = files(tmp_path)
    with Engine(llama, slots=1, prefix_cache_dir=tmp_path) as engine:
        assert ask_and_count_read(engine, llama, turns) == 48, "it knows both"
        if damage == "swapped":
            shutil.copy(old, new)
            assert ask_and_count_read(engine, llama, other) == 0
        else:
            hostile = old.with_name(old.name[:17] + "0" * 32 + ".safetensors")
            if damage == "pipe":
                os.mkfifo(hostile)
            elif damage == "nested":
                header = b'{"__metadata__":' + b"[" * 100_000
                hostile.write_bytes(len(header).to_bytes(8, "little") + header)
            else:
                header = json.dumps(
                    {"tokens": {"dtype": "I64", "shape": [1 << 50], "data_offsets": [0, 1 << 53]}}
                )
                hostile.write_bytes(len(header).to_bytes(8, "little") + header.encode())
                os.truncate(hostile, 1 << 40)
            assert ask_and_count_read(engine, llama, other) == 48
            assert not hostile.exists()


def test_a_conversation_continues_after_a_restart(model: CausalLM, tmp_path: Path) -> None:
    folder, turns = tmp_path / "kept" / "here", prompt(4, 120)
    cached, parts = [], []
    for end in (40, 41, 90, 120):
        with Engine(model, slots=2, prefix_cache_dir=folder) as engine:
            cached.append(ask_and_count_read(engine, model, turns[:end], seed=end))
        parts.append(sorted(parts_in(folder, model)))
    assert cached == [0, 32, 32, 80]
    assert parts == [[(0, 32)], [(0, 32)], [(0, 32), (32, 80)], [(0, 32), (32, 80), (80, 112)]]
    assert folder.stat().st_mode & 0o777 == 0o700
    with Engine(model, slots=2, prefix_cache_dir=folder) as engine:
        fork = [*turns[:80], *prompt(5, 30)]
        assert ask_and_count_read(engine, model, fork) == 80
        assert ask_and_count_read(engine, model, turns) == 112
    assert sorted(parts_in(folder, model))[-2:] == [(80, 96), (80, 112)]


def test_another_engine_sees_a_prompt_once_its_request_ended(
    llama: CausalLM, tmp_path: Path
) -> None:
    turns = prompt(6, 60)
    with (
        Engine(llama, slots=1, prefix_cache_dir=tmp_path) as one,
        Engine(llama, prefix_cache_dir=tmp_path) as other,
    ):
        ask_and_count_read(one, llama, turns)
        wait_until(lambda: bool(files(tmp_path)))
        assert ask_and_count_read(other, llama, turns) == 48


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
@pytest.mark.parametrize("part", [0, 1])
def test_a_damaged_part_is_read_again(
    llama: CausalLM, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, part: int
) -> None:
    turns = prompt(7, 90)
    for end in (40, 90):
        with Engine(llama, slots=1, prefix_cache_dir=tmp_path) as engine:
            ask_and_count_read(engine, llama, turns[:end])
    (whole,) = (
        path
        for path in files(tmp_path)
        if PrefixFile.open(path, signature_of(llama.package, llama.sessions), llama.interface).start
        == (0, 32)[part]
    )
    data = whole.read_bytes()
    if damage == "missing":
        whole.unlink()
    else:
        whole.write_bytes(data[:-1] + (b"" if damage == "cut" else bytes([data[-1] ^ 64])))
    with (
        caplog.at_level(logging.WARNING),
        Engine(llama, slots=1, prefix_cache_dir=tmp_path) as engine,
    ):
        read = ask_and_count_read(engine, llama, turns)
    assert read == (32 if part == 1 and damage != "flipped" else 0)
    assert ("is not used" in caplog.text) == (damage != "missing")
    with Engine(llama, slots=1, prefix_cache_dir=tmp_path) as engine:
        assert ask_and_count_read(engine, llama, turns) == 80, "it was kept anew"


def test_the_parts_used_longest_ago_make_room(llama: CausalLM, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with Engine(llama, slots=1, prefix_cache_dir=tmp_path) as engine:
        ask_and_count_read(engine, llama, prompt(8, 40))
    part = files(tmp_path)[0].stat().st_size
    long = prompt(9, 100)
    for end in (40, 70, 100):
        with Engine(
            llama, slots=1, prefix_cache_dir=tmp_path, prefix_cache_bytes=4 * part
        ) as engine:
            ask_and_count_read(engine, llama, long[:end])
    assert sorted(parts_in(tmp_path, llama)) == [(0, 32), (32, 64), (64, 96)], (
        "the other conversation went"
    )
    with Engine(
        llama, slots=1, prefix_cache_dir=tmp_path, prefix_cache_bytes=2 * part + 5000
    ) as engine:
        assert ask_and_count_read(engine, llama, long) == 96
        ask_and_count_read(engine, llama, prompt(10, 40))
    assert sorted(parts_in(tmp_path, llama)) == [(0, 32), (0, 32)], (
        "a conversation loses its latest parts first"
    )
    with Engine(llama, slots=1, prefix_cache_dir=tmp_path, prefix_cache_bytes=100) as engine:
        ask_and_count_read(engine, llama, prompt(11, 40))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_full_disk_costs_no_answer(
    llama: CausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    with Engine(llama, slots=1, prefix_cache_dir=tmp_path) as engine:
        ask_and_count_read(engine, llama, prompt(12, 40))
    assert "a prefix is not kept" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_failing_writer_holds_up_no_request(
    llama: CausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("qsample.runtime.decode.stored_prefixes.write_prefix", fail)
    with Engine(llama, slots=1, prefix_cache_dir=tmp_path) as engine:
        for seed in range(40, 45):  # more than may wait for the disk
            ask_and_count_read(engine, llama, prompt(seed, 40))
    assert "a prefix is not kept: no room" in caplog.text


def test_wrong_arguments(llama: CausalLM, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong, message in (
        ({"prefixes": "rules"}, "give a list of files"),
        ({"prefix_cache_dir": tmp_path, "reuse_sampled_tokens": True}, "leave either out"),
        ({"prefix_cache_dir": tmp_path, "prefix_cache_bytes": 0}, "prefix_cache_bytes is 0"),
        ({"prefix_cache_dir": tmp_path / "file"}, "cannot make"),
        ({"prefixes": [tmp_path / "missing"]}, "cannot read the prefix"),
    ):
        with pytest.raises((ValueError, PackageError), match=message):
            Engine(llama, **wrong)  # type: ignore[arg-type]


def test_two_engines_share_a_folder_that_loses_files(model: CausalLM, tmp_path: Path) -> None:
    """Random conversations share beginnings, while a third party deletes and damages files."""
    rng = random.Random(13)
    trunks = [prompt(seed, 100) for seed in (20, 21)]
    asked: list[list[int]] = [
        [*rng.choice(trunks)[: rng.randrange(1, 100)], *prompt(index, 12)] for index in range(24)
    ]
    done = threading.Event()

    def disturb() -> None:
        while not done.wait(0.02):
            for path in tmp_path.glob("*.safetensors"):
                if rng.random() < 0.2:
                    path.unlink(missing_ok=True)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        with (
            Engine(model, slots=2, prefix_cache_dir=tmp_path) as one,
            Engine(model, prefix_cache_dir=tmp_path) as two,
        ):
            requests = [
                rng.choice([one, two]).add_request(tokens, SAMPLED_PARAMS, seed=1)
                for tokens in asked
            ]
            outputs = [request.result(120) for request in requests]
    finally:
        done.set()
        disturber.join()
    for tokens, output in zip(asked, outputs, strict=True):
        check(output, model, tokens, 1)


KILLED_SCRIPT = """
import random, sys
from qsample.runtime import Engine, load
engine = Engine(load(sys.argv[1], ctx_len=256), slots=1, prefix_cache_dir=sys.argv[2])
print("ready", flush=True)
for seed in range(10**6):
    engine.add_request(random.Random(seed).choices(range(3, 250), k=200), max_new_tokens=1, seed=1).result()
"""


@pytest.mark.slow
def test_a_killed_process_leaves_whole_files(llama_package: Path, tmp_path: Path) -> None:
    model = load(llama_package, ctx_len=256)
    for delay in (0.05, 0.2, 0.5, 0.9):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED_SCRIPT, llama_package, tmp_path],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(delay)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert all(span == (0, 192) for span in parts_in(tmp_path, model))
    with Engine(model, slots=1, prefix_cache_dir=tmp_path) as engine:
        tokens = random.Random(0).choices(range(3, 250), k=200)
        assert (
            engine.add_request(tokens, max_new_tokens=1, seed=1).result(60).usage.cached_tokens
            == 192
        )
        engine.add_request(prompt(30, 200), max_new_tokens=1, seed=1).result(60)
    assert not list(tmp_path.glob(".qsample-*")), (
        "the next write removes the files of a killed write"
    )


@pytest.mark.ci
def test_chat_messages_give_the_beginning_of_all_conversations(
    exported: Callable[..., Path], tmp_path: Path
) -> None:
    model = load(exported("llama"), ctx_len=256)
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    system = {"role": "system", "content": "In the beginning God created. " * 5}
    tokens = model.save_prefix([system], tmp_path / "system", chat_template=template)
    messages = [system, {"role": "user", "content": "And the LORD spake"}]
    with Engine(model, slots=1, prefixes=[tmp_path / "system"]) as engine:
        request = engine.add_request(messages, max_new_tokens=8, seed=1, chat_template=template)
        output = request.result(60)
    assert output.usage.cached_tokens == tokens >= 64
    fresh = model.generate([messages], max_new_tokens=8, seed=1, chat_template=template)
    assert output.token_ids == fresh.token_ids[0]


class Writer:
    """The prefixes of a folder without an engine. The numbers are made up, and nothing is written while
    `held_up`."""

    def __init__(
        self, model: CausalLM, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
    ) -> None:
        self.model, self.folder = model, folder
        self.stored = StoredPrefixes(model.package, model.sessions, (), folder, **options)
        self.read: list[tuple[int, int]] = []
        self.may_write, self.begun = threading.Semaphore(100), threading.Semaphore(0)
        plain = stored_prefixes.write_prefix

        def write(*arguments: Any) -> None:
            self.begun.release()
            assert self.may_write.acquire(timeout=60)
            plain(*arguments)

        monkeypatch.setattr(stored_prefixes, "write_prefix", write)

    def states(self, start: int, stop: int) -> dict[str, np.ndarray]:
        self.read.append((start, stop))
        return {
            spec.name: np.zeros(
                spec.shape({CAPACITY: stop - start, BATCH: 1})[1:], DTYPES[spec.dtype].numpy
            )
            for spec in self.model.interface.cache_states
        }

    def keep(self, *prompts: list[int]) -> list[tuple[int, int]]:
        """The tokens of them that were read for the disk."""
        before = len(self.read)
        for tokens in prompts:
            self.stored.keep(np.array(tokens), self.states)
        return self.read[before:]

    def ends(self) -> list[int]:
        return sorted(len(one.tokens) for one in self.stored.held())


def test_the_number_of_unwritten_prefixes_is_limited(
    llama: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Writer(llama, tmp_path, monkeypatch)
    assert one.stored.keeps
    assert not StoredPrefixes(llama.package, llama.sessions).keeps
    one.may_write = threading.Semaphore(0)
    first, second, third, fourth = (prompt(seed, 32) for seed in range(4))
    assert one.keep(first) == [(0, 32)]
    assert one.begun.acquire(timeout=60)
    assert one.keep(first) == []  # it is being written
    assert one.keep(second, second, third, fourth) == [(0, 32)] * 2
    assert [
        thread.daemon for thread in threading.enumerate() if thread.name == "qsample-prefixes"
    ] == [True]
    one.may_write.release(100)
    one.stored.close()
    assert one.ends() == [32] * 3
    assert one.keep(first, first[:16], [*first, 5]) == []
    for path in files(tmp_path):
        path.unlink()
    assert one.ends() == []
    assert one.keep(first) == [(0, 32)], "it was written, and then it went"
    one.stored.close()
    assert one.keep([*first[:16], *fourth[:16]], [*first, *fourth[:16]]) == [(16, 32), (32, 48)]
    one.stored.close()
    assert one.ends() == [32, 32, 48]
    one.stored.close()


def test_unrelated_files_in_the_folder_stay(
    llama: CausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Writer(llama, tmp_path, monkeypatch)
    tokens = prompt(1, 48)
    one.keep(tokens[:32])
    one.stored.close()
    (path,) = files(tmp_path)
    others = [
        tmp_path / f"{'0' * 16}{path.name[16:]}",
        tmp_path / f"{path.name[:16]}-mine.safetensors",
    ]
    for other in others:
        other.write_bytes(b"of another package")
    one.keep(tokens)
    one.stored.close()
    assert one.ends() == [32, 48]
    assert [other.read_bytes() for other in others] == [b"of another package"] * 2
    path.unlink()
    assert one.ends() == [], "the part after it is of no use"
    assert sorted(tmp_path.iterdir()) == sorted(others)
    assert caplog.text == ""
    shutil.rmtree(tmp_path)
    assert one.ends() == []
    assert "cannot read" in caplog.text
    one.keep(tokens)
    one.stored.close()
    assert "a prefix is not kept: cannot write to" in caplog.text
    assert not tmp_path.exists(), "other users could read it"
    assert {record.name for record in caplog.records} == {"qsample.prefixes"}


def test_a_part_whose_beginning_goes_meanwhile_is_not_read(
    llama: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Writer(llama, tmp_path, monkeypatch)
    tokens = prompt(1, 48)
    for end in (32, 48):
        one.keep(tokens[:end])
        one.stored.close()
    first, second = sorted(one.stored.held(), key=lambda held: held.start)
    assert [(part.start, part.stop) for part in one.stored.read(second, 48)] == [(32, 48), (0, 32)]
    assert [(part.start, part.stop) for part in one.stored.read(first, 16)] == [(0, 16)]
    first.path.unlink()
    assert one.stored.read(second, 48) == []
    data = second.path.read_bytes()
    assert one.ends() == []
    second.path.write_bytes(data)  # another process wrote it
    assert one.stored.read(second, 48) == []


def test_a_folder_may_be_exactly_full(
    llama: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Writer(llama, tmp_path, monkeypatch)
    one.keep(prompt(1, 32))
    one.stored.close()
    size = files(tmp_path)[0].stat().st_size
    for most, kept in ((2 * size, 2), (2 * size - 1, 1), (size - 1, 0)):
        full = Writer(llama, tmp_path, monkeypatch, max_bytes=most)
        full.keep(prompt(most, 32))
        full.stored.close()
        assert len(files(tmp_path)) == kept
        one.keep(prompt(1, 32))
        one.stored.close()


def test_prefixes_that_the_engine_refuses(
    llama: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Writer(llama, tmp_path / "kept", monkeypatch)
    for end in (32, 48):
        one.keep(prompt(1, 48)[:end])
        one.stored.close()
    whole, part = (held.path for held in sorted(one.stored.held(), key=lambda held: held.start))
    (given,) = StoredPrefixes(llama.package, llama.sessions, [whole]).held()
    assert (given.tokens.tolist(), given.start, given.path) == (prompt(1, 48)[:32], 0, whole)
    data = whole.read_bytes()
    whole.write_bytes(data[:-1] + bytes([data[-1] ^ 64]))
    for path, message in ((part, "is a part of a conversation"), (whole, "its sha256")):
        with pytest.raises(PackageError, match=message):
            StoredPrefixes(llama.package, llama.sessions, [str(path)])
    for right in (os.R_OK, os.W_OK, os.X_OK):
        monkeypatch.setattr(os, "access", lambda path, mode, right=right: not mode & right)
        with pytest.raises(PackageError, match=r"cannot write to .*kept; choose another folder"):
            StoredPrefixes(llama.package, llama.sessions, (), tmp_path / "kept")
