"""The words of other programs lead to commands and options that are there."""

from __future__ import annotations

import re

import pytest

from qsample import cli
from qsample.addons.migrate.spellings import ELSEWHERE
from qsample.cli.spellings import names_here

COMMANDS = cli.commands()
OPTIONS = {
    name for command in COMMANDS.values() for parameter in command.params for name in parameter.opts
}


WORDS = [(word, ours) for ours, words in ELSEWHERE.items() for word in words]


@pytest.mark.parametrize(("word", "ours"), WORDS, ids=range(len(WORDS)))
def test_words(word: str, ours: str) -> None:
    assert word not in COMMANDS
    assert ours in names_here(word, OPTIONS)
    assert ours in OPTIONS or {*re.findall("qsample ([a-z]+)", ours)} <= {*COMMANDS}
    assert ours in OPTIONS or {*re.findall(" (--?[a-z-]+)", ours)} <= OPTIONS


def test_an_option_that_the_command_lacks_is_not_named() -> None:
    assert names_here("--max-tokens", {"--slots"}) == []
    assert names_here("--nonsense", OPTIONS) == []
    assert "-n" not in OPTIONS
    assert names_here("-n", OPTIONS) == ["--max-new-tokens", "--num-return-sequences"]
    assert names_here("-n", OPTIONS - {"--num-return-sequences"}) == ["--max-new-tokens"]


# What users of other programs type, by the manuals of these programs.
OLLAMA = """
run → qsample chat MODEL` or `qsample generate MODEL -p TEXT
list ls ps → qsample cache list
rm → qsample cache clear
show → qsample inspect
create → qsample export` or `qsample compile
start → qsample serve
--num-ctx → --ctx-len
--num-predict → --max-new-tokens
"""
LLAMA_CPP = """
talk --chat --conversation -cnv → qsample chat MODEL` or `qsample generate MODEL -p TEXT
completion cli → qsample generate
server → qsample serve
perplexity → qsample evaluate
convert → qsample export` or `qsample compile
quantize → qsample compile MODEL OUT --weights int4
--ctx-size -c → --ctx-len
--n-predict --predict -n → --max-new-tokens
--parallel -np → --slots
--temp → --temperature
--repeat-penalty → --repetition-penalty
--repeat-last-n → --penalty-last-n
--reverse-prompt -r → --stop-string
--system-prompt -sys → --system
--file -f → --prompt-file
--chat-template-file → --chat-template
--json-schema-file -j -jf → --json-schema
--grammar-file → --grammar
--reasoning-format → --reasoning-parser
--skip-chat-template --no-conversation -no-cnv → --raw
--device --n-gpu-layers --gpu-layers -ngl → --provider
-t → --threads
"""
VLLM = """
api-server → qsample serve
complete → qsample generate
--max-model-len → --ctx-len
--max-tokens → --max-new-tokens
-n → --num-return-sequences
--max-num-seqs → --slots
--stop → --stop-string
--input-file → --prompt-file
--quantization -q → --weights
--lora-modules --enable-lora → --lora
"""
OTHERS = """
download → qsample pull
benchmark → qsample bench
eval → qsample evaluate
info → qsample inspect
remove delete → qsample cache clear
build → qsample export` or `qsample compile
--max-seq-len → --ctx-len
--ignore-chat-template → --raw
"""


@pytest.mark.parametrize(
    "line", [*f"{OLLAMA}{LLAMA_CPP}{VLLM}{OTHERS}".strip().replace("\n\n", "\n").split("\n")]
)
def test_what_users_of_other_programs_type(line: str) -> None:
    words, _, ours = line.partition(" → ")
    assert [word for word in words.split() if ours not in names_here(word, OPTIONS)] == []
