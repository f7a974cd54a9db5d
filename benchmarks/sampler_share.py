"""What the sampler costs in a decode step of a 0.6B-parameter int4 model: both graphs timed in alternation, in one run.

    python benchmarks/sampler_share.py --keep FOLDER [--threads 2] [--steps 100]

Builds a Qwen3-0.6B-shaped model of random weights, exports it with logits out, quantizes every MatMul to 4 bits (block
32) with ONNX Runtime's own quantizer, and runs it in turn with the sampler graph on its logits. FOLDER keeps the two
graphs for another run: building them takes some minutes and about 7 GB. Prints medians and the sampler's share.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.table import Table

from qsample.contract import BATCH, BIASES, CAPACITY, SEQUENCE, STOPS, Features, GraphSpec, Interface, KeyValueShape

CONTEXT, HISTORY = 2048, 1024  # tokens that a row holds, and that it has when it is timed
LAYERS, VOCAB = 28, 151936
INTERFACE = Interface(VOCAB, (KeyValueShape(8, 128),) * LAYERS, features=Features(sampler=False))
MIXES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "top-k 50, top-p 0.95": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "everything on": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
    },
}


def build(folder: Path) -> None:
    """Write `decoder.onnx` (int4, logits out) and `sampler.onnx` for the Qwen3-0.6B shape into `folder`."""
    import logging

    import onnx
    import onnx_ir as ir
    import torch
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
    from transformers import AutoConfig, AutoModelForCausalLM

    from qsample.exporters.export import export_model
    from qsample.exporters.fusion import fuse
    from qsample.exporters.shapes import fix_axes

    logging.disable(logging.WARNING)  # the quantizer turns every library's logging on
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,  # a tied head is a transposed MatMul, which the quantizer passes over
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fused = Path(scratch) / "fused.onnx"
        package = export_model(model, None, Path(scratch) / "package", INTERFACE.features, model_id="random")
        graph = fuse(fix_axes(ir.load(package.path / "decoder.onnx"), {CAPACITY: CONTEXT}), "cpu")
        ir.save(graph, fused, external_data="fused.onnx.data")
        config_4_bits = DefaultWeightOnlyQuantConfig(
            block_size=32, is_symmetric=True, accuracy_level=4, op_types_to_quantize=("MatMul", "Gather")
        )
        quantizer = MatMulNBitsQuantizer(onnx.load(fused), algo_config=config_4_bits)
        quantizer.process()
        quantizer.model.save_model_to_file(str(folder / "decoder.onnx"), use_external_data_format=True)
        (folder / "sampler.onnx").write_bytes((package.path / "sampler.onnx").read_bytes())


def tensors(batch: int, parameters: dict[str, float]) -> dict[str, ort.OrtValue]:
    """Every input and output of both graphs, in the middle of a generation."""
    rng = np.random.default_rng(0)
    sizes = {**INTERFACE.sizes, BATCH: batch, SEQUENCE: 1, CAPACITY: CONTEXT, STOPS: 2, BIASES: 1}
    values: dict[str, object] = {"lengths": HISTORY, "input_lengths": 1, "emit": True, **parameters}
    values["tokens"] = rng.integers(0, VOCAB, (batch, CONTEXT))
    values["noise"] = rng.random((batch, CONTEXT))
    result = {}
    for graph in (INTERFACE.decoder, INTERFACE.sampler):
        for spec in (*graph.inputs, *graph.states, *graph.outputs):
            array = np.empty(spec.shape(sizes), dtype=spec.dtype)
            array[...] = values.get(spec.name, spec.off if spec.off is not None else 0)
            result.setdefault(spec.name, ort.OrtValue.ortvalue_from_numpy(array))
    return result


def bind(session: ort.InferenceSession, spec: GraphSpec, values: dict[str, ort.OrtValue]) -> ort.IOBinding:
    """Bind every tensor of a graph, states in place."""
    binding = session.io_binding()
    for name in spec.input_names:
        binding.bind_ortvalue_input(name, values[name])
    for output in spec.outputs:
        binding.bind_ortvalue_output(output.name, values[output.name])
    for state, output_name in spec.retained.items():
        binding.bind_ortvalue_output(output_name, values[state])
    return binding


def open_session(path: Path, threads: int) -> ort.InferenceSession:
    """A CPU session; idle threads do not spin, so that the graphs do not disturb each other."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, required=True, metavar="FOLDER", help="where the graphs are, or go")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="timed steps of each mix")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    if not (options.keep / "sampler.onnx").exists():
        build(options.keep)

    decoder = open_session(options.keep / "decoder.onnx", options.threads)
    sampler = open_session(options.keep / "sampler.onnx", options.threads)
    table = Table("rows", "sampling", "decoder, ms", "sampler, ms", "sampler's share", title="0.6B int4, one step")
    for batch in options.batch:
        for mix, parameters in MIXES.items():
            values = tensors(batch, parameters)
            graphs = (
                (decoder, bind(decoder, INTERFACE.decoder, values)),
                (
                    sampler,
                    bind(sampler, INTERFACE.sampler, values),
                ),
            )
            times: tuple[list[float], list[float]] = ([], [])
            for step in range(options.steps + 5):
                for (session, binding), taken in zip(graphs, times, strict=True):
                    start = time.perf_counter()
                    session.run_with_iobinding(binding)
                    if step >= 5:
                        taken.append(1000 * (time.perf_counter() - start))
            model_ms, sampler_ms = map(statistics.median, times)
            share = sampler_ms / (model_ms + sampler_ms)
            table.add_row(str(batch), mix, f"{model_ms:.2f}", f"{sampler_ms:.3f}", f"{share:.2%}")
    Console().print(table)


if __name__ == "__main__":
    main()
