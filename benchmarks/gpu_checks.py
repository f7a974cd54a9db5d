"""Checks packages of one model, and says in words what they do right or wrong."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import prompt_ids
from gpu_files import Files, Variant
from gpu_process import Reports
from gpu_systems import MIXES

from qsample.package import read_package
from qsample.runtime import CausalLM, SamplingParams, load
from qsample.runtime.decode.slots import Slots
from qsample.runtime.parameters import parameter_row

PROMPT = 16
ROWS_GREEDY = 4
NEW_TOKENS = 24
READS = 3  # status, lengths and tokens
FAR_BEHIND = 0.2  # of the logits' spread; bfloat16 rounds to a few hundredths of it
# One is added to x: run in place, x says how often the graph was executed.
COUNTER = """
<ir_version: 10, opset_import: ["" : 20]>
count (float[1] x) => (float[1] y) <float[1] one = {1}> { y = Add (x, one) }
"""


def executions_of_a_capture() -> tuple[int, int]:
    """How often ONNX Runtime executes a graph in the first run under a new number, and in a later one."""
    import onnx.parser
    import onnxruntime as ort

    model = onnx.parser.parse_model(COUNTER).SerializeToString()
    providers: list[Any] = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"}), "CPUExecutionProvider"]
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
    """Compare the compiled package's tokens with those of the portable one, of itself in other settings, and of
    transformers. trace: look at the GPU's copies, too, which takes torch with CUDA."""
    folder = files.compiled(variant)
    title = f"{files.shape}, {folder.name}"
    say = partial(reports.check, files.shape)
    compilation = read_package(folder, verify=False).manifest.compilation
    assert compilation is not None
    nodes = ", ".join(f"{sum(count.values())} on {name}" for name, count in compilation.placement.items())
    test = compilation.self_test
    say(f"{title}: nodes: {nodes}")
    say(f"{title}: {test['agreeing']} of {test['tokens']} tokens are the portable graph's, given its text")
    model = load(folder, verify=False)
    captured = model.sessions.replays is not None
    if not captured and variant.provider == "cuda":
        reports.problem(f"{title}: the package is not captured")
    rows = [SamplingParams(**MIXES[mix], max_new_tokens=NEW_TOKENS, eos_token_id=()) for mix in MIXES]
    prompts = [row.tolist() for row in prompt_ids(len(rows), PROMPT, model.interface.vocab_size)]

    def tokens(model: CausalLM, **chosen: Any) -> list[list[int]]:
        return model.generate(prompts, rows, seed=1, **chosen).token_ids

    wanted = tokens(model, flush_every=1, double_buffering=False)

    def compare(what: str, got: list[list[int]]) -> None:
        if got == wanted:
            say(f"{title}: {what}: the same tokens")
        else:
            equal = [leading(a, b) for a, b in zip(got, wanted, strict=True)]
            reports.problem(f"{title}: {what}: OTHER TOKENS, of {NEW_TOKENS} only the first {equal} are the same")

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
        say(f"{title}: {equal} of {len(rows)} rows have the tokens that they have alone")
    if trace:
        with reports.section(f"{title}: trace of the copies"):
            say(f"{title}: {copies_to_host(model)}")
    with reports.section(f"{title}: check against the portable package"):
        first = tokens(load(files.portable(), "cpu", ctx_len=PROMPT + NEW_TOKENS, verify=False))
        shared = [leading(a, b) for a, b in zip(wanted, first, strict=True)]
        listed = ", ".join(f"{mix}: {count}" for mix, count in zip(MIXES, shared, strict=True))
        say(
            f"{title}: leading tokens, of {NEW_TOKENS}, that the portable package has on the CPU in float32: {listed} "
            "(rounding soon moves a draw from many tokens)"
        )
    if variant.weights is None and variant.kv_cache_dtype is None:
        with reports.section(f"{title}: check against transformers"):
            say(f"{title}: {against_transformers(model, files.checkpoint(), variant.dtype)}")


def copies_to_host(model: CausalLM, flush_every: int = 4, windows: int = 4) -> str:
    """What decoding copies off the device, in CUPTI's trace of some windows of steps with a read behind each."""
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

    window()  # captures, where that is still to be done
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
    """How many tokens are equal before the first that differs."""
    differs = [a != b for a, b in zip(got, wanted, strict=True)]
    return differs.index(True) if True in differs else len(got)


def against_transformers(model: CausalLM, checkpoint: Path, dtype: str | None) -> str:
    """Whether greedy tokens are transformers' argmax, given the same text before them: in `dtype` on the GPU, where
    torch has one, and otherwise in float32 on the CPU.

    Raises ValueError where they are others by more than rounding.
    """
    import torch
    from transformers import AutoModelForCausalLM

    device, dtype = ("cuda", dtype) if dtype and torch.cuda.is_available() else ("cpu", "float32")
    prompts = prompt_ids(ROWS_GREEDY, PROMPT, model.interface.vocab_size)
    greedy = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, eos_token_id=())
    new = np.array(model.generate(list(prompts), greedy).token_ids)
    original: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to(device).eval()
    text = torch.from_numpy(np.concatenate([prompts, new], axis=1)).to(device)
    with torch.inference_mode():
        logits = original(input_ids=text, use_cache=False).logits[:, PROMPT - 1 : -1].float().cpu().numpy()
    chosen = np.take_along_axis(logits, new[..., None], axis=-1)[..., 0]
    behind = logits.max(-1) - chosen
    line = f"{int((behind == 0).sum())} of {new.size} greedy tokens are transformers' argmax in {dtype} on {device}"
    spread = float(logits.std(-1).mean())
    if behind.any():
        line += f"; the others are at most {behind.max():.3f} behind it (logits spread by {spread:.2f})"
    if behind.max() > FAR_BEHIND * spread:
        raise ValueError(f"{line}: that is not rounding")
    return line
