"""The checks of the GPU benchmark: of packages, and of the captured graph's sampler.

The order of equal logits, and the effect of a NaN on a maximum, depend on a kernel, and show in a model's tokens only
if it meets such logits, as bfloat16 weights produce. Therefore the sampler on the GPU is compared with the portable
sampler on the CPU over logits of many kinds.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from gpu_report import Reports
from gpu_systems import MIXES, Files, Variant
from systems import FLAT, prompt_ids

from qsample.compiler.passes.capture import lower_opset
from qsample.contract.interface import Interface
from qsample.contract.tensors import CANDIDATES, SEARCHED_ROWS
from qsample.ort.options import session_options
from qsample.ort.providers import execution_providers, open_session
from qsample.package.package import read_package
from qsample.runtime import CausalLM, SamplingParams, load
from qsample.runtime.decode.slots import Slots
from qsample.runtime.prepare import parameter_row
from qsample.sampler import build_sampler

PROMPT = 16
ROWS_GREEDY = 4
NEW_TOKENS = 24
READS = 3  # status, lengths and tokens
MOST_BEHIND = 0.2  # share of the logits' spread; bfloat16 rounds to a few hundredths of it
# It adds 1 to x: run in place, x counts the executions of the graph.
COUNTER = """
<ir_version: 10, opset_import: ["" : 20]>
count (float[1] x) => (float[1] y) <float[1] one = {1}> { y = Add (x, one) }
"""
VOCAB = 151936
CAPACITY, HISTORY = 64, 40
OPSET = 18  # of CUDA's decode graphs
# A row each. A few draws may differ: they fall on the boundary of two tokens, which depends on the order of additions.
ROWS: dict[str, dict[str, float]] = {
    **MIXES,
    **FLAT,
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.25},
    "top-k 1": {"top_k": 1},
    "top-k 1000": {"temperature": 2.0, "top_k": 1000},
    "min-p 0.02": {"temperature": 1.5, "min_p": 0.02},
}
EXACT = {"greedy", "greedy, penalties"}
MOST_DRAWS_APART = 0.1


def executions_of_a_capture() -> tuple[int, int]:
    """The number of executions of a graph by ONNX Runtime in the first run with a new id, and in a later run."""
    import onnx.parser
    import onnxruntime as ort

    model = onnx.parser.parse_model(COUNTER).SerializeToString()
    providers: list[Any] = [
        ("CUDAExecutionProvider", {"enable_cuda_graph": "1"}),
        "CPUExecutionProvider",
    ]
    session = ort.InferenceSession(model, providers=providers)
    value = ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32), "cuda")
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", value)
    binding.bind_ortvalue_output("y", value)
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", "1")
    counts = []
    for _ in range(2):
        session.run_with_iobinding(binding, options)
        counts.append(round(float(value.numpy()[0])))
    return counts[0], counts[1] - counts[0]


def check_package(files: Files, variant: Variant, reports: Reports, *, trace: bool = False) -> None:
    """Compare a compiled package's tokens with the portable package, with other settings, and with transformers.

    Args:
        files: The models of a shape.
        variant: The package.
        reports: The receiver of the findings.
        trace: Also count the GPU's copies, which needs torch with CUDA.
    """
    folder = files.compiled(variant)
    title = f"{files.shape}, {folder.name}"
    say = partial(reports.check, files.shape)
    compilation = read_package(folder, verify=False).manifest.compilation
    assert compilation is not None
    nodes = ", ".join(
        f"{sum(count.values())} on {name}" for name, count in compilation.placement.items()
    )
    test = compilation.self_test
    say(f"{title}: nodes: {nodes}")
    say(
        f"{title}: {test['agreeing']} of {test['tokens']} tokens equal the portable graph's, given its text"
    )
    model = load(folder, verify=False)
    captured = model.sessions.replays is not None
    if not captured and variant.provider == "cuda":
        reports.problem(f"{title}: the package is not captured")
    rows = [
        SamplingParams(**MIXES[mix], max_new_tokens=NEW_TOKENS, eos_token_id=()) for mix in MIXES
    ]
    prompts = [row.tolist() for row in prompt_ids(len(rows), PROMPT, model.interface.vocab_size)]

    def tokens(model: CausalLM, **chosen: Any) -> list[list[int]]:
        return model.generate(prompts, rows, seed=1, **chosen).token_ids

    wanted = tokens(model, flush_every=1, double_buffering=False)

    def compare(setting: str, got: list[list[int]]) -> None:
        if got == wanted:
            say(f"{title}: {setting}: the same tokens")
        else:
            equal = [leading(a, b) for a, b in zip(got, wanted, strict=True)]
            reports.problem(
                f"{title}: {setting}: OTHER TOKENS, of {NEW_TOKENS} only the first {equal} are the same"
            )

    for flush_every in (1, 4, 16):
        with reports.section(f"{title}: check of flush_every={flush_every}"):
            compare(f"read every {flush_every}", tokens(model, flush_every=flush_every))
    if captured:
        with reports.section(f"{title}: check without capture"):
            options = {"enable_cuda_graph": "0"}
            compare("without capture", tokens(load(folder, provider_options=options, verify=False)))
    with reports.section(f"{title}: check of rows alone"):
        alone = [
            model.generate([prompt], row, seed=1 + i).token_ids[0]
            for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
        ]
        equal = sum(a == b for a, b in zip(alone, wanted, strict=True))
        say(f"{title}: {equal} of {len(rows)} rows have the same tokens as alone")
    if trace:
        with reports.section(f"{title}: trace of the copies"):
            say(f"{title}: {copies_to_host(model)}")
    with reports.section(f"{title}: check against the portable package"):
        first = tokens(load(files.portable(), "cpu", ctx_len=PROMPT + NEW_TOKENS, verify=False))
        shared = [leading(a, b) for a, b in zip(wanted, first, strict=True)]
        listed = ", ".join(f"{mix}: {count}" for mix, count in zip(MIXES, shared, strict=True))
        say(
            f"{title}: leading tokens, of {NEW_TOKENS}, equal to the portable package's on the CPU in float32: "
            f"{listed} (rounding soon changes a draw from many tokens)"
        )
    if variant.weights is None and variant.kv_cache_dtype is None:
        with reports.section(f"{title}: check against transformers"):
            say(f"{title}: {against_transformers(model, files.checkpoint(), variant.dtype)}")


def copies_to_host(model: CausalLM, flush_every: int = 4, windows: int = 4) -> str:
    """The copies from the device while decoding, in CUPTI's trace of windows of steps with a read after each."""
    from torch.profiler import ProfilerActivity, profile

    capacity = model.capacity(PROMPT + flush_every * (windows + 1) + 1)
    rows = [SamplingParams(**mix, eos_token_id=()) for mix in MIXES.values()]
    slots = Slots(model.sessions, len(rows), capacity)
    for row, prompt in enumerate(prompt_ids(len(rows), PROMPT, model.interface.vocab_size)):
        slots.begin(row, prompt, row, parameter_row(model.interface, rows[row], PROMPT, capacity))
        slots.prefill(row, prompt, emit=True)
    if not slots.prepared:
        slots.prepare()

    def window() -> None:
        for step in range(flush_every):
            slots.decode(wait=step == flush_every - 1)
        slots.read()

    window()  # captures, if necessary
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(windows):
            window()
    copies = Counter(event.name for event in trace.events() if event.name.startswith("Memcpy"))
    to_host = sum(count for name, count in copies.items() if name.startswith("Memcpy DtoH"))
    return (
        f"{to_host} copies to the host in {windows * flush_every} steps, whose results were read with "
        f"{READS * windows} copies; all copies in the trace: {dict(copies)}"
    )


def leading(got: list[int], wanted: list[int]) -> int:
    """The number of equal tokens before the first difference."""
    differs = [a != b for a, b in zip(got, wanted, strict=True)]
    return differs.index(True) if True in differs else len(got)


def against_transformers(model: CausalLM, checkpoint: Path, dtype: str | None) -> str:
    """Compare greedy tokens with transformers' argmax after the same text.

    transformers computes in `dtype` on the GPU if torch has one, otherwise in float32 on the CPU.

    Raises:
        ValueError: The difference exceeds rounding.
    """
    import torch
    from transformers import AutoModelForCausalLM

    device, dtype = ("cuda", dtype) if dtype and torch.cuda.is_available() else ("cpu", "float32")
    prompts = prompt_ids(ROWS_GREEDY, PROMPT, model.interface.vocab_size)
    greedy = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, eos_token_id=())
    new = np.array(model.generate(list(prompts), greedy).token_ids)
    original: Any = (
        AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
        .to(device)
        .eval()
    )
    text = torch.from_numpy(np.concatenate([prompts, new], axis=1)).to(device)
    with torch.inference_mode():
        logits = (
            original(input_ids=text, use_cache=False)
            .logits[:, PROMPT - 1 : -1]
            .float()
            .cpu()
            .numpy()
        )
    chosen = np.take_along_axis(logits, new[..., None], axis=-1)[..., 0]
    behind = logits.max(-1) - chosen
    line = f"{int((behind == 0).sum())} of {new.size} greedy tokens are transformers' argmax in {dtype} on {device}"
    spread = float(logits.std(-1).mean())
    if behind.any():
        line += (
            f"; the others are at most {behind.max():.3f} below it (logits spread by {spread:.2f})"
        )
    if behind.max() > MOST_BEHIND * spread:
        raise ValueError(f"{line}: that is not rounding")
    return line


def check_sampler(provider: str, reports: Reports, vocab: int = VOCAB) -> None:
    """Report for each kind of logits the number of rows with the same token and status as on the CPU."""
    interface = Interface(vocab, ())
    captured = build_sampler(replace(interface, captured=True), 0)
    lower_opset(captured, OPSET)
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "captured.onnx", Path(folder) / "portable.onnx"
        ir.save(captured, paths[0])
        ir.save(build_sampler(interface, 0), paths[1])
        device, portable = _session(paths[0], provider), _session(paths[1], "cpu")
    rng = np.random.default_rng(0)
    inputs = _inputs(interface, rng)
    filters = [SamplingParams(**row) for row in ROWS.values()]
    listed = [
        i for i, row in enumerate(filters) if row.temperature > 0 and _goes_beyond(row)
    ]  # docs/contract.md
    searched = {SEARCHED_ROWS.name: np.array(listed)}
    for kind, logits in made_logits(rng, vocab).items():
        with reports.section(f"the sampler, {kind} logits"):
            got = _choose(device, {"logits": logits, **inputs, **searched})
            wanted = _choose(portable, {"logits": logits, **inputs})
            apart = {
                name: f"{name}: {have.tolist()} for {want.tolist()}"
                for name, have, want in zip(ROWS, got, wanted, strict=True)
                if not np.array_equal(have, want)
            }
            line = f"{kind} logits: {len(ROWS) - len(apart)} of {len(ROWS)} rows have the CPU's token and status"
            if EXACT.intersection(apart) or len(apart) > MOST_DRAWS_APART * len(ROWS):
                reports.problem(f"the sampler, {line}; {', '.join(apart.values())}")
            else:
                reports.check("sampler", line)


def _goes_beyond(row: SamplingParams) -> bool:
    return row.top_k > CANDIDATES or (row.top_k == 0 and row.top_p < 1)


def _choose(session: Any, inputs: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """[B, 2]: tokens and statuses."""
    tokens, status = session.run(["next_ids", "status_RetainedState"], inputs)
    return np.stack([tokens[:, 0], status], axis=1)


def made_logits(
    rng: np.random.Generator, vocab: int
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Kind → [B, V] float32; the values repeat more and more, and the last kinds are not finite."""
    shape = len(ROWS), vocab
    distinct = rng.normal(scale=3, size=shape).astype(np.float32)
    kinds = {
        "distinct": distinct,
        "bfloat16": (distinct.view(np.uint32) & 0xFFFF0000).view(np.float32),
        "whole": np.round(distinct),
        "equal": np.ones(shape, np.float32),
        "masked": np.where(rng.random(shape) < 0.999, -np.inf, np.round(distinct)).astype(
            np.float32
        ),
        "one of": np.where(np.arange(vocab) == vocab - 1, distinct, np.float32(-np.inf)),
    }
    for kind, value in (("NaN among", np.nan), ("infinite", np.inf)):
        kinds[kind] = distinct.copy()
        kinds[kind][:, vocab // 3] = value
    kinds["no"] = np.full(shape, -np.inf, np.float32)
    return kinds


def _inputs(interface: Interface, rng: np.random.Generator) -> dict[str, Any]:
    """The inputs of a decode step after HISTORY tokens."""
    sizes = interface.sizes | {"B": len(ROWS), "S": 1, "T": CAPACITY, "E": 2}
    values: dict[str, Any] = {
        "emit": True,
        "input_lengths": 1,
        "lengths": HISTORY,
        "max_length": CAPACITY,
        "input_ids": rng.integers(0, interface.vocab_size, (len(ROWS), 1)),
        "noise": rng.integers(0, 2**24, (len(ROWS), CAPACITY)) / 2**24,
        "tokens": rng.integers(0, interface.vocab_size, (len(ROWS), CAPACITY)),
    }
    inputs = {}
    for spec in (*interface.sampler.inputs[1:], *interface.sampler.states):
        value = values.get(spec.name, spec.off if spec.off is not None else 0)
        inputs[spec.name] = np.array(np.broadcast_to(np.asarray(value), spec.shape(sizes))).astype(
            spec.dtype
        )
    for index, row in enumerate(ROWS.values()):
        for name, value in row.items():
            inputs[name][index] = value
    return inputs


def _session(path: Path, provider: str) -> Any:
    options = {"use_tf32": "0"} if provider == "cuda" else {}
    return open_session(path, session_options(), execution_providers(provider), options)
