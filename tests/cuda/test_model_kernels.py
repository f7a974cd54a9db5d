"""What a captured step of one token launches in the model, without the sampler: in its layers, and around them.

A kernel more in a layer is a launch more for each layer and token, so the numbers are exact. ONNX Runtime's CUDA
provider decides them as well: a newer one may need fewer.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnxruntime as ort
import pytest

from qsample import AutoModelForCausalLM
from tests.cuda import puppet
from tests.cuda.trace import Trace
from tests.helpers.tiny_models import export_without_sampler, random_model

CONTEXT: Final = 64
SIZES: Final = {"B": 4, "S": 1, "T": CONTEXT}
DTYPES: Final = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
}
LIBRARY_CALL: Final = re.compile(r"cublas\w*(Gemm|Matmul|geam)|cudnn\w*(Execute|Reduce)")


class Launches(NamedTuple):
    """What a captured step launches.

    Attributes:
        kernels: the number of ONNX Runtime's kernels.
        library_calls: the number of products and of whatever else CUDA's libraries compute.
        copies: the number of copies and memsets.
    """

    kernels: int
    library_calls: int
    copies: int


class Family(NamedTuple):
    """A model type, and what its steps launch.

    Attributes:
        layer_types: the layers that come in turns.
        config: sizes of the tiny model. Heads of 64 and more have kernels of their own.
        turn: the launches of these layers.
        rest: the launches around all layers.
    """

    layer_types: tuple[str, ...]
    config: dict[str, int]
    turn: Launches
    rest: Launches


PLAIN: Final = ("full_attention",)
WINDOWS: Final = ("sliding_attention", "full_attention")
HYBRID: Final = ("linear_attention", "full_attention")
LINEAR_HEADS: Final = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
REST: Final = Launches(7, 1, 1)
REST_OF_HYBRID: Final = Launches(18, 1, 1)
FAMILIES: Final = {
    # Two norms with their skips, three kernels and a memset of the attention, and three kernels of the gate.
    "llama": Family(PLAIN, {"head_dim": 64}, Launches(8, 4, 1), REST),
    "qwen3": Family(PLAIN, {"head_dim": 128}, Launches(8, 4, 1), REST),
    # A layer has two norms more, and the embeddings a scale.
    "gemma3_text": Family(WINDOWS, {"head_dim": 64}, Launches(20, 8, 2), Launches(8, 1, 1)),
    # Eleven kernels and a memset of the experts and their router, in place of the gate.
    "mixtral": Family(PLAIN, {"head_dim": 64}, Launches(16, 4, 2), REST),
    # Two kernels for biases more.
    "gpt_oss": Family(WINDOWS, {"head_dim": 64}, Launches(36, 8, 4), REST),
    # Two copies are of transposed tokens.
    "olmo_hybrid": Family(HYBRID, {"hidden_size": 256}, Launches(37, 8, 3), REST_OF_HYBRID),
    "qwen3_5_text": Family(
        HYBRID, {"head_dim": 64, **LINEAR_HEADS}, Launches(35, 8, 3), REST_OF_HYBRID
    ),
}
SHORT: Final = ("llama", "mixtral", "olmo_hybrid")


@pytest.mark.usefixtures("without_numbers")
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in FAMILIES],
)
def test_launches_of_a_step(model_type: str, tmp_path: Path, trace: Trace) -> None:
    family = FAMILIES[model_type]
    once, twice = (
        captured_step(compiled(model_type, turns, tmp_path / str(turns)), trace) for turns in (1, 2)
    )
    turn = Launches(*np.subtract(twice, once).tolist())
    rest = Launches(*np.subtract(once, turn).tolist())
    assert (turn, rest) == (family.turn, family.rest)


def compiled(model_type: str, turns: int, folder: Path) -> Path:
    """The decode graph in float16 of a model whose layers come in so many turns, without the sampler."""
    family = FAMILIES[model_type]
    layer_types = [*family.layer_types] * turns
    config: dict[str, Any] = {"num_hidden_layers": len(layer_types), **family.config}
    if family.layer_types != PLAIN:
        config["layer_types"] = layer_types
    package = export_without_sampler(random_model(model_type, **config), folder / "portable")
    model = AutoModelForCausalLM.from_pretrained(package.path, include_sampler=False)
    model.compile(folder / "cuda", provider="cuda", dtype="float16", ctx_len=CONTEXT)
    return folder / "cuda" / "decoder.onnx"


def captured_step(decoder: Path, trace: Trace) -> Launches:
    """Capture a step of four rows, whose states are updated in place."""
    cuda = (puppet.CUDA, {"enable_cuda_graph": "1", "use_tf32": "0"})
    session = puppet.Original(str(decoder), providers=[cuda, puppet.CPU])
    binding = session.io_binding()
    states = {argument.name: zeros(argument) for argument in session.get_inputs()}
    for name, value in states.items():
        binding.bind_ortvalue_input(name, value)
    for argument in session.get_outputs():
        state = argument.name.replace("present.", "past_key_values.")
        value = states[state] if state in states else zeros(argument)
        binding.bind_ortvalue_output(argument.name, value)
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", "1")
    trace.clear()
    session.run_with_iobinding(binding, options)
    assert trace.captures() == 1
    return launches_of(trace.calls())


def zeros(argument: Any) -> ort.OrtValue:
    """Memory of the device for an input or an output of a session."""
    shape = [size if isinstance(size, int) else SIZES[size] for size in argument.shape]
    return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, DTYPES[argument.type]), "cuda")


def launches_of(calls: list[str]) -> Launches:
    """The launches between the beginning and the end of the capture."""
    edges = [index for index, call in enumerate(calls) if "-CAPTURE " in call]
    captured = calls[edges[0] : edges[1]]
    kernels = sum(call.startswith("kernel") for call in captured)
    library_calls = sum(LIBRARY_CALL.match(call) is not None for call in captured)
    copies = sum(call.startswith(("copy", "memset")) for call in captured)
    return Launches(kernels, library_calls, copies)
