"""The checks of the GPU benchmark: the machine, the captured graph's sampler, and the tokens of packages."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from ctypes import RTLD_GLOBAL
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
from gpu_report import BANDWIDTH, Rows
from gpu_systems import EVERY_MIX, MIXES, NO_CUDA_GRAPH, generate
from packaging.requirements import Requirement
from report import median

import qsample
from qsample.addons.evaluate import verify
from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import EXTRA_PARAMETERS
from qsample.ort import small_graphs
from qsample.ort.buffers import Buffer, copy_on_device
from qsample.ort.options import session_options
from qsample.ort.providers import execution_providers, open_session
from qsample.package.package import read_package
from qsample.runtime import load

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("onnxruntime-gpu", "onnxruntime-genai-cuda", "numpy")
FLOAT32: Final = 1  # onnx.TensorProto.DataType
FLOAT32_BYTES: Final = 4
COPIED_NUMBERS: Final = 2**27
DECODE_OPSET: Final = 18
STEPS, STEP_ROWS = 4, 4
# At least that of random steps and of docs/vectors.
STEP_CAPACITY: Final = 64
NEW_TOKENS, VERIFIED_POSITIONS = 24, 128

Array = np.ndarray[Any, np.dtype[Any]]
Step = Callable[[Array, Mapping[str, Array]], dict[str, Array]]


def describe() -> Iterator[tuple[str, str]]:
    """Facts by name: versions, those that the extra `export` does not allow, and ONNX Runtime's switches."""
    yield "python", f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    export = map(Requirement, project["optional-dependencies"]["export"])
    allowed = {requirement.name: requirement.specifier for requirement in export}
    for name in (*PACKAGES, *allowed):
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        fits = name not in allowed or allowed[name].contains(installed, prereleases=True)
        note = "" if fits else f"; the extra export allows {allowed[name]}, so see the smoke parts"
        yield name, f"{installed}{note}"
    for name in sorted(os.environ):
        if name.startswith(("ORT_", "CUDA_VISIBLE")):
            yield name, os.environ[name]


def look_at_the_gpu(rows: Rows) -> None:
    """Add the GPU, the provider and the bandwidth. Raises as `open_session` does."""
    with rows.section("nvidia-smi"):
        query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
        command = ["nvidia-smi", query, "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        rows.add("machine", name="gpu", value=done.stdout.strip())
    try:
        identity = small_graphs.identity(FLOAT32)
        session = open_session(identity, session_options(), execution_providers("cuda"))
        seconds = copy_seconds(COPIED_NUMBERS) - copy_seconds(1)
    except Exception:
        # The loader knows which library is missing, and ONNX Runtime does not say it.
        library = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
        with rows.section("the provider's library, see docs/devices.md"):
            ctypes.CDLL(str(library.with_name("libonnxruntime_providers_shared.so")), RTLD_GLOBAL)
            ctypes.CDLL(str(library))
        raise
    rows.add("machine", name="provider", value=session.get_providers()[0])
    rows.add("machine", name=BANDWIDTH, value=2 * FLOAT32_BYTES * COPIED_NUMBERS / seconds)


def copy_seconds(count: int) -> float:
    """The seconds of a copy of `count` float32 numbers on the GPU, the cost of a call included."""
    source, target = (Buffer.of(np.full(count, n, np.float32), "cuda") for n in (1, 0))
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        copy_on_device(source, target)
        seconds.append(time.perf_counter() - start)
    if not target.read().all():
        raise RuntimeError("a copy on the GPU does not have its numbers")
    return median(seconds)


# The order of equal logits, and the effect of a NaN on a maximum, depend on a kernel. Functions of [B, V] float32.
LOGITS: Final[dict[str, Callable[[Array], Array]]] = {
    "any": lambda logits: logits,
    "whole": np.round,
    "equal": np.ones_like,
    "no": lambda logits: np.full_like(logits, -np.inf),
    "NaN among": lambda logits: np.insert(logits[:, 1:], 7, np.float32(np.nan), axis=1),
}


def check_sampler(rows: Rows, provider: str = "cuda", vocab_size: int = 151936) -> None:
    """Compare the captured sampler with the tests' float64 reference over many kinds of logits, and docs/vectors."""
    sys.path.insert(0, str(ROOT))
    from tests import test_vectors
    from tests.helpers import vectors

    plain = Features(probs=True, logprobs=True, top_logprobs=3)
    filters = Features(probs=True, filters=tuple(EXTRA_PARAMETERS))
    for size, features in ((vocab_size, plain), (1187, filters)):
        face = Interface(size, (), features=features, captured=True)
        step = captured_step(face, provider)
        for kind, change in LOGITS.items():
            case = f"{kind} logits, V = {size}, {len(features.filters)} further filters"
            with rows.section(case):
                close = rows_too_close_to_tell(face, step, change)
                rows.add("sampler", case=case, rows=STEPS * STEP_ROWS, too_close_to_tell=close)
    for name in ("filters", "wide", "recent", "adjust"):
        for cases in test_vectors.by_graph(name):
            size, order = cases[0]["vocab_size"], cases[0]["filter_order"]
            case = f"docs/vectors/{name}.json, {order}, V = {size}"
            with rows.section(case):
                face = vectors.interface_of(size, order, captured=True)
                test_vectors.check(cases, face, captured_step(face, provider))
                rows.add("sampler", case=case, rows=len(cases))


def rows_too_close_to_tell(face: Interface, step: Step, change: Callable[[Array], Array]) -> int:
    """The number of rows of random steps that float32 cannot tell. Raises ValueError for a wrong row."""
    from tests.helpers.sampler_cases import compare_step, excused, expected_step, random_step

    close, rng = 0, np.random.default_rng(3)
    for number in range(STEPS):
        logits, inputs = random_step(rng, face, STEP_ROWS, sequence=1 + number % 2)
        logits = change(logits)
        got, expected = step(logits, inputs), expected_step(face, logits, inputs)
        for row in range(STEP_ROWS):
            names = compare_step(got, expected, row)
            if names and not excused(expected, row, names):
                raise ValueError(f"step {number}, row {row} has other {', '.join(names)}")
            close += bool(names)
    return close


def captured_step(face: Interface, provider: str) -> Step:
    """The captured graph's sampler alone: its outputs by name, of logits and the other inputs."""
    import onnx_ir as ir

    from qsample.compiler.passes.capture import cut_splits, lower_opset, remove_host_copies
    from qsample.compiler.pipeline import apply
    from qsample.sampler import build_sampler

    model = build_sampler(face, 0)
    host_copies = partial(remove_host_copies, limit=STEP_CAPACITY + 1)
    apply(model, cut_splits, host_copies, partial(lower_opset, opset=DECODE_OPSET))
    options = {"use_tf32": "0"} if provider == "cuda" else {}
    graph = ir.to_proto(model).SerializeToString()
    session = open_session(graph, session_options(), execution_providers(provider), options)
    known = [value.name for value in session.get_inputs()]
    names = [output.name for output in session.get_outputs()]

    def step(logits: Array, inputs: Mapping[str, Array]) -> dict[str, Array]:
        given = {"logits": logits, **inputs}
        outputs = session.run(names, {name: given[name] for name in known})
        return dict(zip(names, outputs, strict=True))

    return step


def check_package(rows: Rows, folder: Path, checkpoint: Path) -> None:
    """Compare a package's tokens with those under other settings, and its log-probabilities with transformers'."""
    package = f"{folder.parent.name}: {folder.name}"
    add = partial(rows.add, "packages", package=package)
    compilation = read_package(folder, verify=False).manifest.compilation
    assert compilation is not None
    for provider, nodes in compilation.placement.items():
        add(what=f"nodes on {provider}", found=sum(nodes.values()))
    model = load(folder, verify=False)
    if model.sessions.replays is None:
        rows.problem("the package is not captured")
    uncaptured = load(folder, verify=False, provider_options=NO_CUDA_GRAPH)
    run = partial(generate, rows=2 * len(MIXES), mix=EVERY_MIX, new_tokens=NEW_TOKENS)
    wanted = run(model, flush_every=1, double_buffering=False).token_ids
    for other, every in ((model, 4), (model, 16), (uncaptured, 4)):
        tokens = run(other, flush_every=every).token_ids
        equal = sum(a == b for a, b in zip(tokens, wanted, strict=True))
        what = f"read every {every}, {'captured' if other is model else 'uncaptured'}"
        add(what=what, found=f"{equal} of {len(wanted)} rows have the same tokens")
        if equal < len(wanted):
            rows.problem(f"{what}: {len(wanted) - equal} rows have other tokens")
    reference: Any = qsample.AutoModelForCausalLM.from_pretrained(checkpoint)
    found = verify(folder, reference.eager_logits(), positions=VERIFIED_POSITIONS)
    same = found.alone_sha256 == found.sha256
    add(what="rows alone", found=f"{'the same' if same else 'other'} tokens")
    for form, one in found.forms.items():
        if one is not None:
            figures = {"mean": one.mean, "p99": one.p99, "agreement": one.agreement}
            rows.add("verify", package=package, form=form, **figures)
