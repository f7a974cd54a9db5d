"""Models and engines beyond one process: forks, pickles, and the end of the interpreter."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qsample.errors import PackageError
from qsample.package.package import Package
from qsample.runtime import CausalLM, Engine, load
from tests.helpers.fake_package import fake_package
from tests.helpers.requests import FREE, expected

# ONNX Runtime's telemetry has threads that a forked child waits for at its exit, for ever, once it is imported.
ENVIRONMENT = {**os.environ, "ORT_DISABLE_TELEMETRY": "1"}
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def run(program: str, *arguments: object) -> str:
    """The standard output of a program that ends well within a minute."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=ENVIRONMENT,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


FORK = """
import multiprocessing, os, sys
from qsample.runtime import Engine, EngineClosedError, load

def refused(call):
    try:
        call()
    except EngineClosedError as error:
        print(str(error).split(" ")[:3], "a fork of it" in str(error), flush=True)

def child():
    refused(lambda: engine.add_request([5]))
    refused(lambda: list(running))
    refused(running.result)
    refused(lambda: engine.drain(60))
    running.cancel()
    print(ended.result().finish_reason, sum(len(delta.token_ids) for delta in ended), flush=True)
    engine.close()
    with engine:
        pass
    mine = Engine(model, slots=1)
    print(mine.add_request([5], seed=3, max_new_tokens=20, temperature=0.9, eos_token_id=()).result(60).token_ids)
    sys.stdout.flush()

if __name__ == "__main__":
    model = load(sys.argv[1])
    engine = Engine(model, slots=1)
    ended = engine.add_request([6], max_new_tokens=4, eos_token_id=())
    ended.result()
    first, running = (engine.add_request([5], max_new_tokens=240, eos_token_id=()) for _ in range(2))
    if sys.argv[2] == "fork":
        process = os.fork()
        if process == 0:
            child()
            sys.exit(7)  # through atexit, where the engine was not closed in the parent's sense
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    else:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=child)
        with engine._changed:  # as if another thread held the lock
            process.start()
        process.join(60)
        print(process.exitcode)
    print(running.result(60).finish_reason)
    engine.close()
"""


@forks
@pytest.mark.parametrize("how", ["fork", "multiprocessing"])
def test_an_engine_in_a_fork_of_its_process(how: str, fake: Callable[..., Package]) -> None:
    """The child is refused at once, ends, and may have an engine of its own; the parent's goes on."""
    refused = "['the', 'engine', 'runs'] True\n"
    mine = f"{expected([5], FREE, 3)[0]}\n"
    status = {"fork": "7\n", "multiprocessing": "0\n"}[how]
    assert run(FORK, fake().path, how) == refused * 4 + "length 4\n" + mine + status + "length\n"


SPAWN = """
import multiprocessing, sys
from qsample.runtime import load

def ask(model, prompt):
    return model.generate(prompt, max_new_tokens=6, seed=1).token_ids[0], model.sessions.decoder is not None

if __name__ == "__main__":
    model = load(sys.argv[1], ctx_len=32, intra_op_num_threads=1)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(ask, (model, [5, 6])) == ask(model, [5, 6])
    print("equal")
"""


def test_a_model_goes_to_another_process(fake: Callable[..., Package], tmp_path: Path) -> None:
    program = tmp_path / "spawn.py"
    program.write_text(SPAWN)
    done = subprocess.run(
        [sys.executable, str(program), str(fake().path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "equal\n", "")


def test_a_pickled_model_has_what_it_was_loaded_with(fake: Callable[..., Package]) -> None:
    arguments: dict[str, Any] = {"ctx_len": 32, "intra_op_num_threads": 1, "batch_invariant": False}
    arguments["image_cache_bytes"] = 1 << 20
    arguments["session_config"] = {"session.intra_op.allow_spinning": "0"}
    model = load(fake().path, "cpu", **arguments)
    model.generation_config.max_new_tokens = 3
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert isinstance(again, CausalLM)
        assert again.sessions is not model.sessions
        assert again._loaded_with == model._loaded_with
        assert again._loaded_with == {
            "provider": "cpu",
            "provider_options": None,
            "verify": True,
            "trusted_keys": None,
            **arguments,
        }
        assert again.capacity(5) == 32
        assert again.sessions.decoder.get_session_options().intra_op_num_threads == 1
        assert again.generate([5], seed=2).token_ids == model.generate([5], seed=2).token_ids
        assert len(again.generate([5], seed=2).token_ids[0]) <= 3


def test_a_relative_path_is_found_from_elsewhere(
    fake: Callable[..., Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fake().path.parent)
    pickled = pickle.dumps(load(fake().path.name))
    monkeypatch.chdir(tmp_path)
    assert pickle.loads(pickled).package.path == fake().path


def test_a_package_that_moved_or_changed_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "package"
    fake_package(path)
    pickled = pickle.dumps(load(path))
    moved = path.rename(tmp_path / "moved")
    with pytest.raises(
        PackageError, match=rf"opened again from its package, {path}, which cannot be read here"
    ):
        pickle.loads(pickled)
    fake_package(path, generation_config={"do_sample": False})
    with pytest.raises(
        PackageError, match=f"{path} is another package than when this model was pickled"
    ):
        pickle.loads(pickled)
    shutil.rmtree(path)
    moved.rename(path)
    assert len(pickle.loads(pickled).generate([5], max_new_tokens=2).token_ids[0]) <= 2
    # The same manifest over other bytes of the same size.
    config = path / "generation_config.json"
    config.write_text(json.dumps({"do_sample": True, "top_k": 9}))
    with pytest.raises(PackageError, match=r"generation_config\.json"):
        pickle.loads(pickled)


def test_what_cannot_be_pickled_says_so(model: CausalLM) -> None:
    with pytest.raises(TypeError, match=r"was not opened by qsample\.runtime\.load"):
        pickle.dumps(CausalLM(model.package, model.sessions))
    with Engine(model, slots=1) as engine, pytest.raises(TypeError, match="pickle its model"):
        pickle.dumps(engine)


EXIT = """
import sys, threading
from qsample.runtime import Engine, load

model = load(sys.argv[1])
engine = Engine(model, slots=1, double_buffering=sys.argv[2] == "True")
requests = [engine.add_request([5], seed=3, max_new_tokens=20, temperature=0.9, eos_token_id=()) for _ in range(3)]

def read():
    for request in requests:
        print(request.result().token_ids)

threading.Thread(target=read).start()  # no daemon: the interpreter waits for it
engine.add_request([5], max_new_tokens=200, eos_token_id=())  # open, and with a request that runs
"""


@pytest.mark.parametrize("double_buffering", [True, False])
def test_a_thread_that_reads_while_the_interpreter_ends(
    double_buffering: bool, fake: Callable[..., Package]
) -> None:
    assert run(EXIT, fake().path, double_buffering) == f"{expected([5], FREE, 3)[0]}\n" * 3
