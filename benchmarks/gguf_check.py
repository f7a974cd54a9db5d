"""Checks the GGUF files of `gguf_model.py`: compares llama.cpp's logits with transformers', in float32.

    peers/bin/python benchmarks/gguf_check.py

For each architecture, it writes a tiny model with random weights (including norms and biases) in float32, and feeds
random prompts. The exit status is 1 if the error of a logit exceeds TOLERANCE, relative to the largest logit.
"""

# ruff: noqa: C408 - keywords read better than quoted keys in the models

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf_model import write_float
from systems.llama_cpp import Model, closing, lib
from transformers import AutoConfig, AutoModelForCausalLM

TOLERANCE: Final = 1e-4
TOKENS: Final = 40  # more than the window of gpt-oss below
COMMON: Final[dict[str, Any]] = dict(
    vocab_size=256, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=96, max_position_embeddings=128, tie_word_embeddings=False,
)  # fmt: skip
EXPERTS: Final = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True
)
ROPE: Final = dict(rope_type="default", rope_theta=1e6, partial_rotary_factor=0.25)
GATED_DELTA: Final = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
    rope_parameters=ROPE,
)  # fmt: skip
# llama.cpp rounds the limits of YaRN's range; transformers does so with `truncate`.
YARN: Final = dict(
    rope_type="yarn", rope_theta=15e4, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=True,
    original_max_position_embeddings=4096,
)  # fmt: skip
MODELS: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "qwen3": dict(tie_word_embeddings=True),
    "qwen3_moe": EXPERTS,
    "gpt_oss": dict(
        num_local_experts=8, num_experts_per_tok=3, sliding_window=16, rope_parameters=YARN
    ),
    "qwen3_next": EXPERTS | GATED_DELTA | dict(shared_expert_intermediate_size=64),
    "qwen3_5_text": GATED_DELTA | dict(tie_word_embeddings=True),
}


def make_model(kind: str) -> Any:
    config = AutoConfig.for_model(kind, **COMMON | MODELS[kind])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or parameter.shape[-1] < 8:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return model


def llama_logits(path: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    """[tokens, vocabulary]: half of the prompt at once, then token by token, in the same context."""
    model, half, rows = Model(path, 2), len(ids) // 2, []
    # Flash attention rounds to float16.
    settings = {"flash_attn_type": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED}
    settings |= {"type_k": lib.GGML_TYPE_F32, "type_v": lib.GGML_TYPE_F32}
    with closing(model.open(128, **settings)) as context:
        for positions in (range(half), *([position] for position in range(half, len(ids)))):
            context.decode([(ids[position], position, 0) for position in positions], every=True)
            for i in range(len(positions)):
                row = lib.llama_get_logits_ith(context.handle, i)
                rows.append(np.ctypeslib.as_array(row, (model.vocab_size,)).copy())
    lib.llama_model_free(model.model)
    return np.stack(rows)


def main() -> None:
    failed = False
    for kind in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            folder, path = Path(scratch) / "checkpoint", Path(scratch) / "model.gguf"
            model = make_model(kind)
            model.save_pretrained(folder)
            write_float(folder, path, torch.float32)
            ids = torch.randint(3, 256, (1, TOKENS), generator=torch.Generator().manual_seed(1))
            with torch.no_grad():
                expected = model(input_ids=ids, use_cache=False).logits[0].numpy()
            found = llama_logits(path, ids[0].tolist())
        error = float(np.abs(found - expected).max() / np.abs(expected).max())
        same = int((found.argmax(-1) == expected.argmax(-1)).sum())
        failed |= not error <= TOLERANCE
        print(
            f"{kind}: largest difference {error:.1e} of the largest logit, argmax equal {same} of {TOKENS}"
        )
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
