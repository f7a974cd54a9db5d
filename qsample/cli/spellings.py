"""Commands and options of vLLM, ollama and llama.cpp, and what they are called here."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

ELSEWHERE: Final = {
    "qsample chat MODEL` or `qsample generate MODEL -p TEXT": "run talk",
    "qsample generate": "complete completion cli",
    "qsample cache list": "list ls ps",
    "qsample cache clear": "rm remove delete",
    "qsample inspect": "show info",
    "qsample export` or `qsample compile": "convert create build",
    "qsample compile MODEL OUT --weights int4": "quantize",
    "qsample serve": "start server api-server",
    "qsample pull": "download",
    "qsample bench": "benchmark",
    "qsample evaluate": "perplexity eval",
    "--ctx-len": "--max-model-len --ctx-size -c --num-ctx --max-seq-len",
    "--max-new-tokens": "--max-tokens --n-predict -n --predict --num-predict",
    "--slots": "--max-num-seqs --parallel -np",
    "--temperature": "--temp",
    "--repetition-penalty": "--repeat-penalty",
    "--penalty-last-n": "--repeat-last-n",
    "--stop-string": "--stop --reverse-prompt -r",
    "--system": "--system-prompt -sys",
    "--prompt-file": "--file -f --input-file",
    "--chat-template": "--chat-template-file",
    "--weights": "--quantization -q",
    "--provider": "--device --n-gpu-layers -ngl --gpu-layers",
    "--threads": "-t",
    "--lora": "--lora-modules --enable-lora",
}
HERE: Final = {word: ours for ours, words in ELSEWHERE.items() for word in words.split()}


def name_here(word: str, known: Collection[str]) -> str | None:
    """What an unknown command or option of a command line is called here; None if that is not known, or if it is an
    option that the running command, whose options are `known`, lacks."""
    ours = HERE.get(word)
    return ours if ours is not None and (not ours.startswith("-") or ours in known) else None
