"""Bakes a small model of each kind in each form that mobius writes, and rewrites the table of docs/bake.md.

    pip install mobius-onnx==0.1.0          # in an environment of its own
    python scripts/mobius_kinds.py --mobius PYTHON_OF_THAT_ENVIRONMENT [--keep FOLDER] [KIND ...]

A baked file must generate transformers' greedy tokens in a ragged batch, and its logits are compared with transformers'
(`reference`). With kinds, it only prints their rows. Files in FOLDER are built once.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import qsample
from qsample.errors import QsampleError

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = runpy.run_path(str(ROOT / "scripts" / "foreign_fixtures.py"))
PAGE = ROOT / "docs" / "bake.md"
MARKS = "<!-- mobius: scripts/mobius_kinds.py -->", "<!-- end of mobius -->"
FORMS = {
    "default": [],
    "`--ep cpu`": ["--ep", "cpu"],
    "`--ep onnx-standard`": ["--ep", "onnx-standard"],
    "`--static-cache`": ["--static-cache", "--max-seq-len", "64"],
}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# model type → changes of the configuration
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "phi3": {"sliding_window": None},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 1.5, "residual_multiplier": 0.7},
    "olmo2": {},
    "gemma3_text": {**SLIDING, "query_pre_attn_scalar": 16},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "gpt_oss": {
        **SLIDING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_5_text": {**HYBRID, "full_attention_interval": 4},
    "qwen3_next": {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 16},
}


def result(kind: str, options: list[str], python: str, folder: Path) -> str:
    """A cell of the table. folder: that of the kind."""
    checkpoint = folder / "checkpoint"
    out = folder / ("_".join(option.strip("-") for option in options) or "default")
    if not (out / "model.onnx").exists():
        command = [python, "-m", "mobius", "build", "--config", str(checkpoint), str(out), "--dtype", "f32", *options]
        if subprocess.run(command, capture_output=True).returncode:
            return "mobius does not build it"
    wanted = json.loads((folder / "tokens.json").read_text())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package = qsample.bake(out / "model.onnx", tokenizer=None, reference=str(checkpoint))
    except QsampleError as error:
        print(error, file=sys.stderr)
        return "rejected: not the model" if "differ from the checkpoint" in str(error) else "rejected"
    greedy = {"do_sample": False, "max_new_tokens": FIXTURES["NEW_TOKENS"], "eos_token_id": []}
    tokens = [list(row) for row in package.generate(wanted["prompts"], **greedy).token_ids]
    return "baked" if tokens == wanted["new_tokens"] else "WRONG TOKENS"


def row(kind: str, changes: dict[str, Any], python: str, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    if not (folder / "tokens.json").exists():
        FIXTURES["checkpoint"](folder / "checkpoint", kind, changes)
        tokens = FIXTURES["_transformers_tokens"](folder / "checkpoint")
        (folder / "tokens.json").write_text(json.dumps(tokens))
    return " | ".join([f"| {kind}", *(result(kind, options, python, folder) for options in FORMS.values())]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mobius", required=True, help="the python that has mobius")
    parser.add_argument("--keep", type=Path, help="a folder for the files; they are built only if they are missing")
    parser.add_argument("kinds", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for kind in given.kinds or KINDS:
            rows.append(row(kind, KINDS[kind], given.mobius, folder / kind))
            print(rows[-1], flush=True)
    if given.kinds:
        return
    head = [f"| mobius 0.1.0 | {' | '.join(FORMS)} |", "| --- " * (len(FORMS) + 1) + "|"]
    table = "\n".join([MARKS[0], "", *head, *rows, "", MARKS[1]])
    pattern = re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1])
    PAGE.write_text(re.sub(pattern, lambda _: table, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
