"""Makes checkpoints of random weights in a named shape, and converts them to the peers' formats.

Random weights run as fast as trained weights, but their distribution is flat, the worst case for top-p. Therefore the
last norm is scaled until the likeliest token has a probability of about PEAK, as in a trained model: this equals a
scaled head, and leaves a tied head tied. The contributions of the layers to the residual stream are scaled as well:
with a tied head, the embedding in the stream would otherwise make each token predict itself.
"""

# ruff: noqa: C408 - keywords read better than quoted keys in the shapes

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from systems import prompt_ids

PEAK: Final = 0.5
LAYER_GAIN: Final = 8.0
RESIDUAL: Final = ("o_proj", "out_proj", "down_proj")  # these write to the residual stream
SHARD: Final = 2 * 10**9  # bytes of a file of a large checkpoint
SPREAD: Final = 0.02  # of the weights of a large checkpoint
LOGITS: Final = 4.0
CTX_LEN: Final = 4608  # of packages for the CPU, unless a shape has less
ASSETS: Final = Path(__file__).resolve().parent.parent / "qsample" / "assets" / "tiny_lm"
TOKEN_IDS: Final = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
# From the models' own config.json. If a context is shortened, nothing longer is measured. A slice has few of its
# model's layers, each in full size, and the same share of its vocabulary: its step, times the ratio of the numbers of
# layers, is about a step of the whole model.
_QWEN3 = dict(
    model_type="qwen3",
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
)
_QWEN3.update(rope_theta=1e6, tie_word_embeddings=True)
_LLAMA = dict(
    model_type="llama",
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    rope_theta=5e5,
)
_SHORT = dict(max_position_embeddings=4096)
_ROPE = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)
_GATED_DELTA = dict(
    num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, rope_parameters=_ROPE, **_SHORT
)
_QWEN3_5 = dict(
    model_type="qwen3_5_text", hidden_size=1024, intermediate_size=3584, num_attention_heads=8
)
_QWEN3_5.update(linear_num_value_heads=16, tie_word_embeddings=True, **_GATED_DELTA)
_UNTIED = dict(tie_word_embeddings=False)


def _sizes(
    hidden: int, intermediate: int, layers: int, heads: int | None = None, **more: Any
) -> dict[str, Any]:
    more |= {"num_attention_heads": heads} if heads else {}
    return dict(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, **more
    )


_QWEN3_NEXT = dict(  # 64 of 512 experts: the time of a step follows the 10 active experts
    model_type="qwen3_next", linear_num_value_heads=32, num_experts=64, num_experts_per_tok=10,
    moe_intermediate_size=512, shared_expert_intermediate_size=512, **_GATED_DELTA, **_UNTIED,
)  # fmt: skip
_QWEN3_MOE = dict(
    model_type="qwen3_moe", num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, norm_topk_prob=True, rope_theta=1e6, **_SHORT, **_UNTIED,
)  # fmt: skip
_GPT_OSS = dict(
    model_type="gpt_oss", num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
    sliding_window=128, **_SHORT, **_UNTIED,
)  # fmt: skip
_GEMMA3 = dict(
    model_type="gemma3_text", num_key_value_heads=1, head_dim=256, sliding_window=512, vocab_size=262144,
    max_position_embeddings=32768, query_pre_attn_scalar=256, tie_word_embeddings=True,
)  # fmt: skip
_TINY = dict(
    model_type="qwen3",
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=4096,
    tie_word_embeddings=True,
)
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16),
    "qwen3-4b": _QWEN3 | _sizes(2560, 9728, 36, 32),
    "llama-3.2-1b": _LLAMA | _SHORT | _sizes(2048, 8192, 16, head_dim=64, tie_word_embeddings=True),
    "llama-3.1-8b": _LLAMA | _SHORT | _UNTIED | _sizes(4096, 14336, 32, head_dim=128),
    "gemma-3-270m": _GEMMA3 | _sizes(640, 2048, 18, 4),  # 3 of 18 layers see all tokens
    "qwen3.5-0.8b": _QWEN3_5 | dict(num_hidden_layers=24, vocab_size=248320),
    "qwen3.5-slice": _QWEN3_5
    | dict(num_hidden_layers=4, vocab_size=41408),  # 4 of 24 layers; a multiple of 64
    "qwen3-next-slice": _QWEN3_NEXT | _sizes(2048, 5120, 4, 16, vocab_size=12672),  # 4 of 48 layers
    "qwen3-30b-a3b-slice": _QWEN3_MOE
    | _sizes(2048, 6144, 3, 32, vocab_size=9536),  # 3 of 48 layers
    "gpt-oss-20b-slice": _GPT_OSS | _sizes(2880, 2880, 2, 64, vocab_size=16768),  # 2 of 24 layers
    "tiny": _TINY | _SHORT | _sizes(128, 256, 2, 4),  # to try the benchmarks themselves in seconds
}


def make_checkpoint(shape: str, folder: Path) -> Path:
    """Write a bfloat16 checkpoint with a tokenizer to `folder`, which is returned, unless it exists."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if (folder / "config.json").exists():
        return folder
    options = {**SHAPES[shape], **TOKEN_IDS}
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.model.layers.named_parameters():
            if name.removesuffix(".weight").endswith(RESIDUAL):
                parameter.mul_(LAYER_GAIN)
        weight, factor = model.model.norm.weight, peaking_factor(model)
        # Qwen3-Next and Qwen3.5 store the difference from 1.
        weight.copy_(weight * factor if weight.any() else (1 + weight) * factor - 1)
    model.generation_config.update(**TOKEN_IDS)
    scratch = folder.with_name(f"{folder.name}.partial")
    AutoTokenizer.from_pretrained(ASSETS).save_pretrained(scratch)
    model.save_pretrained(scratch)
    scratch.rename(folder)  # an existing folder is complete
    return folder


def peaking_factor(model: Any) -> float:
    """The factor of `model`'s logits that gives the likeliest token a median probability of PEAK."""
    import torch

    ids = torch.from_numpy(prompt_ids(4, 16, model.config.vocab_size))
    with torch.no_grad():
        logits = (
            model(input_ids=ids, use_cache=False).logits.flatten(0, 1).to(torch.float32).numpy()
        )
    shifted = logits - logits.max(-1, keepdims=True)
    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = float(np.sqrt(low * high))
        if np.median(1 / np.exp(middle * shifted).sum(-1)) < PEAK:
            low = middle
        else:
            high = middle
    return low


def make_large_checkpoint(shape: str, folder: Path) -> Path:
    """Write a bfloat16 checkpoint with a single shard in memory at a time, unless it exists.

    Its weights are drawn as models are initialised, and its last norm gives the logits a standard deviation of LOGITS.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.core_model_loading import revert_weight_conversion

    if (folder / "config.json").exists():  # which is written last
        return folder
    options = {**SHAPES[shape], **TOKEN_IDS, "dtype": "bfloat16"}
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    folder.mkdir(parents=True, exist_ok=True)
    generator, index, shard = torch.Generator().manual_seed(0), dict[str, str](), dict[str, Any]()
    last = LOGITS / (SPREAD * config.hidden_size**0.5)

    def flush() -> None:
        name = f"model-{len(set(index.values())) + 1:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if weight.ndim == 1:
            drawn = torch.full(
                weight.shape, last if name == "model.norm.weight" else 1.0, dtype=torch.bfloat16
            )
        else:
            drawn = torch.empty(weight.shape, dtype=torch.bfloat16).normal_(
                0, SPREAD, generator=generator
            )
        # Like real checkpoints: each expert is a separate tensor.
        for part, tensor in revert_weight_conversion(model, {name: drawn}).items():
            shard[part] = tensor.clone()
            if sum(held.nbytes for held in shard.values()) >= SHARD:
                flush()
    if shard:
        flush()
    weight_map = {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    AutoTokenizer.from_pretrained(ASSETS).save_pretrained(folder)
    config.save_pretrained(folder)
    return folder


def qsample(*arguments: object, before: str = "") -> list[str]:
    """The command line of qsample in this Python; before: statements to run first."""
    return [
        sys.executable,
        "-c",
        f"{before}from qsample.cli import main; main()",
        *map(str, arguments),
    ]


def make_package(
    checkpoint: Path,
    package: Path,
    weights: str,
    *options: str,
    ctx_len: int = CTX_LEN,
    before: str = "",
) -> Path:
    """Compile a checkpoint for the CPU, unless the package exists.

    Args:
        checkpoint: The checkpoint.
        package: The destination, which is returned.
        weights: "float32", or a value of `--weights`.
        *options: Further options of `qsample compile`.
        ctx_len: The context, unless the checkpoint's model has less.
        before: Python statements to run before the command.
    """
    if not package.exists():
        config = json.loads((checkpoint / "config.json").read_text())
        positions = config.get("text_config", config)["max_position_embeddings"]
        more = ["--ctx-len", min(ctx_len, positions), *options]
        if weights != "float32":
            # Random weights diverge further than trained weights; the benchmarks report the divergence.
            more += ["--weights", weights, "--max-divergence", "100"]
        run_quietly(
            qsample("compile", checkpoint, package, *more, before=before),
            package.with_suffix(".log"),
        )
    return package


def make_genai_model(
    checkpoint: Path,
    folder: Path,
    python: str,
    *,
    precision: str = "int4",
    block_size: int = 32,
    algorithm: str = "default",
    provider: str = "cpu",
    last_logits: bool = False,
) -> Path:
    """Convert a checkpoint with onnxruntime-genai's own model builder, unless the result exists.

    Accuracy level 4 selects the same kernels as qsample; the builder shares a tied table by default.

    Args:
        checkpoint: The checkpoint.
        folder: The destination, which is returned.
        python: An interpreter with the packages of `peers.txt`.
        precision: The builder's precision: "int4", "fp16", "bf16", ….
        block_size: Weights that share a scale, for int4.
        algorithm: The builder's `algo_config`; "default" rounds to the nearest level.
        provider: The builder's execution provider.
        last_logits: Compute only the logits of a prompt's last token; otherwise the model returns all, [B, S, V].
    """
    if not (folder / "genai_config.json").exists():
        with tempfile.TemporaryDirectory(dir=checkpoint.parent) as scratch:
            kind = json.loads((checkpoint / "config.json").read_text())["model_type"]
            source = (
                make_composite(checkpoint, Path(scratch)) if kind == "qwen3_5_text" else checkpoint
            )
            command = [
                "-m",
                "onnxruntime_genai.models.builder",
                "-i",
                source,
                "-o",
                folder,
                "-p",
                precision,
            ]
            command += ["-e", provider, "-c", folder / "cache"]
            settings = [f"block_size={block_size}", f"algo_config={algorithm}", "accuracy_level=4"]
            more = settings if precision == "int4" else []
            more += ["prune_lm_head=true"] if last_logits else []
            command += ["--extra_options", *more] if more else []
            run_quietly([python, *map(str, command)], folder / "builder.log")
    return folder


def make_gguf(
    checkpoint: Path,
    path: Path,
    python: str,
    quantization: str = "Q4_0",
    *,
    texts: bool = False,
    pure: bool = True,
) -> Path:
    """Convert a checkpoint to a quantized GGUF file, unless the file exists.

    Args:
        checkpoint: The checkpoint.
        path: The destination, which is returned.
        python: An interpreter with gguf and llama-cpp-python, whose own quantizer is used.
        quantization: A type of llama.cpp.
        texts: Invent a text for every token; see `gguf_model.py`.
        pure: Give the head the same type; otherwise the quantizer chooses a type for each matrix.
    """
    if not path.exists():
        script = str(Path(__file__).with_name("gguf_model.py"))
        command = [python, script, str(checkpoint), str(path), quantization]
        command += ["--texts"] if texts else []
        command += [] if pure else ["--mixed"]
        run_quietly(command, path.with_suffix(".log"))
    return path


def make_composite(checkpoint: Path, folder: Path) -> Path:
    """Write a Qwen3.5 decoder in its released form, with a vision tower (here a minimal one), to `folder`.

    onnxruntime-genai's builder accepts no other form.
    """
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
    )

    decoder = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    text = decoder.config.to_dict()
    text["rope_parameters"] |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1}
    vision["out_hidden_size"] = text["hidden_size"]
    config = Qwen3_5Config(
        text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"]
    )
    composite = Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16)
    composite.model.language_model.load_state_dict(decoder.model.state_dict())
    composite.lm_head.load_state_dict(decoder.lm_head.state_dict())
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    composite.save_pretrained(folder)
    return folder


def run_quietly(command: list[str], log: Path) -> None:
    """Run a builder with its output in `log`.

    Raises:
        RuntimeError: The builder failed; the message has the end of its output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    # Another interpreter has its own packages.
    left_out = () if command[0] == sys.executable else ("PYTHONPATH",)
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, check=False, env=environment
        )
    if done.returncode:
        lines = log.read_text(encoding="utf-8").splitlines()
        raise RuntimeError(
            "\n".join([f"{' '.join(command[:3])} … failed; the end of {log}:", *lines[-12:]])
        )


def can_import(python: str, modules: list[str]) -> str | None:
    """None if the interpreter `python` has all `modules`, otherwise its message."""
    code = f"import importlib.util as u; print([m for m in {modules} if u.find_spec(m) is None])"
    done = subprocess.run(
        [python or sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return None if done.stdout.strip() == "[]" else f"{python} has no {done.stdout.strip()}"
