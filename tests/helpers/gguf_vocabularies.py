# ruff: noqa: RUF001 (characters that look like others)
"""Vocabularies of GGUF files as metadata, and 2,000 texts on which tokenizers tend to differ.
`scripts/gguf_fixtures.py` gives both to llama.cpp, and records its tokens."""

from __future__ import annotations

import base64
import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gguf_tokenizers.json"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
MORE = dict.fromkeys(("<|im_start|>", "<|im_end|>", "<|end|>", "<|endoftext|>"), CONTROL)
MORE |= {"<tool>": USER_DEFINED}
WHOLE = "Ġbeginning"  # a token that no merges make
PRE = {  # values of tokenizer.ggml.pre, and further ones that mean the same
    "default": "",
    "gpt-2": "phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    "dbrx": "smaug-bpe chatglm-bpe",
    "glm4": "glm5",
    "qwen35": "",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    "minicpm5": "",
    "seed-coder": "",
    "tekken": "",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "deepseek-llm": "",
    "deepseek-coder": "",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "viking": "",
}
CASES: dict[str, dict[str, Any]] = {  # what they add to the metadata
    **{pre: {"pre": pre} for pre in PRE},
    "byte-level, BOS and EOS": {"pre": "qwen2", "add_bos_token": True, "add_eos_token": True},
    "sentencepiece": {},  # of Llama 2 and Mistral; then Gemma's
    "sentencepiece, no prefix": {"add_space_prefix": False, "remove_extra_whitespaces": True},
    "sentencepiece, Phi-3": {"general.name": "A Phi-3 model"},
    "sentencepiece, no BOS": {"add_bos_token": False, "add_eos_token": True},
    "gemma4": {"model": "gemma4", "add_bos_token": False},  # which llama.cpp adds all the same
    "qwen2, no types": {"pre": "qwen2", "token_type": None},
    "sentencepiece, no types": {"token_type": None},
}
STOPS: list[
    tuple[dict[str, int], dict[str, int]]
] = [  # tokens behind those of `SPECIAL`, and ids that are named
    (
        {
            "<|im_start|>": CONTROL,
            "<|im_end|>": CONTROL,
            "<|endoftext|>": CONTROL,
            "<|fim_pad|>": CONTROL,
        },
        {"eos": 2},
    ),
    (
        {
            "<|repo_name|>": CONTROL,
            "<|file_sep|>": USER_DEFINED,
            "<|eom_id|>": CONTROL,
            "<a>": CONTROL,
        },
        {"eos": 6},
    ),
    (
        {"<|return|>": CONTROL, "<|call|>": CONTROL, "<|end|>": CONTROL, "<|start|>": CONTROL},
        {"eos": 3},
    ),
    ({"<|flush|>": CONTROL, "<|calls|>": CONTROL, "<|end|>": CONTROL}, {"eos": 5}),
    ({"<|end|>": CONTROL, "<|return|>": CONTROL}, {"eos": 1}),
    (
        {
            "<eos>": CONTROL,
            "<turn|>": CONTROL,
            "<|tool_response>": CONTROL,
            "<end_of_turn>": CONTROL,
        },
        {"eos": 3},
    ),
    (
        {"a": NORMAL, "b": NORMAL, "<|fim_pad|>": CONTROL, "c": CONTROL},
        {"eos": 3, "eot": 4, "eom": 5, "fim_pad": 6},
    ),
    (
        {
            "[EOT]": CONTROL,
            "[EOS]": CONTROL,
            "[PAD]": CONTROL,
            "[e~[": CONTROL,
            "<EOT>": USER_DEFINED,
        },
        {"eos": 2},
    ),
]
_PIECES = {
    "words": "In ¦the ¦beginning, ¦God ¦heaven-¦and\n¦earth…¦don't ¦WON'T ¦it's¦they've ¦'I'm ¦naïve ¦O'Neill. ",
    "numbers": "0¦1¦23¦456¦7890¦3.14¦1,000 ¦-5¦%¦0x1F ¦e9\n¦ ¦٣¦७",
    "code": 'def f(x):¦return ¦    ¦\t¦\n¦x += 1¦->¦//¦/*¦*/ ¦<?php¦{}¦[0];¦\'s¦"t"¦!= ¦_a_b¦HTTPServer2 ¦#!¦\\n',
    "spaces": " ¦  ¦   ¦\t¦\n¦\r\n¦\r¦\n\n¦\u00a0¦\u3000¦\u2028¦\u2003¦\x0b¦\f¦a¦7¦.¦é",
    "special tokens": "<s>¦</s>¦<|im_end|>¦<|im_start|>¦<unk>¦<tool>¦<0x0A>¦<|end|>¦<|endoftext|>¦ ¦\n¦a¦<¦s>¦im_end",
    "emoji": "😀¦👩\u200d🚀¦🏳\ufe0f\u200d🌈¦👍🏽¦🇩🇪¦☺\ufe0f¦✈¦🫠¦1\ufe0f\u20e3¦ ¦!¦ok",
    "marks": "e\u0301¦a\u0308¦n\u0303o¦Z\u0335\u0321¦क\u094d\u0937¦\u0301¦\u20dd¦x¦ ¦1¦-",
    "symbols": "∑¦∂¦≤¦≠¦→¦±¦×¦√¦∞¦°¦€¦£¦§¦©¦™¦«¦„¦”¦‘¦’¦…¦–¦—¦•¦½¦²¦①¦Ⅷ¦$¦+¦~¦^¦`¦|¦=¦ ¦a¦1",
}
_RANGES = {
    "ascii": ((0x20, 0x7E),),
    "latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x20, 0x20)),
    "greek and cyrillic": (
        (0x391, 0x3A1),
        (0x3B1, 0x3C9),
        (0x410, 0x44F),
        (0x20, 0x20),
        (0x2C, 0x2E),
    ),
    "chinese": ((0x4E00, 0x9FA5), (0x3001, 0x3002), (0xFF01, 0xFF0F), (0x30, 0x39)),
    "japanese and korean": (
        (0x3042, 0x3093),
        (0x30A2, 0x30F3),
        (0xAC00, 0xD7A3),
        (0x4E00, 0x4FFF),
        (0x20, 0x20),
    ),
    "right to left": (
        (0x5D0, 0x5EA),
        (0x621, 0x63A),
        (0x641, 0x64A),
        (0x660, 0x669),
        (0x20, 0x20),
        (0x60C, 0x60C),
    ),
    "indian and thai": (
        (0x905, 0x939),
        (0x93E, 0x94D),
        (0xE01, 0xE3A),
        (0xE40, 0xE4E),
        (0x966, 0x96F),
        (0x20, 0x20),
    ),
    "control characters": (
        (0x00, 0x20),
        (0x7F, 0x9F),
        (0x200B, 0x200F),
        (0xFEFF, 0xFEFF),
        (0x61, 0x62),
    ),
    "planes": (
        (0x10000, 0x1000B),
        (0x10400, 0x1044F),
        (0x1D400, 0x1D454),
        (0x20000, 0x20100),
        (0x1F300, 0x1F5FF),
    ),
}


def texts() -> dict[str, list[str]]:
    """100 texts of each of 20 groups, the same on every Python."""
    draw = random.Random(47).random  # the method whose numbers Python promises to keep

    def choose(items: Sequence[Any]) -> Any:
        return items[int(draw() * len(items))]

    def many(make: Callable[[], str], most: int) -> list[str]:
        return ["".join(make() for _ in range(int(draw() * most) + 1)) for _ in range(100)]

    def character(ranges: Sequence[tuple[int, int]]) -> str:
        first, last = choose(ranges)
        return chr(first + int(draw() * (last - first + 1)))

    split = {name: text.split("¦") for name, text in _PIECES.items()}
    groups = {
        name: many(lambda pieces=pieces: choose(pieces), 12) for name, pieces in split.items()
    }
    groups |= {
        name: many(lambda ranges=ranges: character(ranges), 16) for name, ranges in _RANGES.items()
    }
    groups["repeated"] = [
        choose("a -=_.\n\t0é中'") * (int(draw() * 40) + 1) + choose(["", "b", " "])
        for _ in range(100)
    ]
    groups["short"] = ["", *map(chr, range(0x20, 0x7F)), "\n", " \n", "\u00a0", "▁"]
    everything = [text for group in groups.values() for text in group]
    groups["mixed"] = many(lambda: choose(everything), 4)
    return groups


def metadata(case: str, learned: dict[str, list[str]]) -> dict[str, Any]:
    """The metadata of a case. learned: "merges" of a byte-level BPE, "pieces" of sentencepiece."""
    blanks = (
        ()
        if "Phi-3" in case or case == "gemma4"
        else ("\n\n\n",)
        if "pre" in CASES[case]
        else ("\n\n\n", "  ", "   ")
    )
    special = {**SPECIAL, **MORE, **dict.fromkeys(blanks, USER_DEFINED)}
    if "pre" in CASES[case]:
        kind, first = "gpt2", [*special, *sorted(ByteLevel.alphabet())]
        tokens = dict.fromkeys(
            [*first, *(merge.replace(" ", "") for merge in learned["merges"]), WHOLE], NORMAL
        )
        own: dict[str, Any] = {"merges": learned["merges"]}
    else:
        kind, first = "llama", [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *special]
        lines = ("\n", "\n\n", "\n\n\n") if case == "gemma4" else ()
        tokens = dict.fromkeys([*first, *lines, *learned["pieces"]], NORMAL)
        tokens |= {token: BYTE for token in tokens if token.startswith("<0x")}
        own = {"scores": [float(min(0, len(first) - i)) for i in range(len(tokens) + 2)]}
        if case == "gemma4":
            own = {"merges": _merges([*lines, *learned["pieces"]])}
    tokens |= {**special, "[PAD1]": UNUSED, "[PAD2]": UNUSED}
    values = {
        "model": kind,
        "tokens": [*tokens],
        "token_type": [*tokens.values()],
        **own,
        **{f"{name}_token_id": i for i, name in enumerate(("unknown", "bos", "eos"))},
        **CASES[case],
    }
    values = {
        key if "." in key else f"tokenizer.ggml.{key}": value for key, value in values.items()
    }
    values = {key: value for key, value in values.items() if value is not None}
    return {"general.architecture": "llama", **values}


def _merges(tokens: Sequence[str]) -> list[str]:
    """The ways to cut a token into two others, in the order of the tokens."""
    known = {*tokens}
    cuts = [(token[:i], token[i:]) for token in tokens for i in range(len(token) - 1, 0, -1)]
    return [f"{left} {right}" for left, right in cuts if left in known and right in known]


def stop_metadata(tokens: dict[str, int], named: dict[str, int]) -> dict[str, Any]:
    """A vocabulary of `STOPS`."""
    all_tokens = {
        **SPECIAL,
        **tokens,
        **dict.fromkeys(sorted(ByteLevel.alphabet()), NORMAL),
        "ab": NORMAL,
        **tokens,
    }
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*all_tokens],
        "token_type": [*all_tokens.values()],
    }
    values |= {"merges": ["a b"], **{f"{name}_token_id": number for name, number in named.items()}}
    return {
        "general.architecture": "llama",
        **{f"tokenizer.ggml.{key}": value for key, value in values.items()},
    }


def digests(tokens: Iterable[Sequence[int]]) -> dict[str, str]:
    """Two characters for the tokens of each text, and a digest of all."""
    hashes = [hashlib.sha256(array("i", ids).tobytes()).digest() for ids in tokens]
    texts = "".join(base64.b64encode(found[:3]).decode()[:2] for found in hashes)
    return {"texts": texts, "all": hashlib.sha256(b"".join(hashes)).hexdigest()}
