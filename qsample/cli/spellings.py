"""Commands and options of vLLM, ollama and llama.cpp, and what they are called here."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

ELSEWHERE: Final = {
    **dict.fromkeys(("run", "talk"), "qsample chat MODEL` or `qsample generate MODEL -p TEXT"),
    **dict.fromkeys(("complete", "completion", "cli"), "qsample generate"),
    **dict.fromkeys(("list", "ls", "ps"), "qsample cache list"),
    **dict.fromkeys(("rm", "remove", "delete"), "qsample cache clear"),
    **dict.fromkeys(("show", "info"), "qsample inspect"),
    **dict.fromkeys(("convert", "create", "build"), "qsample export` or `qsample compile"),
    **dict.fromkeys(("quantize",), "qsample compile MODEL OUT --weights int4"),
    **dict.fromkeys(("start", "server", "api-server"), "qsample serve"),
    **dict.fromkeys(("download",), "qsample pull"),
    **dict.fromkeys(("benchmark",), "qsample bench"),
    **dict.fromkeys(("perplexity", "eval"), "qsample evaluate"),
    **dict.fromkeys(("--max-model-len", "--ctx-size", "-c", "--num-ctx", "--max-seq-len"), "--ctx-len"),
    **dict.fromkeys(("--max-tokens", "--n-predict", "-n", "--predict", "--num-predict"), "--max-new-tokens"),
    **dict.fromkeys(("--max-num-seqs", "--parallel", "-np"), "--slots"),
    **dict.fromkeys(("--temp",), "--temperature"),
    **dict.fromkeys(("--repeat-penalty",), "--repetition-penalty"),
    "--repeat-last-n": "--penalty-last-n",
    **dict.fromkeys(("--stop", "--reverse-prompt", "-r"), "--stop-string"),
    **dict.fromkeys(("--system-prompt", "-sys"), "--system"),
    **dict.fromkeys(("--file", "-f", "--input-file"), "--prompt-file"),
    **dict.fromkeys(("--chat-template-file",), "--chat-template"),
    **dict.fromkeys(("--quantization", "-q"), "--weights"),
    **dict.fromkeys(("--device", "--n-gpu-layers", "-ngl", "--gpu-layers"), "--provider"),
    **dict.fromkeys(("-t",), "--threads"),
    **dict.fromkeys(("--lora-modules", "--enable-lora"), "--lora"),
}


def name_here(word: str, known: Collection[str]) -> str | None:
    """What an unknown command or option of a command line is called here; None if that is not known, or if it is an
    option that the running command, whose options are `known`, lacks."""
    ours = ELSEWHERE.get(word)
    return ours if ours is not None and (not ours.startswith("-") or ours in known) else None
