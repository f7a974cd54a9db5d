"""lm-evaluation-harness against a server: its numbers are those of `qsample evaluate` on the same texts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import qsample
from qsample.addons.evaluate import evaluate
from tests.helpers.servers import ServerProcess

pytest.importorskip("lm_eval", reason="pip install 'lm-eval[api]'")
pytestmark = pytest.mark.slow

TEXTS = [
    "And the LORD spake unto Moses, saying,\nSpeak unto the children of Israel, and say unto them.",
    "In the beginning God created the heaven and the earth. And the earth was without form, and void.",
]
CHOICES: list[dict[str, Any]] = [
    {
        "asked": "And the LORD spake unto",
        "choices": [" Moses, saying", " the purple computer"],
        "right": 0,
    },
    {
        "asked": "In the beginning God created the",
        "choices": [" internet", " heaven and the earth"],
        "right": 1,
    },
]
TASKS: dict[str, dict[str, Any]] = {
    "kjv_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "kjv_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{asked}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "right",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
}


def test_tasks(scoring_server: ServerProcess, served_package: Path, tmp_path: Path) -> None:
    for name, rows in (("kjv_texts", [{"text": text} for text in TEXTS]), ("kjv_choices", CHOICES)):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
        }
        # JSON is YAML.
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **TASKS[name]}))
    model = {
        "model": "tiny",
        "base_url": f"{scoring_server.url}/v1/completions",
        "tokenizer": str(Path(qsample.__file__).parent / "assets" / "tiny_lm"),
        "tokenizer_backend": "huggingface",
        "max_length": 512,
        "num_concurrent": 3,
    }
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
    command += [
        "--include_path",
        str(tmp_path),
        "--tasks",
        ",".join(TASKS),
        "--output_path",
        str(tmp_path / "out"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(written.read_text())["results"]
    own = evaluate(served_package, TEXTS)
    bits = (
        own.tokens
        * math.log2(own.packages[0].perplexity.value)
        / sum(len(text.encode()) for text in TEXTS)
    )
    assert results["kjv_texts"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)
    assert results["kjv_choices"]["acc,none"] == 1
