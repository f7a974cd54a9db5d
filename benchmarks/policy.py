"""The sampler component of ONNX workflows, `qsample policy`, in turns with another producer's component.

    python benchmarks/policy.py token_sampler.onnx

The other file is the artifact of a component of onnx-genai.token-sampler@2, as ONNX or as textproto: mobius has one at
tests/fixtures/onnx_genai_workflows/decoder/policies/token_sampler.onnx.textproto of github.com/justinchuby/onnx-genai.
Each round runs both on the same logits, one after the other; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from report import describe_machine, make_parser, print_table

from qsample.addons.policy.graphs import build_token_sampler

# Name: standard deviation of the logits, and the parameters of every row.
MIXES: Final[dict[str, tuple[float, dict[str, float]]]] = {
    "greedy": (2.0, {"top_k": 1}),
    "top-k 50, top-p 0.95": (2.0, {"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
    "top-p 0.95, flat": (0.3, {"top_p": 0.95}),
    "temperature 1": (2.0, {}),
}
DTYPES: Final = {
    "temperature": "float32",
    "top_p": "float32",
    "min_p": "float32",
    "active": "bool",
    "done": "bool",
}
OFF: Final = {
    "temperature": 1,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "seed": 3,
    "counter": 7,
    "active": True,
    "done": 0,
}


def milliseconds(session: ort.InferenceSession, inputs: dict[str, Any], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        session.run(None, inputs)
        times.append(1e3 * (time.perf_counter() - start))
    return float(np.median(times))


def main() -> None:
    parser = make_parser(__doc__, threads=2)
    parser.add_argument("other", type=Path)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = options.threads, 3
    theirs = onnx.load(
        options.other, format="textproto" if options.other.suffix == ".textproto" else None
    )
    own = ir.to_proto(build_token_sampler(options.vocab_size))
    other, ours = (
        ort.InferenceSession(model.SerializeToString(), settings) for model in (theirs, own)
    )
    rng, lines = np.random.default_rng(0), []
    for batch in options.batch:
        for name, (deviation, given) in MIXES.items():
            logits = rng.normal(0, deviation, (batch, options.vocab_size)).astype(np.float32)
            rows = {
                key: np.full(batch, (OFF | given)[key], DTYPES.get(key, "int64")) for key in OFF
            }
            inputs = {"logits": logits, **rows}
            for session in (ours, other):
                session.run(None, inputs)
            rounds = [
                (milliseconds(other, inputs, 3), milliseconds(ours, inputs, 15))
                for _ in range(options.rounds)
            ]
            slow, fast = np.median(rounds, axis=0)
            ratio = np.median([theirs / own for theirs, own in rounds])
            lines.append([str(batch), name, f"{slow:.2f}", f"{fast:.3f}", f"{ratio:.0f}x"])
    title = f"V = {options.vocab_size:,}; {describe_machine(options.threads)}"
    print_table(("rows", "parameters", "the other, ms", "qsample, ms", "ratio"), lines, title)


if __name__ == "__main__":
    main()
