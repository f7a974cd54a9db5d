r"""Bakes a small model of each kind in each form that other exporters write, and rewrites the table of docs/bake.md.

    pip install mobius-onnx==0.1.0                       # each exporter in an environment of its own
    pip install onnxruntime-genai==0.18.* onnx onnx_ir torch transformers
    pip install optimum-onnx==0.1.0 'transformers<4.58' onnx onnxruntime torch
    pip install 'transformers==5.23.*' torch onnx onnxscript
    python scripts/exporter_kinds.py --mobius PYTHON --genai PYTHON --optimum PYTHON --transformers PYTHON \
        [--keep FOLDER] [KIND ...]

PYTHON is that of the exporter's environment. A baked file must generate transformers' greedy tokens in a ragged
batch, and its logits are compared with transformers' (`reference`). Cells of exporters and kinds that are not given
stay as they are, or say "not run". Files in FOLDER are built once.
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
MARKS = "<!-- kinds: scripts/exporter_kinds.py -->", "<!-- end of kinds -->"
MOBIUS = "mobius build --config {checkpoint} {out} --dtype f32"
GENAI = "onnxruntime_genai.models.builder -i {checkpoint} -o {out} -c {out}/cache"
OPTIMUM = "optimum.exporters.onnx -m {checkpoint} --task text-generation-with-past {out}"
PACKAGES = {"mobius": "mobius-onnx", "genai": "onnxruntime-genai", "optimum": "optimum-onnx"}
PACKAGES["transformers"] = "transformers"
# name of a row → exporter, its module and arguments; transformers': its provider
FORMS = {
    "mobius": ("mobius", MOBIUS),
    "mobius `--ep cpu`": ("mobius", f"{MOBIUS} --ep cpu"),
    "mobius `--ep onnx-standard`": ("mobius", f"{MOBIUS} --ep onnx-standard"),
    "mobius `--static-cache`": ("mobius", f"{MOBIUS} --static-cache --max-seq-len 64"),
    "onnxruntime-genai `-p fp32 -e cpu`": ("genai", f"{GENAI} -p fp32 -e cpu"),
    "onnxruntime-genai `-p fp16 -e cuda`": ("genai", f"{GENAI} -p fp16 -e cuda"),
    "onnxruntime-genai `-p fp16 -e dml`": ("genai", f"{GENAI} -p fp16 -e dml"),
    "onnxruntime-genai `-p fp32 -e webgpu`": ("genai", f"{GENAI} -p fp32 -e webgpu"),
    "optimum-onnx": ("optimum", OPTIMUM),
    'transformers `ort_fusions="cpu"`': ("transformers", "cpu"),
    'transformers `ort_fusions="cuda"`': ("transformers", "cuda"),
    'transformers `ort_fusions="webgpu"`': ("transformers", "webgpu"),
}
EXPORT = f"import runpy, sys; runpy.run_path({FIXTURES['__file__']!r})['export_with_transformers'](*sys.argv[1:])"
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
        # genai takes no other rotary table for gpt_oss. It does not round where the ramp begins and ends (1 and 3 of
        # the 8 pairs), and mobius always does: with these betas both are whole numbers.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 3.22106,
            "beta_slow": 0.32211,
        },
    },
    "qwen3_5_text": {**HYBRID, "full_attention_interval": 4},
    "qwen3_next": {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 16},
}


def cell(form: str, python: str, folder: Path) -> str:
    """What became of a kind in a form. folder: that of the kind, with its checkpoint and tokens."""
    checkpoint = folder / "checkpoint"
    out = folder / re.sub(r"\W+", "_", form).strip("_")
    log = out.with_suffix(".log")
    if not log.exists():
        exporter, given = FORMS[form]
        # The arguments are split before the paths come in, which may have blanks.
        arguments = ["-m", *(part.format(checkpoint=checkpoint, out=out) for part in given.split())]
        if exporter == "transformers":
            arguments = ["-c", EXPORT, str(checkpoint), str(out), given]
        built = subprocess.run([python, *arguments], capture_output=True, text=True)
        log.write_text(built.stdout + built.stderr)
    file = next(
        (out / name for name in ("model.onnx", "decode.onnx") if (out / name).exists()), None
    )
    if file is None:
        print(f"{form}, {folder.name}: {log.read_text().strip().splitlines()[-1]}", file=sys.stderr)
        return "not built"
    wanted = json.loads((folder / "tokens.json").read_text())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package = qsample.bake(file, tokenizer=None, reference=str(checkpoint))
    except QsampleError as error:
        print(f"{form}, {folder.name}: {error}", file=sys.stderr)
        return "not the model" if "differ from the checkpoint" in str(error) else "rejected"
    greedy = {"do_sample": False, "max_new_tokens": FIXTURES["NEW_TOKENS"], "eos_token_id": []}
    tokens = [list(row) for row in package.generate(wanted["prompts"], **greedy).token_ids]
    return "baked" if tokens == wanted["new_tokens"] else "WRONG TOKENS"


def for_any_transformers(config: Path) -> None:
    """Rewrite a config.json so that transformers 4 (optimum) reads it, too."""
    fields = json.loads(config.read_text(encoding="utf-8"))
    rope = fields["rope_parameters"]
    if "full_attention" in rope:
        del fields["rope_parameters"]
        fields["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    fields["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        fields["rope_scaling"] = rope
    config.write_text(json.dumps(fields), encoding="utf-8")


def prepare(kind: str, folder: Path) -> None:
    """Write a checkpoint of a kind and transformers' greedy tokens into its folder."""
    folder.mkdir(exist_ok=True)
    if not (folder / "tokens.json").exists():
        FIXTURES["checkpoint"](folder / "checkpoint", kind, KINDS[kind])
        for_any_transformers(folder / "checkpoint" / "config.json")
        tokens = FIXTURES["_transformers_tokens"](folder / "checkpoint")
        (folder / "tokens.json").write_text(json.dumps(tokens))


def version(exporter: str, python: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({PACKAGES[exporter]!r}))"
    return subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def rewritten(page: str, exporters: dict[str, str], cells: dict[tuple[str, str], str]) -> str:
    """The page with these cells in its table. Other cells stay as they are, and say "not run" if there are none.

    Args:
        page: the text of docs/bake.md.
        exporters: the version of each exporter that ran.
        cells: form and kind → what became of it.
    """
    block = re.search(re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1]), page, flags=re.DOTALL)
    if block is None:
        raise SystemExit(
            f"{PAGE} has no table between {MARKS[0]} and {MARKS[1]}: put these two lines where it belongs"
        )
    table = [
        line.strip("| ").split(" | ") for line in block[0].splitlines() if line.startswith("| ")
    ]
    present = {
        (row[0], name): text for row in table for name, text in zip(table[0], row, strict=False)
    }
    lines = [f"| exporter | version | {' | '.join(KINDS)} |", "| --- " * (len(KINDS) + 2) + "|"]
    for form, (exporter, _) in FORMS.items():
        stated = exporters.get(exporter) or present.get((form, "version"), "")
        texts = [cells.get((form, kind)) or present.get((form, kind), "not run") for kind in KINDS]
        lines.append(f"| {' | '.join([form, stated, *texts])} |")
    return page.replace(block[0], "\n".join([MARKS[0], "", *lines, "", MARKS[1]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for exporter, package in PACKAGES.items():
        parser.add_argument(
            f"--{exporter}", metavar="PYTHON", help=f"the python that has {package}"
        )
    parser.add_argument(
        "--keep", type=Path, help="a folder for the files; they are built only if they are missing"
    )
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    given = parser.parse_args()
    pythons = {exporter: getattr(given, exporter) for exporter in PACKAGES}
    if not any(pythons.values()):
        parser.error("no exporter: give one of --" + ", --".join(PACKAGES))
    if unknown := set(given.kinds) - set(KINDS):
        parser.error(f"unknown kind {', '.join(sorted(unknown))}: choose from {', '.join(KINDS)}")
    exporters = {
        exporter: version(exporter, python) for exporter, python in pythons.items() if python
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in given.kinds or KINDS:
            prepare(kind, folder / kind)
            for form, (exporter, _) in FORMS.items():
                if python := pythons[exporter]:
                    found = cell(form, python, folder / kind)
                    print(f"{form}, {kind}: {found}", flush=True)
                    PAGE.write_text(rewritten(PAGE.read_text(), exporters, {(form, kind): found}))


if __name__ == "__main__":
    main()
