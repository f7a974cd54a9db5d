"""Decoder files that other exporters made (tests/fixtures/foreign), and what is done to them in tests."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from qsample.addons.bake import bake
from qsample.addons.bake.conventions import ForeignGraph
from qsample.addons.bake.files import locate, read_settings
from qsample.addons.bake.original import Original
from qsample.addons.bake.recognise import load, recognise
from qsample.contract.interface import Features, Interface
from qsample.exporters import parity
from qsample.exporters.portable import build_initial_state
from qsample.graph.runner import GraphRunner
from qsample.graph.weights import load_graph
from qsample.progress import Stages

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "foreign"
LAYOUTS = ("model", "model_fp16", "model_q4", "model_q4f16", "model_bnb4", "model_fp16_io32")
# As they are told apart in tests: the folder, and the file in it where there are several.
GROUPED = (
    *(
        "genai_cpu_fp32",
        "genai_cpu_int4",
        "genai_cpu_int4_tied",
        "genai_cpu_int4_pruned",
        "genai_cpu_fp32_pruned",
    ),
    *(
        "genai_cpu_mistral",
        "genai_cpu_gemma2",
        "genai_cpu_longrope",
        "genai_dml_fp16",
        "genai_dml_int4",
    ),
    *("genai_cuda_fp16", "genai_webgpu_int4"),
    *(f"community_gqa/onnx/{name}.onnx" for name in LAYOUTS),
)
PLAIN = (
    *(
        "optimum_llama",
        "optimum_llama_18",
        "optimum_qwen2",
        "optimum_qwen3",
        "optimum_mistral",
        "optimum_granite",
    ),
    *("optimum_gpt2", "optimum_gemma2", "optimum_gemma2_eager", "optimum_gemma3", "optimum_phi3"),
    *(f"community_concat/onnx/{name}.onnx" for name in LAYOUTS),
)
TRANSFORMERS = (
    *(
        "transformers_llama",
        "transformers_cpu_gemma3",
        "transformers_cpu_gpt_oss",
        "transformers_cuda_qwen3",
    ),
    "transformers_webgpu_phi3",
)
# Of both, tokens.json has the tokens of transformers.
MOBIUS = (
    "mobius_cpu_llama",
    "mobius_gemma3",
    "mobius_static_qwen3",
    "mobius_gpt_oss",
    "mobius_qwen3_next",
)


def unpack(name: str, folder: Path) -> Path:
    """The folder `name` of the fixtures, in `folder`."""
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def read(folder: Path, file: str | None = None) -> ForeignGraph:
    location = locate(folder, file)
    settings = read_settings(location)
    return recognise(
        location.file,
        load(location.file),
        head_dim=settings.head_dim,
        vocab_size=settings.vocab_size,
    )


def rewritten(folder: Path, file: str | None = None, *, rope: str | None = None) -> bake.Baked:
    location = locate(folder, file)
    settings = read_settings(location)
    return bake.rewrite(
        read(folder, file),
        Features(sampler=False),
        settings,
        rope,
        Stages(None, bake._STAGE_SHARES),
    )


def save(baked: bake.Baked, folder: Path) -> Path:
    """The folder, with decoder.onnx, which returns logits, and initial_state.onnx."""
    folder.mkdir(exist_ok=True)
    ir.save(baked.model, folder / "decoder.onnx", external_data="decoder.onnx.data")
    ir.save(build_initial_state(baked.interface), folder / "initial_state.onnx")
    return folder


def gate(baked: bake.Baked, folder: Path) -> parity.Parity:
    """What the parity gate of a bake says."""
    tolerance = bake._TOLERANCES[bake.arithmetic_of(baked.model)]
    return parity.check(
        save(baked, folder),
        baked.interface,
        baked.expected,
        tolerance=tolerance,
        original="the file",
    )


def greedy_of_file(
    foreign: ForeignGraph, prompt: Sequence[int], tokens: int, *, in_memory: bool = False
) -> list[int]:
    """What the file itself generates, with one row, no padding and a cache that grows."""
    original = Original(foreign, rewritten=in_memory)
    logits, past = original.step(prompt, original.start(), 0)
    made = [int(logits.argmax())]
    while len(made) < tokens:
        logits, past = original.step(made[-1:], past, len(prompt) + len(made) - 1)
        made.append(int(logits.argmax()))
    return made


def greedy_of_graph(
    folder: Path,
    interface: Interface,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    capacity: int,
    left: float = 0.0,
) -> list[list[int]]:
    """What the rewritten graph generates for the prompts as one ragged batch, by the argmax of its logits. left: the
    number that earlier rows left in all caches and states."""
    runner = GraphRunner(load_graph(folder / "decoder.onnx"), folder, interface, capacity)
    lengths = np.array([len(prompt) for prompt in prompts])
    ids = np.array([[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts])
    state = runner.start(len(prompts))
    for spec in interface.cache_states:
        state[spec.name] = np.full_like(state[spec.name], left)
    made = [runner.step(ids, lengths, state)["logits"].argmax(-1)]
    while len(made) < tokens:
        made.append(
            runner.step(made[-1][:, None], np.ones(len(prompts)), state)["logits"].argmax(-1)
        )
    return np.stack(made, axis=1).tolist()


def recorded_tokens(folder: Path) -> dict[str, Any]:
    """Prompts, and what onnxruntime-genai (stopped at the end of a text) or transformers generated when the fixture was
    made."""
    made: dict[str, Any] = json.loads((folder / "tokens.json").read_text())
    return made


def edited(
    folder: Path, out: Path, edit: Callable[[ir.Model], None], file: str = "model.onnx"
) -> Path:
    """A copy of the decoder in `folder` that `edit` changed, in `out` with its configurations."""
    out.mkdir()
    for path in folder.glob("*.json"):
        (out / path.name).write_bytes(path.read_bytes())
    model = ir.load(folder / file)
    edit(model)
    ir.save(model, out / file, external_data=f"{file}.data")
    return out
