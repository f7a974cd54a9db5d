"""The cases of docs/vectors, for which `contract_vectors.py` draws the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from qsample.contract.tensors import FILTER_ORDERS, HUGGING_FACE


@dataclass(frozen=True)
class Draft:
    """A row over a few steps.

    Args:
        name: The tested behaviour.
        parameters: The parameters that are not off; without `temperature`, the row is greedy.
        prompt: Ids, or a list of ids per piece.
        orders: The filter orders, with a case for each.
        vocab: The size of the vocabulary, V.
        steps: The number of calls that emit a token.
        capacity: The capacity of the row, T.
        seed: The row's seed.
        mean: The mean of the logits.
        spread: The standard deviation of the logits.
        digits: The logits are multiples of 1 / digits: 1 gives ties.
        special: Id → its logit in each step.
        idle: Parameters that intentionally make no difference here.
        grammar_state: The row's first state in GRAMMAR_TABLES; None for a graph without grammars.
    """

    name: str
    parameters: Mapping[str, Any]
    prompt: list[Any] = field(default_factory=lambda: [3])
    orders: tuple[str, ...] = (HUGGING_FACE,)
    vocab: int = 20
    steps: int = 4
    capacity: int = 12
    seed: int = 7
    mean: float = 0.0
    spread: float = 2.0
    digits: int = 16
    special: Mapping[int, float] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    grammar_state: int | None = None


# Parameters that only configure another parameter.
SETTINGS: Final = (
    *("temperature", "logit_bias", "xtc_threshold", "dynatemp_exponent", "mirostat_eta"),
    *("dry_base", "dry_allowed_length", "adaptive_decay"),
)
_INF, _NAN = float("inf"), float("nan")
_BOTH: Final[dict[str, Any]] = {"orders": FILTER_ORDERS}
_TEXT: Final = [4, 5, 6, 4, 5, 7, 4, 5]  # its end occurred twice, followed by 6 and by 7

ADJUST: Final = [
    Draft(
        "a prompt in pieces, the first of them without a token",
        {"temperature": 1.0},
        prompt=[[3, 4, 5], [6]],
    ),
    Draft(
        "allowed_tokens",
        {
            "temperature": 1.5,
            "allowed_tokens": [0b10100110_01011001_10011100_01100110 - 2**32, 0b101],
        },
        vocab=36,
    ),
    Draft(
        "logit_bias: entries of one id add up, and -1 is none",
        {"logit_bias_ids": [9, 2, 9, -1], "logit_bias": [6.0, 2.5, 2.0, 50.0]},
    ),
    Draft(
        "a bias of minus infinity",
        {"temperature": 1.0, "logit_bias_ids": [2, 7], "logit_bias": [-_INF, 1.0]},
    ),
    Draft(
        "stop_ids end a row; nothing changes after that",
        {"stop_ids": [8, 9], "logit_bias_ids": [9], "logit_bias": [40.0]},
    ),
    Draft(
        "min_length keeps the stop away",
        {"stop_ids": [9, -1], "min_length": 4, "logit_bias_ids": [9], "logit_bias": [40.0]},
        steps=5,
    ),
    Draft("max_length", {"temperature": 1.0, "max_length": 5}, prompt=[3, 4, 5]),
    Draft("the buffer is full", {"temperature": 1.0}, capacity=4),
    Draft(
        "a prompt that fills the buffer gives one token, with the last u, and no place to keep it",
        {"temperature": 1.0},
        prompt=[3, 4, 5, 6],
        capacity=4,
        steps=2,
    ),
    Draft("a negative and a large seed", {"temperature": 1.3}, seed=-(2**62) - 3),
    Draft(
        "repetition_penalty, once an id, by the sign of the logit",
        {"temperature": 1.0, "repetition_penalty": 1.5},
        prompt=[3, 4, 4, 5, 6, 7],
    ),
    Draft(
        "a repetition_penalty below 1 rewards",
        {"temperature": 1.0, "repetition_penalty": 0.5},
        prompt=[3, 4, 5, 6],
    ),
    Draft(
        "presence_penalty: sampled tokens, not the prompt's, and each once",
        {"presence_penalty": 3.0, "logit_bias_ids": [1, 4], "logit_bias": [9.0, 9.0]},
        prompt=[1, 2, 3],
        steps=7,
    ),
    Draft("frequency_penalty", {"frequency_penalty": 0.75}, steps=8, spread=0.5),
    Draft(
        "all three penalties, a bias and a stop that is too early",
        {
            "temperature": 0.75,
            "repetition_penalty": 1.25,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
            "logit_bias_ids": [4],
            "logit_bias": [1.5],
            "stop_ids": [5],
            "min_length": 8,
        },
        prompt=[4, 5, 6],
        steps=6,
        spread=1.0,
    ),
    Draft(
        "no_repeat_ngram_size 1: no token twice",
        {"no_repeat_ngram_size": 1},
        prompt=[3, 4],
        steps=6,
    ),
    Draft(
        "no_repeat_ngram_size 3",
        {"no_repeat_ngram_size": 3, "logit_bias_ids": [6, 7], "logit_bias": [8.0, 7.0]},
        prompt=_TEXT,
        capacity=16,
    ),
    Draft(
        "bad_words_ids: a token, and two sequences",
        {
            "bad_words_ids": [[-1, -1, 9], [-1, 3, 8], [8, 2, 9], [-1, -1, -1]],
            "logit_bias_ids": [9, 8],
            "logit_bias": [9.0, 8.0],
        },
    ),
    Draft(
        "a whole row as the other tokens of a bad word",
        {"bad_words_ids": [[4, 5, 9]], "logit_bias_ids": [9], "logit_bias": [9.0]},
        prompt=[4, 5],
        steps=2,
    ),
    Draft(
        "dry",
        {"temperature": 1.0, "dry_multiplier": 0.75, "dry_base": 2.0},
        prompt=_TEXT,
        capacity=16,
    ),
    Draft(
        "dry_allowed_length 1, and the longest match of a token counts",
        {
            "dry_multiplier": 0.5,
            "dry_base": 1.75,
            "dry_allowed_length": 1,
            "logit_bias_ids": [6, 7],
            "logit_bias": [8.0, 8.0],
        },
        prompt=[5, 6, 4, 5, 6, 9, 4, 5],
        capacity=16,
        steps=5,
    ),
    Draft(
        "dry_sequence_breakers: no match goes over one, and none is penalized",
        {
            "dry_multiplier": 3.0,
            "dry_base": 1.5,
            "dry_allowed_length": 1,
            "dry_sequence_breakers": [4, 7, -1],
            "logit_bias_ids": [6, 7],
            "logit_bias": [6.0, 5.0],
        },
        prompt=_TEXT,
        capacity=16,
    ),
    Draft(
        "a breaker as the newest token: no match",
        {"dry_multiplier": 3.0, "dry_sequence_breakers": [5], "dry_allowed_length": 1},
        prompt=_TEXT,
        capacity=10,
        steps=1,
        idle=("dry_multiplier", "dry_sequence_breakers"),
    ),
    Draft(
        "dry_penalty_last_n: the match lies within as many tokens",
        {
            "dry_multiplier": 2.0,
            "dry_base": 1.25,
            "dry_allowed_length": 2,
            "dry_penalty_last_n": 5,
            "logit_bias_ids": [6, 7],
            "logit_bias": [6.0, 6.0],
        },
        prompt=_TEXT,
        capacity=16,
    ),
    Draft(
        "all bans and DRY",
        {
            "temperature": 1.25,
            "no_repeat_ngram_size": 4,  # bans 8
            "bad_words_ids": [[-1, 9], [6, 10]],
            "dry_multiplier": 1.0,  # penalizes 7
            "dry_base": 2.0,
            "repetition_penalty": 1.25,
        },
        prompt=[5, 6, 7, 4, 5, 6, 8, 4, 5, 6],
        capacity=20,
        steps=6,
        spread=1.0,
    ),
    Draft(
        "a NaN ends a row with status 3, and nothing is written",
        {"temperature": 1.0},
        special={5: _NAN},
        steps=2,
    ),
    Draft(
        "so does an infinite logit, also of a token that is not allowed",
        {"allowed_tokens": [0b11110]},
        special={5: _INF},
        steps=1,
        idle=("allowed_tokens",),
    ),
    Draft(
        "a row of NaN that is searched: a sort may put NaN behind the padding of the vocabulary",
        {"temperature": 1.0, "top_p": 0.9},
        vocab=36,
        special=dict.fromkeys(range(36), _NAN),
        steps=1,
        idle=("top_p",),
    ),
    Draft(
        "and a row without a token that is left",
        {"allowed_tokens": [0b100000]},
        special={5: -_INF},
        steps=1,
    ),
]

FILTERS: Final = [
    Draft("greedy", {}),
    Draft(
        "greedy: the lowest id of a tie, whatever the filters",
        {"typical_p": 0.2, "top_k": 3},
        digits=1,
        spread=1.0,
        idle=("typical_p", "top_k"),
    ),
    Draft("temperature 1", {"temperature": 1.0}),
    Draft("a temperature below 1", {"temperature": 0.5}),
    Draft(
        "a temperature above 1; masks are never drawn",
        {"temperature": 3.0},
        special={2: -_INF, 3: -3.3895313892515355e38},
    ),
    Draft(
        "a temperature near 0: one of the largest, at random",
        {"temperature": 1e-30},
        digits=1,
        spread=1.0,
    ),
    Draft(
        "a temperature above 1e36 counts as 1e36",
        {"temperature": 3e38},
        steps=6,
        special={2: -_INF, **dict.fromkeys(range(4, 20, 2), -(2.0**120))},
    ),
    Draft("top_k", {"temperature": 1.0, "top_k": 3}),
    Draft(
        "top_k: ties of the last are kept", {"temperature": 1.0, "top_k": 3}, digits=1, spread=1.0
    ),
    Draft("top_p", {"temperature": 1.5, "top_p": 0.7}, **_BOTH),
    Draft(
        "top_p: ties are kept or dropped together",
        {"temperature": 1.0, "top_p": 0.6},
        digits=1,
        spread=1.0,
    ),
    Draft("a small top_p keeps the largest", {"temperature": 1.0, "top_p": 0.01}),
    Draft("min_p", {"temperature": 1.5, "min_p": 0.125}, **_BOTH),
    Draft(
        "top_p after top_k, and min_p after both",
        {"temperature": 2.0, "top_k": 8, "top_p": 0.8, "min_p": 0.25},
        spread=1.0,
        **_BOTH,
    ),
    Draft("top_a", {"temperature": 1.5, "top_a": 0.5}, spread=1.0, **_BOTH),
    Draft("typical_p", {"temperature": 0.75, "typical_p": 0.5}, **_BOTH),
    Draft(
        "typical_p without the likeliest token",
        {"temperature": 1.0, "typical_p": 0.125},
        spread=1.5,
    ),
    Draft("typical_p: ties", {"temperature": 1.0, "typical_p": 0.4}, digits=1, spread=1.0),
    Draft("typical_p and top_p", {"temperature": 1.0, "typical_p": 0.75, "top_p": 0.75}, **_BOTH),
    Draft("epsilon_cutoff", {"temperature": 1.25, "epsilon_cutoff": 0.04}, **_BOTH),
    Draft(
        "an epsilon_cutoff above every p keeps the largest",
        {"temperature": 1.0, "epsilon_cutoff": 0.9},
        spread=1.0,
    ),
    Draft("eta_cutoff, by the entropy", {"temperature": 1.25, "eta_cutoff": 0.125}, **_BOTH),
    Draft("eta_cutoff, by eta", {"temperature": 1.0, "eta_cutoff": 0.01}, spread=4.0),
    Draft("top_n_sigma", {"temperature": 1.5, "top_n_sigma": 1.0}, special={6: -_INF}, **_BOTH),
    Draft(
        "xtc, in half of the steps",
        {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.0625},
        steps=6,
    ),
    Draft(
        "xtc at another temperature",
        {"temperature": 2.0, "xtc_probability": 1.0, "xtc_threshold": 0.1},
        **_BOTH,
    ),
    Draft(
        "xtc: the least likely of the likely ones, with its ties",
        {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.05},
        digits=1,
        spread=1.0,
    ),
    Draft(
        "an xtc_threshold above 0.5 does nothing",
        {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.6},
        idle=("xtc_probability",),
    ),
    Draft("dynatemp", {"temperature": 1.0, "dynatemp_range": 0.5}, **_BOTH),
    Draft(
        "dynatemp down to 0, with an exponent",
        {"temperature": 1.0, "dynatemp_range": 3.0, "dynatemp_exponent": 2.0},
        **_BOTH,
    ),
    Draft(
        "dynatemp after filters",
        {"temperature": 0.75, "dynatemp_range": 0.5, "top_n_sigma": 1.5, "top_k": 6},
        **_BOTH,
    ),
    Draft(
        "dynatemp leaves a single token as it is",
        {"temperature": 1.0, "dynatemp_range": 0.5, "top_n_sigma": 0.01},
        steps=2,
        idle=("dynatemp_range",),
    ),
    Draft(
        "mirostat: mu begins at twice tau",
        {"temperature": 1.0, "mirostat_tau": 1.5, "mirostat_eta": 0.25},
        steps=6,
    ),
    Draft(
        "greedy: mirostat leaves mu as it is",
        {"mirostat_tau": 1.5},
        steps=2,
        idle=("mirostat_tau",),
    ),
    Draft(
        "mirostat after other filters",
        {
            "temperature": 1.25,
            "mirostat_tau": 1.5,
            "mirostat_eta": 0.5,
            "top_k": 8,
            "min_p": 0.0625,
        },
        steps=5,
        **_BOTH,
    ),
    Draft(
        "every filter",
        {
            "temperature": 1.5,
            "top_n_sigma": 2.5,
            "top_k": 16,
            "top_p": 0.95,
            "min_p": 0.01,
            "top_a": 0.03,
            "typical_p": 0.95,
            "epsilon_cutoff": 0.02,
            "eta_cutoff": 0.02,
            "xtc_probability": 0.5,
            "xtc_threshold": 0.1,
            "dynatemp_range": 0.5,
            "mirostat_tau": 2.0,
        },
        vocab=24,
        steps=5,
        spread=1.0,
        idle=(
            "top_k",
            "top_p",
            "min_p",
            "top_a",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
            "top_n_sigma",
            "mirostat_tau",
        ),
        **_BOTH,
    ),
]

# The newest tokens of a row: the penalties that count no others, and adaptive-p, which follows their probabilities.
RECENT: Final = [
    Draft(
        "penalty_last_n: the newest 3 tokens, the prompt's included, for all three penalties",
        {
            "temperature": 1.0,
            "penalty_last_n": 3,
            "repetition_penalty": 1.5,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.25,
        },
        prompt=[6, 7, 4, 5, 5, 6],
        capacity=16,
        steps=6,
        spread=1.0,
    ),
    Draft(
        "penalty_last_n over pieces of a prompt",
        {"penalty_last_n": 4, "frequency_penalty": 1.5},
        prompt=[[3, 4, 5], [4, 4], [6]],
        spread=1.0,
    ),
    Draft(
        "penalty_last_n beyond the row: all its tokens",
        {"penalty_last_n": 2**31 - 1, "presence_penalty": 2.0},
        prompt=[3, 4, 5, 6, 3],
    ),
    Draft(
        "penalty_last_n 0 switches the penalties off",
        {
            "temperature": 1.0,
            "penalty_last_n": 0,
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.5,
        },
        prompt=[3, 4, 5, 6],
        idle=("repetition_penalty", "frequency_penalty"),
    ),
    Draft(
        "adaptive_p",
        {"temperature": 1.0, "adaptive_target": 0.25, "adaptive_decay": 0.5},
        steps=6,
        **_BOTH,
    ),
    Draft(
        "adaptive_p after other filters",
        {
            "temperature": 1.5,
            "adaptive_target": 0.5,
            "adaptive_decay": 0.75,
            "min_p": 0.125,
            "top_k": 8,
        },
        steps=6,
        **_BOTH,
    ),
    Draft(
        "adaptive_p aims at no probability below 0",
        {"temperature": 1.0, "adaptive_target": 0.0625, "adaptive_decay": 0.0, "top_k": 3},
        steps=6,
    ),
    Draft(
        "adaptive_p draws tokens whose probability rounds to 0",
        {"temperature": 0.0078125, "adaptive_target": 0.25, "top_k": 4},
        steps=4,
    ),
    Draft(
        "greedy: adaptive_p leaves its state as it is",
        {"adaptive_target": 0.5},
        steps=2,
        idle=("adaptive_target",),
    ),
    Draft(
        "adaptive_p and mirostat, which reads the probability before it",
        {"temperature": 1.0, "adaptive_target": 0.25, "mirostat_tau": 1.5, "mirostat_eta": 0.25},
        steps=6,
    ),
]

# More tokens than a small top_k keeps. A captured graph has to search all rows but those with a top_k of 1 to 64.
WIDE: Final = [
    Draft(name, {"temperature": 1.0, **parameters}, vocab=100, steps=3, **options)
    for name, parameters, options in (
        (
            "a top_k of 64 or less keeps 64 tokens: of ties those of lowest id",
            {"top_k": 5},
            {"digits": 1, "spread": 0.25},
        ),
        ("the same at 64", {"top_k": 64}, {"digits": 2, "spread": 0.5}),
        ("a larger top_k keeps all ties", {"top_k": 65}, {"digits": 2, "spread": 0.5}),
        (
            "top_p after a small top_k with many ties",
            {"top_k": 60, "top_p": 0.6},
            {"digits": 2, "spread": 0.5},
        ),
        ("a wide top_p", {"top_p": 0.95}, {"spread": 0.5}),
        (
            "a wide top_p after a large top_k",
            {"top_k": 80, "top_p": 0.9, "temperature": 1.5},
            {"spread": 1.0, **_BOTH},
        ),
        ("a wide typical_p", {"typical_p": 0.9, "temperature": 1.5}, {"spread": 0.5, **_BOTH}),
        (
            "min_p over many tokens, all logits negative",
            {"min_p": 0.2},
            {"mean": -40.0, "spread": 0.5},
        ),
        ("xtc over many tokens", {"xtc_probability": 1.0, "xtc_threshold": 0.01}, {"spread": 0.5}),
        ("no filter", {}, {"spread": 0.5}),
    )
]

# Rows that share calls, of the bundled model over an int8 cache, and the pieces of their prompts: the tokens that each
# row reads in each of the first calls.
WAITING: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    (
        "And the LORD spake unto Moses, saying, Speak unto Aaron, and say unto him, And the LORD spake unto",
        {"prompt_lookup_num_tokens": 4, "max_length": 40},
    ),
    (
        "In the beginning God created the heaven and the earth. In the beginning God",
        {"max_length": 48},
    ),
    (
        "Thus saith the LORD of hosts, the God of Israel; Thus saith the LORD",
        {"prompt_lookup_num_tokens": 4, "max_length": 48},
    ),
    (
        "And the LORD spake unto Moses, saying, Speak unto the children of Israel, and say unto them, I am the LORD "
        "your God. And the LORD spake unto Moses, saying, Speak unto the children of Israel",
        {"max_length": 48},
    ),
)
PIECES: Final = ((25, 0, 10, 5), (0, 21, 0, 20), (1, 1, 7, 21))

# Of the bundled model.
PROMPTS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("In the beginning", {}),
    ("And the LORD spake unto", {"temperature": 0.7, "top_p": 0.9}),
    ("Blessed are", {"temperature": 1.0, "top_k": 20, "min_p": 0.02}),
    (
        "Now these are the names of the children of Israel, which came into Egypt;",
        {"temperature": 1.0, "top_k": 100},
    ),
    (
        "The words of",
        {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.25, "frequency_penalty": 0.5},
    ),
    (
        "He that",
        {"temperature": 0.8, "presence_penalty": 0.75, "min_length": 16, "stop_ids": [1, 16]},
    ),
)

# Prompts with images: numbers of text tokens, and rows and columns of the placeholders of an image.
IMAGES: Final = (
    (4,),
    (3, (2, 3), 4),
    (1, (4, 2), 2, (1, 5), 3),
    ((3, 3), 1, (2, 2)),
    (2, (1, 1), 1, (1, 4), 1, (4, 1), 2),
)

# Two grammars over 20 tokens, with a map each. Token 15 is the stop token of the cases.
# Grammar 1, states 1 to 5: a or b, then b's up to two, then c. Grammar 2, states 6 to 9: any of its tokens until
# d, then e; its first state is of thoughts, and state 8 takes its place when it is late.
_CLASSES_OF_TOKENS: Final = [
    [0, 1, 1, 2, 2, 2, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 3, 1, 1, 1, 1, 1, 0, 0, 0, 0],
]
GRAMMAR_TABLES: Final[dict[str, Any]] = {
    "grammar_classes": _CLASSES_OF_TOKENS,
    "grammar_transitions": [
        [0, 0, 0, 0],
        [-1, 2, 2, -1],
        [-1, -1, 3, 5],
        [-1, -1, 4, 5],
        [-1, -1, -1, 5],
        [-1, -1, -1, -1],
        [-1, 6, 7, -1],
        [-1, -1, -1, 9],
        [-1, -1, 7, -1],
        [-1, -1, -1, 9],
    ],
    "grammar_distances": [0, 3, 2, 2, 2, 1, 3, 2, 3, 1],
    "grammar_maps": [0, 0, 0, 0, 0, 0, 1, 1, 1, 1],
    "grammar_late": [0, 1, 2, 3, 4, 5, 8, 7, 8, 9],
}
_STOP: Final[dict[str, Any]] = {"stop_ids": [15]}
GRAMMARS: Final = [
    Draft(
        "a row without a grammar",
        {"temperature": 1.0, **_STOP},
        grammar_state=0,
        idle=("stop_ids",),
    ),
    Draft(
        "tokens that a state allows, and the state after each",
        {"temperature": 2.0, **_STOP},
        grammar_state=1,
        steps=6,
    ),
    Draft("a greedy row", {**_STOP}, grammar_state=1, steps=6),
    Draft(
        "a stop token only where the answer may end, although it is the likeliest",
        {"logit_bias_ids": [15], "logit_bias": [40.0], **_STOP},
        grammar_state=1,
        steps=6,
        idle=("logit_bias_ids",),
    ),
    Draft(
        "several stop tokens, one of which the tables allow as text",
        {"temperature": 2.0, "stop_ids": [15, 3, -1]},
        grammar_state=1,
        steps=6,
    ),
    Draft(
        "max_length leaves room for the shortest answer only",
        {"temperature": 2.0, "max_length": 4, **_STOP},
        grammar_state=1,
    ),
    Draft(
        "the capacity leaves room for the shortest answer only",
        {"temperature": 2.0, **_STOP},
        grammar_state=1,
        capacity=4,
    ),
    Draft(
        "thoughts without a deadline end in time for max_length",
        {"temperature": 2.0, "max_length": 8, **_STOP},
        grammar_state=6,
        steps=8,
    ),
    Draft(
        "a deadline",
        {"temperature": 2.0, "grammar_deadline": 4, **_STOP},
        grammar_state=6,
        steps=9,
    ),
    Draft(
        "a deadline before the first token",
        {"temperature": 2.0, "grammar_deadline": 0, **_STOP},
        grammar_state=6,
        steps=6,
    ),
    Draft(
        "a grammar, a mask, a bias and penalties",
        {
            "temperature": 2.0,
            "allowed_tokens": [0b1111_0101_0110_1111],
            "logit_bias_ids": [6],
            "logit_bias": [1.5],
            "repetition_penalty": 1.5,
            "frequency_penalty": 0.5,
            **_STOP,
        },
        grammar_state=6,
        steps=9,
    ),
    Draft(
        "a mask that leaves no token",
        {"temperature": 1.0, "allowed_tokens": [0b1000_0000_0000_0001], **_STOP},
        grammar_state=1,
        steps=1,
        idle=("stop_ids",),
    ),
    Draft(
        "invalid logits of a token that the grammar forbids",
        {"temperature": 1.0, **_STOP},
        grammar_state=1,
        steps=1,
        special={12: _NAN},
        idle=("stop_ids",),
    ),
    Draft(
        "a prompt in pieces",
        {"temperature": 2.0, **_STOP},
        prompt=[[3, 4], [5]],
        grammar_state=6,
        steps=9,
    ),
]
