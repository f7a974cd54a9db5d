"""Commands and options of vLLM, ollama and llama.cpp, and what they are called here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ELSEWHERE: Final[Mapping[str, tuple[str, ...]]] = {
    "qsample chat MODEL` or `qsample generate MODEL -p TEXT": (
        "run",
        "talk",
        "--chat",
        "--conversation",
        "-cnv",
    ),
    "qsample generate": (
        "complete",
        "completion",
        "cli",
    ),
    "qsample cache list": (
        "list",
        "ls",
        "ps",
    ),
    "qsample cache clear": (
        "rm",
        "remove",
        "delete",
    ),
    "qsample inspect": (
        "show",
        "info",
    ),
    "qsample export` or `qsample compile": (
        "convert",
        "create",
        "build",
    ),
    "qsample compile MODEL OUT --weights int4": ("quantize",),
    "qsample serve": (
        "start",
        "server",
        "api-server",
    ),
    "qsample pull": ("download",),
    "qsample bench": ("benchmark",),
    "qsample evaluate": (
        "perplexity",
        "eval",
    ),
    "--ctx-len": (
        "--max-model-len",
        "--ctx-size",
        "-c",
        "--num-ctx",
        "--max-seq-len",
    ),
    "--max-new-tokens": (
        "--max-tokens",
        "--n-predict",
        "-n",
        "--predict",
        "--num-predict",
    ),
    "--num-return-sequences": ("-n",),
    "--slots": (
        "--max-num-seqs",
        "--parallel",
        "-np",
    ),
    "--temperature": ("--temp",),
    "--repetition-penalty": ("--repeat-penalty",),
    "--penalty-last-n": ("--repeat-last-n",),
    "--stop-string": (
        "--stop",
        "--reverse-prompt",
        "-r",
    ),
    "--system": (
        "--system-prompt",
        "-sys",
    ),
    "--prompt-file": (
        "--file",
        "-f",
        "--input-file",
    ),
    "--chat-template": ("--chat-template-file",),
    "--json-schema": (
        "--json-schema-file",
        "-j",
        "-jf",
    ),
    "--grammar": ("--grammar-file",),
    "--reasoning-parser": ("--reasoning-format",),
    "--raw": (
        "--ignore-chat-template",
        "--skip-chat-template",
        "--no-conversation",
        "-no-cnv",
    ),
    "--weights": (
        "--quantization",
        "-q",
    ),
    "--provider": (
        "--device",
        "--n-gpu-layers",
        "-ngl",
        "--gpu-layers",
    ),
    "--threads": ("-t",),
    "--lora": (
        "--lora-modules",
        "--enable-lora",
    ),
}
"""A command or option of qsample → the words that other programs have for it."""
