"""Two processes with other hash seeds, folders, temporary folders and numbers of threads make the same packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tiny_models import save_checkpoint

ROOT = Path(__file__).resolve().parent.parent
MAKE = """
import os, sys
if sys.argv[1] == "1" and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
import qsample
from qsample.contract.interface import Features
text = "And God said, Let there be light: and there was light. " * 20
load = qsample.AutoModelForCausalLM.from_pretrained
model = load("model", filters=("typical_p", "xtc"), logprobs=True, top_logprobs=3)
plain = model.export("plain")
load("model", include_sampler=False).export("logits")
plain.compile("int4", ctx_len=64, weights="int4", kv_cache_dtype="int8", num_speculative_tokens=3, max_divergence=9)
gptq = {"preset": "speed", "calibration_text": [text]}
model.compile("gptq", ctx_len=64, weights="int4", max_divergence=9, **gptq)
model.compile("own", ctx_len=64, weights="int4", max_divergence=9, preset="speed")
qsample.bake("genai", "baked", features=Features(filters=("xtc",)))
"""


@pytest.mark.ci
def test_packages_are_equal_byte_for_byte(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    made: list[dict[str, bytes]] = []
    running = []
    for number, folder in enumerate((tmp_path / "one", tmp_path / "two" / "deeper")):
        shutil.copytree(tmp_path / "model", folder / "model")
        shutil.copytree(ROOT / "examples" / "tiny_lm_genai", folder / "genai")
        (folder / "tmp").mkdir()
        own = {
            "PYTHONHASHSEED": str(number),
            "TMPDIR": str(folder / "tmp"),
            "OMP_NUM_THREADS": str(number + 1),
        }
        command = [sys.executable, "-W", "ignore", "-c", MAKE, str(number)]
        environment = {**os.environ, **own, "PYTHONPATH": str(ROOT)}
        running.append(
            subprocess.Popen(
                command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
            )
        )
    for process, folder in zip(
        running, (tmp_path / "one", tmp_path / "two" / "deeper"), strict=True
    ):
        _, err = process.communicate()
        assert process.returncode == 0, err
        packages = [path.parent for path in sorted(folder.glob("*/qsample.json"))]
        files = [
            path for package in packages for path in sorted(package.rglob("*")) if path.is_file()
        ]
        made.append({path.relative_to(folder).as_posix(): path.read_bytes() for path in files})
    assert len({name.split("/")[0] for name in made[0]}) == 6
    assert made[0].keys() == made[1].keys()
    assert [name for name, content in made[0].items() if content != made[1][name]] == []
    assert [name for name, content in made[0].items() if str(tmp_path).encode() in content] == []
