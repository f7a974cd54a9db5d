"""A rehearsal of benchmarks/gpu.py: every part of it, before it meets a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


FORKING = """
import os
import onnxruntime as ort
from qsample.ort.small_graphs import identity

def opened():
    try:
        return ort.InferenceSession(identity(1), providers=["CUDAExecutionProvider"]).get_providers()[0]
    except Exception as error:
        return str(error)

if FIRST:
    assert opened() == "CUDAExecutionProvider"
child = os.fork()
if child == 0:
    os._exit(opened() != "CUDAExecutionProvider")
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
# Numbers come from the CPU. torch's build here has no CUPTI: each run of a session is 470 kernels and a copy.
REHEARSAL = """
import sys, time
from types import SimpleNamespace
import torch.profiler
from tests.cuda import puppet

class Profile:
    def __init__(self, activities):
        self.runs = -puppet.COUNTS["cuda runs"]
    def __enter__(self):
        return self
    def __exit__(self, *exception):
        self.runs += puppet.COUNTS["cuda runs"]
    def key_averages(self):
        for name, count in (("attention", 470), ("Memcpy DtoD", 1)):
            yield SimpleNamespace(
                key=name, count=count * self.runs, self_device_time_total=5.0, device_type="CUDA"
            )

torch.profiler.profile = Profile
puppet.install()
sys.path.insert(0, "benchmarks")
import gpu, gpu_systems

def with_a_part_that_hangs(options):
    yield [gpu.Part("hangs", lambda rows: time.sleep(900), 6.0)]
    yield from planned_parts(options)

planned_parts, gpu.planned_parts = gpu.planned_parts, with_a_part_that_hangs
gpu.SMOKE_SECONDS, gpu.NEW_TOKENS, gpu.ROUNDS = 150.0, 64, 1
gpu_systems.MORE_ROWS, gpu_systems.PROMPT_LENGTHS = (2,), (64,)
gpu.main()
"""
# A package with the calls of onnxruntime-genai that the benchmark makes; it chooses token 5.
GENAI = """
import json, pathlib
import numpy as np

class Config:
    def __init__(self, path):
        text = (pathlib.Path(path) / "genai_config.json").read_text()
        (pathlib.Path(path) / f"opened {json.loads(text)['enable_cuda_graph']}").touch()
    def overlay(self, text):
        json.loads(text)

class Model:
    def __init__(self, config):
        pass

class GeneratorParams(Model):
    def set_search_options(self, batch_size, **options):
        self.rows = batch_size

class Generator:
    def __init__(self, model, params):
        self.rows = params.rows
    def append_tokens(self, tokens):
        assert tokens.shape == (self.rows, 64)
    def generate_next_token(self):
        pass
    def get_next_tokens(self):
        return np.full(self.rows, 5)
"""
GENAI_BUILDER = """
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
config = '{"enable_cuda_graph": "0", "model": {"vocab_size": 4096}}'
(folder / "genai_config.json").write_text(config)
(folder / "model.onnx").touch()
"""


@pytest.mark.parametrize("first", [False, True])
def test_the_stubs_serve_no_process_that_was_forked_from_one_they_served(first: bool) -> None:
    """As CUDA does: it is why the benchmark's parts are forked from a process that leaves the GPU alone."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING.replace("FIRST", str(first))],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"},
    )
    assert int(done.stdout.split()[-1]) == first  # ONNX Runtime prints, too


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of all parts."""
    folder = tmp_path_factory.mktemp("gpu")
    genai = folder / "standins" / "onnxruntime_genai"
    (genai / "models").mkdir(parents=True)
    (genai / "__init__.py").write_text(GENAI)
    (genai / "models" / "builder.py").write_text(GENAI_BUILDER)
    command = [sys.executable, "-c", REHEARSAL, "--dtype", "float16"]
    command += ["--shapes", "tiny", "--work", str(folder / "work"), "--out", str(folder / "out")]
    paths = f"{genai.parent}{os.pathsep}{os.environ['PYTHONPATH']}"
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=1200)
    (only,) = (folder / "out").iterdir()
    return only


@pytest.fixture
def found(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "gpu.json").read_text())
    return content


def values(rows: list[dict[str, Any]], *columns: str) -> list[tuple[Any, ...]]:
    return [tuple(row[column] for column in columns) for row in rows]


def test_no_other_part_fails(found: dict[str, Any]) -> None:
    """The stubs lack nvidia-smi and numbers in bfloat16."""
    known = [
        ("hangs", "ended at its time limit"),
        ("the GPU", "nvidia-smi: FileNotFoundError"),
        ("bundled: bfloat16", "failed: CompileError: self-test failed"),
        ("bundled: checks of bfloat16", "failed: "),
    ]
    others = [
        (part, problem)
        for part, problem in values(found["problems"], "part", "problem")
        if not any(part == name and problem.startswith(start) for name, start in known)
    ]
    assert others == []
    assert {"hangs", "bundled: bfloat16"} <= {row["part"] for row in found["problems"]}


def test_steps(found: dict[str, Any]) -> None:
    first = {"greedy", "plain temperature", "everything"}
    filtered = {"top-k 50, top-p 0.95", "top-p 0.95", "each mix in turn"}
    reads = [f"captured, read every {number}" for number in (1, 4, 16)]
    mixes = {key: {"greedy"} for key in (*reads, *(f"{name}, one buffer" for name in reads))}
    mixes |= {"captured": first | filtered, "captured, int4": first}
    mixes |= {
        key: {"greedy", "plain temperature", "top-k 50, top-p 0.95"}
        for key in ("genai", "genai, CUDA graph")
    }
    ends = ("uncaptured", "host", "host, transformers' processors", "transformers, CPU")
    mixes |= {key: {"greedy", "everything"} for key in ends}
    wanted = {(system, rows, mix) for system in mixes for rows in (1, 32) for mix in mixes[system]}
    wanted |= {("captured", 2, mix) for mix in first}
    cells = values(found["steps"], "system", "rows", "mix")
    assert set(cells) == wanted
    assert len(cells) == len(wanted)
    assert all(row["share_of_the_floor"] > 0 for row in found["steps"] if row["ms_per_step"] > 0)


def test_claims(found: dict[str, Any]) -> None:
    sources = {row["source"] for row in found["comparisons"]}
    assert sources >= {"web-llm", "openinfer", "QEfficient", "nkipy", "onnxruntime-genai"}


def test_the_other_tables(found: dict[str, Any]) -> None:
    cells = [(kind, rows) for kind in ("float", "int4") for rows in (1, 32) for _ in range(5)]
    assert values(found["kernels"], "package", "rows") == cells
    assert all(row["kernels"] >= 470 and row["copies"] >= 1 for row in found["kernels"])
    assert values(found["prompts"], "rows", "tokens") == [(1, 64), (32, 64)]
    packages = [f"bundled: {name}" for name in ("float16", "int4", "int8-cache")] + ["tiny: float"]
    forms = [(name, form) for name in packages for form in ("sequential", "batched", "captured")]
    assert sorted(values(found["verify"], "package", "form")) == sorted(forms)
    same = [row["found"] for row in found["packages"] if row["what"].startswith(("read", "rows"))]
    assert same.count("10 of 10 rows have the same tokens") == 3 * len(packages)
    assert same.count("the same tokens") == len(packages)
    assert {row["case"].split(",")[0] for row in found["sampler"]} >= {
        *(f"{kind} logits" for kind in ("any", "whole", "equal", "no", "NaN among")),
        *(f"docs/vectors/{name}.json" for name in ("filters", "wide", "recent", "adjust")),
    }


def test_the_page_has_every_table(run: Path, found: dict[str, Any]) -> None:
    page = (run / "gpu.md").read_text()
    for name in found.keys() - {"command"}:
        assert f"## {name.capitalize()}\n" in page
    rows = [row for name in ("steps", "kernels", "prompts") for row in found[name]]
    assert page.count("\n| tiny |") == len(rows)


def test_genai_runs_without_and_with_its_cuda_graph(run: Path) -> None:
    models = run.parents[1] / "work" / "tiny"
    assert (models / "genai" / "opened 0").exists()
    assert (models / "genai-graph" / "opened 1").exists()
