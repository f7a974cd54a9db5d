"""Records results of llama.cpp's own samplers in tests/fixtures/llama_cpp_samplers.json for the tests' reference.

    pip install llama-cpp-python gguf
    python scripts/llama_cpp_vectors.py

Run it to adopt the definitions of another llama.cpp; if llama.cpp is installed, the tests also compare with it
directly.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.helpers.llama_cpp_samplers import (  # noqa: E402
    FILTERS,
    adaptive_case,
    chain_case,
    dry_case,
    filters_case,
    mirostat_case,
    random_filters,
)

FILE = ROOT / "tests" / "fixtures" / "llama_cpp_samplers.json"


def main() -> None:
    rng = np.random.default_rng(0)
    kinds = {
        "filters": [
            *(filters_case(rng, [name]) for name in FILTERS for _ in range(2)),
            *(filters_case(rng, ["xtc_probability"]) for _ in range(4)),
            *(filters_case(rng, random_filters(rng)) for _ in range(16)),
        ],
        "dry": [dry_case(rng) for _ in range(16)],
        "mirostat": [mirostat_case(rng) for _ in range(4)],
        "chains": [chain_case(rng) for _ in range(10)],
        "adaptive_p": [adaptive_case(rng) for _ in range(4)],
    }
    lines = [f'"llama_cpp_python": "{version("llama-cpp-python")}"']
    for kind, cases in kinds.items():
        lines.append(f'"{kind}": [\n' + ",\n".join(json.dumps(case) for case in cases) + "\n]")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
