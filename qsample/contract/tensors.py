"""The decode contract in code: every input, state and output of the graphs, with dtype and named
axes.

The exporter, the runtime, the manifest, `qsample inspect`, the docs and the tests take all names,
dtypes and shapes from here. `docs/contract.md` defines the exact semantics of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# A package follows the oldest version that has all its features. Each version adds to the one
# before.
CONTRACT_VERSION: Final = "2.0"
# Packages with num_speculative_tokens or adapters follow this version.
STEPS_VERSION: Final = "2.1"
# Older versions of ONNX Runtime cannot run such packages.
STEPS_ONNXRUNTIME: Final = "1.32"
# Packages that read images follow this version.
IMAGES_VERSION: Final = "2.2"
# Packages with caches of a window's size or in int4 follow this version.
CACHES_VERSION: Final = "2.3"
# Packages that take grammars follow this version.
GRAMMARS_VERSION: Final = "2.4"
# Packages whose decode graph can be captured and replayed follow this version.
REPLAY_VERSION: Final = "2.5"
# This qsample runs packages of these versions.
CONTRACT_VERSIONS: Final = (
    CONTRACT_VERSION,
    STEPS_VERSION,
    IMAGES_VERSION,
    CACHES_VERSION,
    GRAMMARS_VERSION,
    REPLAY_VERSION,
)
# A word x of Philox becomes u = (x >> 8) * 2**-24, in [0, 1).
PHILOX_UNIFORM_SCALE: Final = 2.0**-24
# The second word of Philox's counter for the states `noise` and `xtc_noise`.
NOISE_STREAM: Final = 0
XTC_STREAM: Final = 1

# The values of the retained state `status`.
RUNNING: Final = 0
# A stop token was sampled.
STOPPED: Final = 1
# The row has max_length tokens, or the buffers are full.
LENGTH: Final = 2
# A logit is NaN or +inf, or no logit is finite after the masks.
INVALID_LOGITS: Final = 3
STATUS_NAMES: Final = {
    RUNNING: "running",
    STOPPED: "stop",
    LENGTH: "length",
    INVALID_LOGITS: "invalid",
}

# The named axes. An axis of a TensorSpec is one of these names or a fixed size; AXIS_MEANINGS
# describes them.
BATCH: Final = "B"
SEQUENCE: Final = "S"
CAPACITY: Final = "T"
VOCAB: Final = "V"
STOPS: Final = "E"
BIASES: Final = "N"
MASK_WORDS: Final = "W"
TOP_LOGPROBS: Final = "M"
SEARCHED: Final = "R"
PROCESSED: Final = "R.processed"
BEYOND_CANDIDATES: Final = "R.vocabulary"
BREAKERS: Final = "D"
BAD_WORDS: Final = "Q"
BAD_WORD_LENGTH: Final = "L"
# The layers of each kind have a separate axis, such as `P.q_proj`.
ADAPTER_RANKS: Final = "P"
GUESSES: Final = "G"
NEW_TOKENS: Final = "J"
IMAGE_TOKENS: Final = "F"
TILES: Final = "I"
PATCHES: Final = "A"
GRAMMAR_STATES: Final = "X"
TOKEN_CLASSES: Final = "Y"
CLASS_MAPS: Final = "Z"
SCORED: Final = "U"
HEIGHT: Final = "tile_height"
WIDTH: Final = "tile_width"
# The axes of the tables of grammars.
GRAMMAR_AXES: Final = (GRAMMAR_STATES, TOKEN_CLASSES, CLASS_MAPS)
# A host chooses the sizes of these axes; the size is 1 for a value that is off.
HOST_AXES: Final = (
    STOPS,
    BIASES,
    BREAKERS,
    BAD_WORDS,
    BAD_WORD_LENGTH,
    IMAGE_TOKENS,
    *GRAMMAR_AXES,
)
AXIS_MEANINGS: Final = {
    BATCH: "rows (batch)",
    SEQUENCE: "new tokens per row",
    CAPACITY: "capacity (context length) of the state buffers",
    VOCAB: "vocabulary size",
    STOPS: "stop ids per row",
    BIASES: "logit-bias entries per row",
    MASK_WORDS: "32-token words of the vocabulary bitmask, ceil(V / 32)",
    TOP_LOGPROBS: "reported alternatives per row",
    SEARCHED: "rows that a captured graph searches, none or more; `R.processed` and `R.vocabulary` "
    "are 0 or B",
    BREAKERS: "DRY sequence breakers per row",
    BAD_WORDS: "forbidden sequences per row",
    BAD_WORD_LENGTH: "tokens of the longest forbidden sequence",
    GUESSES: "guesses per row and step, at most",
    ADAPTER_RANKS: "ranks of all bound LoRA adapters; `P.q_proj` in the layers called q_proj",
    NEW_TOKENS: "new tokens per row and step, at most: G + 1",
    IMAGE_TOKENS: "rows of image features in a call, or of an image",
    TILES: "tiles of an image",
    PATCHES: "patches of an image",
    GRAMMAR_STATES: "states of all bound grammars",
    TOKEN_CLASSES: "token classes of the bound grammar that has most",
    CLASS_MAPS: "maps from tokens to classes, one for each bound grammar",
    SCORED: "tokens of prompts that a call scores, none or more",
}

# A top_k up to this number keeps at most this many tokens, ties included, and needs no search.
CANDIDATES: Final = 64
# The largest number of tokens that a step may guess for a row.
MOST_SPECULATIVE_TOKENS: Final = 64
# DRY and no_repeat_ngram_size compare up to this many tokens of a row's end with its past.
LONGEST_MATCH: Final = 64
# The temperature comes first, then the filters.
HUGGING_FACE: Final = "huggingface"
# The filters come first, the temperature last.
LLAMA_CPP: Final = "llama.cpp"
FILTER_ORDERS: Final = (HUGGING_FACE, LLAMA_CPP)
# Log-probabilities of the model's own logits.
RAW_LOGPROBS: Final = "raw_logprobs"
# Log-probabilities of the distribution that the token is drawn from.
PROCESSED_LOGPROBS: Final = "processed_logprobs"
LOGPROBS_MODES: Final = (RAW_LOGPROBS, PROCESSED_LOGPROBS)
# The padding of stop_ids and logit_bias_ids.
PAD_STOP_ID: Final = -1
MODEL_DTYPES: Final = ("float32", "float16", "bfloat16")
KV_CACHE_DTYPES: Final = (*MODEL_DTYPES, "int8", "int4")
# The numbers of quantized weights that share a scale.
BLOCK_SIZES: Final = (16, 32, 64, 128, 256)

Axis = str | int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input, a state or an output.

    Attributes:
        name: Its name in the graph.
        dtype: Its dtype, a key of `arrays.DTYPES`.
        axes: Its axes: names or fixed sizes.
        meaning: A description for the documents.
        off: The value that switches a sampling parameter off; None for anything else.
        read_only: Whether no step changes a state; such a state has no `_RetainedState` output.
    """

    name: str
    dtype: str
    axes: tuple[Axis, ...]
    meaning: str
    off: float | None = None
    read_only: bool = False

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The concrete shape. sizes: The size of each named axis; KeyError names an axis that is
        missing."""
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)


def retained_name(state: str) -> str:
    """The name of the output with the next value of a state.

    It is `present.{i}.key` for `past_key_values.{i}.key`, and `NAME_RetainedState` for other
    states.
    """
    prefix = "past_key_values."
    if state.startswith(prefix):
        return "present." + state.removeprefix(prefix)
    return f"{state}_RetainedState"


INPUT_IDS = TensorSpec(
    "input_ids", "int64", (BATCH, SEQUENCE), "new tokens, right-padded: a prompt chunk, or next_ids"
)
INPUT_LENGTHS = TensorSpec("input_lengths", "int32", (BATCH,), "how many of the S are real, 1..S")
EMIT = TensorSpec(
    "emit", "bool", (BATCH,), "true: sample a token after these inputs; false: only consume them"
)
LOGITS = TensorSpec(
    "logits", "float32", (BATCH, VOCAB), "scores of the token after the last real one"
)
ADJUSTED_LOGITS = TensorSpec(
    "adjusted_logits",
    "float32",
    (BATCH, VOCAB),
    "logits after masks, biases and penalties; may share logits' buffer",
)
# Inside a graph that scores prompts.
ALL_LOGITS = TensorSpec(
    "all_logits", "float32", (f"{BATCH} + {SCORED}", VOCAB), "logits of rows, then those to score"
)
# Inputs of packages that read images; see `interface.ImageShape`.
IMAGE_ROWS = TensorSpec(
    "image_rows",
    "int32",
    (BATCH, SEQUENCE),
    "row of image_features in place of the id's embedding; -1 = none",
    off=-1,
)
POSITION_OFFSETS = TensorSpec(
    "position_offsets",
    "int32",
    (BATCH, SEQUENCE, 3),
    "added to a token's position: time, height, width",
    off=0,
)
# The output of vision.onnx, and an input of the decoder.
IMAGE_FEATURES: Final = "image_features"
PIXEL_VALUES: Final = "pixel_values"
GRID = TensorSpec("grid", "int64", (2,), "rows and columns of patches of the image")
NEXT_IDS = TensorSpec(
    "next_ids", "int64", (BATCH, 1), "the sampled token; the pad id for a row that emitted nothing"
)

PARAMETERS: Final = (
    TensorSpec("temperature", "float32", (BATCH,), "0 = greedy", off=1.0),
    TensorSpec("top_k", "int32", (BATCH,), "keep the k most likely tokens; 0 = off", off=0),
    TensorSpec(
        "top_p",
        "float32",
        (BATCH,),
        "keep a token if likelier tokens have a mass below p; 1 = off",
        off=1.0,
    ),
    TensorSpec("min_p", "float32", (BATCH,), "keep p >= min_p * p_max; 0 = off", off=0.0),
    TensorSpec(
        "repetition_penalty", "float32", (BATCH,), "on prompt and sampled tokens; 1 = off", off=1.0
    ),
    TensorSpec("presence_penalty", "float32", (BATCH,), "on sampled tokens; 0 = off", off=0.0),
    TensorSpec(
        "frequency_penalty",
        "float32",
        (BATCH,),
        "on sampled tokens, per occurrence; 0 = off",
        off=0.0,
    ),
    TensorSpec(
        "min_length",
        "int32",
        (BATCH,),
        "no stop token before this many tokens, prompt included",
        off=0,
    ),
    TensorSpec(
        "max_length", "int32", (BATCH,), "stop at this many tokens, prompt included", off=2**31 - 1
    ),
    TensorSpec(
        "stop_ids",
        "int32",
        (BATCH, STOPS),
        "tokens that end a row, padded with -1",
        off=PAD_STOP_ID,
    ),
)
LOGIT_BIAS_INPUTS: Final = (
    TensorSpec(
        "logit_bias_ids",
        "int32",
        (BATCH, BIASES),
        "tokens to bias, padded with -1",
        off=PAD_STOP_ID,
    ),
    TensorSpec(
        "logit_bias", "float32", (BATCH, BIASES), "added to the logits of logit_bias_ids", off=0.0
    ),
)
ALLOWED_TOKENS = TensorSpec(
    "allowed_tokens",
    "int32",
    (BATCH, MASK_WORDS),
    "bit i of word w: token 32 w + i may be sampled",
    off=-1,
)
# Inputs of packages with `Features.grammars`. The tables are of all grammars that are bound.
GRAMMAR_DEADLINE = TensorSpec(
    "grammar_deadline",
    "int32",
    (BATCH,),
    "from this many tokens on, prompt included, grammar_late replaces the state",
    off=2**31 - 1,
)
GRAMMAR_CLASSES = TensorSpec(
    "grammar_classes", "int32", (CLASS_MAPS, VOCAB), "class of each token", off=0
)
GRAMMAR_TRANSITIONS = TensorSpec(
    "grammar_transitions",
    "int32",
    (GRAMMAR_STATES, TOKEN_CLASSES),
    "the next state, by state and class; -1 = not allowed",
    off=0,
)
GRAMMAR_DISTANCES = TensorSpec(
    "grammar_distances",
    "int32",
    (GRAMMAR_STATES,),
    "fewest tokens from a state to the end of the answer, its stop token included",
    off=0,
)
GRAMMAR_MAPS = TensorSpec(
    "grammar_maps", "int32", (GRAMMAR_STATES,), "row of grammar_classes that a state uses", off=0
)
GRAMMAR_LATE = TensorSpec(
    "grammar_late",
    "int32",
    (GRAMMAR_STATES,),
    "state that replaces a state from grammar_deadline on",
    off=0,
)
# An input of packages that have `Features.num_speculative_tokens` as well.
GRAMMAR_DRAFTS = TensorSpec(
    "grammar_drafts",
    "int32",
    (GRAMMAR_STATES,),
    "guess of the next token in a state; -1 = none",
    off=-1,
)
GRAMMAR_TABLES: Final = (
    GRAMMAR_CLASSES,
    GRAMMAR_TRANSITIONS,
    GRAMMAR_DISTANCES,
    GRAMMAR_MAPS,
    GRAMMAR_LATE,
)
# Inputs and outputs of packages with `Features.num_speculative_tokens`.
PROMPT_LOOKUP = TensorSpec(
    "prompt_lookup_num_tokens",
    "int32",
    (BATCH,),
    "guesses by looking the text up, at most; 0 = off",
    off=0,
)
DRAFT_IDS = TensorSpec(
    "draft_ids",
    "int32",
    (BATCH, GUESSES),
    "a host's own guesses of the next tokens, -1 after them",
    off=-1,
)
SPECULATION_INPUTS: Final = (PROMPT_LOOKUP, DRAFT_IDS)
NEW_IDS = TensorSpec(
    "new_ids", "int64", (BATCH, NEW_TOKENS), "the sampled tokens in order, then the pad id"
)
NUM_NEW = TensorSpec(
    "num_new", "int32", (BATCH,), "how many they are; 0 for a row that emitted nothing"
)
NUM_DRAFT_TOKENS = TensorSpec(
    "num_draft_tokens", "int32", (BATCH,), "guesses that were checked for them"
)
# Graphs that pad the rows of their products have this initializer, which hosts may replace.
ROW_MULTIPLE = TensorSpec(
    "row_multiple", "int64", (), "products get a number of rows that it divides; 1 or 2"
)
# An input of packages with `Features.max_loras`; `interface.AdapterTarget` has the tensors of each
# adapted layer.
ADAPTER = TensorSpec(
    "adapter", "int32", (BATCH,), "the LoRA adapter of the row, by its number; 0 = none", off=0
)
PROCESSED_ROWS = TensorSpec(
    "processed_rows",
    "int64",
    (PROCESSED,),
    "0, 1, … B-1 if a row needs more than the largest of the model's logits; otherwise empty",
)
VOCABULARY_ROWS = TensorSpec(
    "vocabulary_rows",
    "int64",
    (BEYOND_CANDIDATES,),
    "0, 1, … B-1 if a row may draw a token beyond the 64 likeliest; otherwise empty",
)
SEARCHED_ROWS = TensorSpec(
    "searched_rows",
    "int64",
    (SEARCHED,),
    "rows, 0..B-1, whose filters need a search of the vocabulary",
)
# The inputs of a captured graph that say how much of it a step needs, the first part first.
REPLAY_ROWS: Final = (PROCESSED_ROWS, VOCABULARY_ROWS, SEARCHED_ROWS)


def _per_row(name: str, dtype: str, off: float, meaning: str) -> TensorSpec:
    return TensorSpec(name, dtype, (BATCH,), meaning, off=off)


# The filters that `Features.filters` may name, each with its inputs. The value `off` of the first
# input switches the filter off; `off` of the other inputs is the usual value.
EXTRA_PARAMETERS: Final[dict[str, tuple[TensorSpec, ...]]] = {
    "typical_p": (
        _per_row(
            "typical_p", "float32", 1.0, "keep the most typical tokens with this mass; 1 = off"
        ),
    ),
    "top_a": (_per_row("top_a", "float32", 0.0, "keep p >= top_a * p_max ** 2; 0 = off"),),
    "epsilon_cutoff": (_per_row("epsilon_cutoff", "float32", 0.0, "keep p >= epsilon; 0 = off"),),
    "eta_cutoff": (
        _per_row(
            "eta_cutoff", "float32", 0.0, "keep p >= min(eta, sqrt(eta) exp(-entropy)); 0 = off"
        ),
    ),
    "top_n_sigma": (
        _per_row(
            "top_n_sigma", "float32", 0.0, "keep logits within n sigma of the largest; 0 = off"
        ),
    ),
    "xtc": (
        _per_row(
            "xtc_probability", "float32", 0.0, "how often XTC drops the likeliest tokens; 0 = off"
        ),
        _per_row(
            "xtc_threshold",
            "float32",
            0.1,
            "of the tokens with at least this p, XTC keeps the least likely",
        ),
    ),
    "dry": (
        _per_row("dry_multiplier", "float32", 0.0, "strength of the DRY penalty; 0 = off"),
        _per_row(
            "dry_base", "float32", 1.75, "its growth per repeated token beyond dry_allowed_length"
        ),
        _per_row(
            "dry_allowed_length",
            "int32",
            2,
            "a repetition this long is penalized by dry_multiplier",
        ),
        _per_row(
            "dry_penalty_last_n",
            "int32",
            -1,
            "tokens that DRY looks back; -1 = all of them, 0 = off",
        ),
        TensorSpec(
            "dry_sequence_breakers",
            "int32",
            (BATCH, BREAKERS),
            "ids that end a repetition, padded with -1",
            off=-1,
        ),
    ),
    "penalty_last_n": (
        _per_row(
            "penalty_last_n",
            "int32",
            -1,
            "newest tokens, prompt included, that the penalties count; -1 = off",
        ),
    ),
    "no_repeat_ngram_size": (
        _per_row(
            "no_repeat_ngram_size", "int32", 0, "no n-gram of this size occurs twice; 0 = off"
        ),
    ),
    "bad_words_ids": (
        TensorSpec(
            "bad_words_ids",
            "int32",
            (BATCH, BAD_WORDS, BAD_WORD_LENGTH),
            "sequences that may not be completed, each padded with -1 at its beginning",
            off=-1,
        ),
    ),
    "dynatemp": (
        _per_row(
            "dynatemp_range",
            "float32",
            0.0,
            "temperature varies by this much with the entropy; 0 = off",
        ),
        _per_row("dynatemp_exponent", "float32", 1.0, "of the normalized entropy"),
    ),
    "mirostat": (
        _per_row("mirostat_tau", "float32", 0.0, "Mirostat 2.0: target surprise in bits; 0 = off"),
        _per_row("mirostat_eta", "float32", 0.1, "its learning rate"),
    ),
    "adaptive_p": (
        _per_row(
            "adaptive_target",
            "float32",
            -1.0,
            "adaptive-p: favour tokens near this probability; negative = off",
        ),
        _per_row(
            "adaptive_decay",
            "float32",
            0.9,
            "share of its memory that each token leaves, up to 0.99",
        ),
    ),
}

LENGTHS = TensorSpec("lengths", "int32", (BATCH,), "tokens whose keys and values are in the cache")
STATUS = TensorSpec(
    "status", "int32", (BATCH,), "0 running, 1 stop token, 2 length, 3 invalid logits"
)
TOKENS = TensorSpec(
    "tokens",
    "int32",
    (BATCH, CAPACITY),
    "prompt, then sampled tokens; the unused tail repeats a token of the row, the first except in "
    "graphs for replay",
)
OUTPUT_COUNTS = TensorSpec(
    "output_counts", "float32", (BATCH, VOCAB), "how often each token was sampled"
)
NOISE = TensorSpec(
    "noise",
    "float32",
    (BATCH, CAPACITY),
    "the uniform u[t] that decides the token at position t",
    read_only=True,
)
XTC_NOISE = TensorSpec(
    "xtc_noise",
    "float32",
    (BATCH, CAPACITY),
    "the uniform that decides whether XTC applies at position t",
    read_only=True,
)
MIROSTAT_MU = TensorSpec(
    "mirostat_mu", "float32", (BATCH,), "Mirostat's largest surprise in bits; 0 = 2 mirostat_tau"
)
ADAPTIVE_ERROR = TensorSpec(
    "adaptive_error",
    "float32",
    (BATCH,),
    "mean probability of the row's tokens less adaptive_target",
)
GRAMMAR_STATE = TensorSpec(
    "grammar_state", "int32", (BATCH,), "the row's state in grammar_transitions; 0 = no grammar"
)
# The states that a filter keeps.
FILTER_STATES: Final = {"xtc": XTC_NOISE, "mirostat": MIROSTAT_MU, "adaptive_p": ADAPTIVE_ERROR}
# The state of these filters changes with each token, so rows that use one guess nothing.
STATEFUL_FILTERS: Final = ("mirostat", "adaptive_p")
NOISE_STREAMS: Final = {NOISE.name: NOISE_STREAM, XTC_NOISE.name: XTC_STREAM}
SAMPLER_STATES: Final = (LENGTHS, STATUS, TOKENS, OUTPUT_COUNTS, NOISE)

SEED = TensorSpec("seed", "int64", (BATCH,), "Philox key of each row's noise")
CAPACITY_INPUT = TensorSpec("capacity", "int64", (), "context length T to allocate")

LOGPROBS = TensorSpec("logprobs", "float32", (BATCH, 1), "log-probability of next_ids")
TOP_LOGPROB_OUTPUTS: Final = (
    TensorSpec(
        "top_logprob_ids", "int32", (BATCH, TOP_LOGPROBS), "the M likeliest tokens, likeliest first"
    ),
    TensorSpec("top_logprobs", "float32", (BATCH, TOP_LOGPROBS), "their log-probabilities"),
)
# The same outputs for every new token, in packages with `Features.num_speculative_tokens`.
NEW_LOGPROBS = TensorSpec(
    "logprobs", "float32", (BATCH, NEW_TOKENS), "log-probabilities of new_ids"
)
NEW_TOP_LOGPROB_OUTPUTS: Final = (
    TensorSpec(
        "top_logprob_ids",
        "int32",
        (BATCH, NEW_TOKENS, TOP_LOGPROBS),
        "the M likeliest tokens, likeliest first",
    ),
    TensorSpec(
        "top_logprobs", "float32", (BATCH, NEW_TOKENS, TOP_LOGPROBS), "their log-probabilities"
    ),
)
PROBS = TensorSpec(
    "probs", "float32", (BATCH, VOCAB), "the distribution that next_ids was sampled from"
)
# Initializers of graphs with `Features.prompt_logprobs`, without elements, that a call may replace.
SCORED_PLACES = TensorSpec(
    "scored_places",
    "int32",
    (SCORED,),
    "places in input_ids, counted row by row: r S + s is token s of row r",
)
SCORED_IDS = TensorSpec("scored_ids", "int32", (SCORED,), "the token that is scored after each")
# The outputs of such calls.
PROMPT_LOGPROBS = TensorSpec(
    "prompt_logprobs", "float32", (SCORED, 1), "log-probability of scored_ids"
)
PROMPT_RANKS = TensorSpec(
    "prompt_ranks", "int32", (SCORED, 1), "1 + the number of tokens with a larger logit"
)
PROMPT_TOP_LOGPROB_OUTPUTS: Final = (
    TensorSpec(
        "prompt_top_logprob_ids",
        "int32",
        (SCORED, TOP_LOGPROBS),
        "the M likeliest tokens there, likeliest first",
    ),
    TensorSpec("prompt_top_logprobs", "float32", (SCORED, TOP_LOGPROBS), "their log-probabilities"),
)
