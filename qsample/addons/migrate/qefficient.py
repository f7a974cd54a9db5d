"""Arguments under QEfficient's names (quic/efficient-transformers) → qsample's arguments of the same meaning.

docs/qefficient.md is the page for users.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from qsample.checks import check_count, is_integer, refuse
from qsample.contract.arrays import Array
from qsample.contract.interface import Features
from qsample.errors import shown, unknown
from qsample.models.dialects import Dialect, GenerateArguments
from qsample.request.refusals import Refusal, refusals, without_refused
from qsample.request.sampling_params import NUM_SEEDS, SAMPLING_FIELDS, SamplingParams

# A key of `qaic_config` → the field of `Features` with the same meaning.
_FIELD_OF_KEY: Final = {
    "include_sampler": "sampler",
    "return_pdfs": "probs",
    "include_guided_decoding": "allowed_tokens",
}
# A key of `qaic_config` → the keyword of `from_pretrained` with the same meaning.
_KEYWORD_OF_KEY: Final = {
    "include_sampler": "include_sampler",
    "return_pdfs": "return_pdfs",
    "include_guided_decoding": "allowed_tokens",
}
# A key of `sampling_params` → the field of `SamplingParams` with the same meaning.
_SAMPLING_FIELD_OF_KEY: Final = {
    "repetition_penalties": "repetition_penalty",
    "presence_penalties": "presence_penalty",
    "frequency_penalties": "frequency_penalty",
    "temperatures": "temperature",
    "top_ks": "top_k",
    "top_ps": "top_p",
    "min_ps": "min_p",
}
# The graph draws from the whole vocabulary, so it has no such limit.
_MAX_TOP_K_KEY: Final = "max_top_k_ids"
_MASKS_KEY: Final = "token_bitmasks"
_RANDOM_NUMBERS_KEY: Final = "random_numbers"
_ROW_LENGTH: Final = (
    "attention reads the tokens that a row has, however long ctx_len is; leave it out"
)

# A format of QEfficient's `compile` → the keyword and the value here that come closest. ONNX Runtime has no MX
# formats.
NEAREST_COMPILE: Final[Mapping[str, tuple[str, str]]] = {
    "mxfp6_matmul": ("weights", "int8"),
    "mxint8_kv_cache": ("kv_cache_dtype", "int8"),
}
# Options of Cloud AI 100 and its compiler, which change nothing here; so do all names with this beginning.
AI100_COMPILE: Final = frozenset(
    {"num_cores", "mos", "allow_mxint8_mdp_io", "mdp_ts_num_devices", "enable_qnn", "qnn_config"}
)
_AI100_PREFIX: Final = "aic_"
# Refused arguments of QEfficient's `compile`.
REFUSED_COMPILE: Final[Mapping[str, Refusal]] = {
    **refusals("onnx_path", "give from_pretrained the exported package; leave it out"),
    **refusals("compile_dir", "give path, the folder of the package"),
    **refusals("kv_cache_batch_size", "the cache has the rows of full_batch_size; leave it out"),
    **refusals("prefill_only", "the same graph reads prompts and decodes; leave it out"),
    **refusals("retain_full_kv", "the same graph reads prompts and decodes; leave it out", False),
    **refusals(
        "kv_cache_prefix custom_io specializations",
        "the contract fixes inputs and states; leave it out",
    ),
    **refusals("comp_ctx_lengths_prefill comp_ctx_lengths_decode", _ROW_LENGTH),
    **refusals("convert_to_fp16", 'give from_pretrained dtype="float16"', False),
}
# These only affect how QEfficient exports, and the size of the pieces in which it reads prompts.
# The runtime chooses that size itself, and no token depends on it, so any value is accepted.
IGNORED_COMPILE: Final = frozenset(
    {
        "prefill_seq_len",
        "prefill_seq_length",
        "enable_chunking",
        "moe_prefill_packed_chunk_size",
        "layerwise",
        "layerwise_window_size",
        "use_onnx_subfunctions",
        "offload_pt_weights",
        "dynamo",
    }
)
# Refused keys of QEfficient's `qaic_config`.
REFUSED_QAIC_CONFIG: Final[Mapping[str, Refusal]] = {
    **refusals(
        "speculative_model_type",
        "compile(num_speculative_tokens=...) makes a package whose steps check guesses",
    ),
    **refusals("ccl_enabled", _ROW_LENGTH, False),
    **refusals(
        "num_kv_blocks mla_absorption", "it chooses how attention is computed there; leave it out"
    ),
}
# Refused keys of QEfficient's `sampling_params`.
REFUSED_SAMPLING_PARAMS: Final[Mapping[str, Refusal]] = {
    **refusals("last_accepted_output_tokens", "the graph keeps each row's tokens; leave it out"),
}


class QEfficient(Dialect):
    """QEfficient's arguments."""

    def read_from_pretrained(self, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put the keywords of features in place of `qaic_config`."""
        if "qaic_config" not in keywords:
            return keywords
        rest = dict(keywords)
        config = rest.pop("qaic_config")
        if config is None:
            return rest
        return rest | read_config(config)

    def read_compile(self, keywords: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put the nearest formats in place of those that ONNX Runtime lacks, and leave out the arguments that change
        nothing here. A warning names both.

        With full_batch_size, batch_size is the number of prompts that are read at once, which the runtime chooses.
        """
        rest = without_refused(REFUSED_COMPILE, keywords)
        for name in IGNORED_COMPILE:
            rest.pop(name, None)
        notes = _put_nearest(rest) + _drop_ai100(rest)
        _warn(notes, callers=5)
        rows = rest.pop("full_batch_size", None)
        if rows is not None:
            rest["batch_size"] = rows
        if rest.get("num_speculative_tokens", 0) is None:
            del rest["num_speculative_tokens"]
        # This is the length of an empty group of devices.
        if rest.get("num_devices") == 0:
            del rest["num_devices"]
        return rest

    def read_generate(self, arguments: GenerateArguments, features: Features) -> GenerateArguments:
        """Take the tokenizer, the prompts and the sampling parameters of rows from where QEfficient has them.

        `prompts` without sampling parameters are continued greedily, as QEfficient does.
        """
        inputs = arguments.inputs
        params = arguments.params
        rest = dict(arguments.keywords)
        is_tokenizer = callable(getattr(inputs, "batch_decode", None))
        if is_tokenizer:
            rest = {"tokenizer": inputs, "prompts": params, **rest}
            inputs = params = None
        _check_features(rest, features)
        notes = _drop_devices(rest) + _read_prompts(rest)
        if "generation_len" in rest:
            rest["max_new_tokens"] = rest.pop("generation_len")
        rows = rest.pop("sampling_params", None)
        if rows is not None:
            if params is not None:
                raise ValueError(
                    "params and sampling_params were given; put everything into either"
                )
            params = _take_rows(rows, rest, notes)
        _warn(notes, callers=4)
        if "prompts" in rest:
            if inputs is not None:
                raise ValueError(
                    "inputs and prompts were given, which are two names of the same argument; give either"
                )
            inputs = rest.pop("prompts")
            sampling = {*SAMPLING_FIELDS, "do_sample", "generation_config"}
            if params is None and not rest.keys() & sampling:
                rest["do_sample"] = False
        return GenerateArguments(inputs, params, rest)


QEFFICIENT: Final = QEfficient()


def read_config(config: Any) -> dict[str, Any]:
    """The keywords of `from_pretrained` for a `qaic_config`.

    Raises:
        ValueError: for another value than a mapping, an unknown key, or a key that is refused.
    """
    if not isinstance(config, Mapping):
        refuse("qaic_config", config, 'a mapping, such as {"include_sampler": True}, or None')
    rest = without_refused(REFUSED_QAIC_CONFIG, config)
    check_count(_MAX_TOP_K_KEY, rest.pop(_MAX_TOP_K_KEY, None))
    for name in rest.keys() - _KEYWORD_OF_KEY.keys():
        known = {*_KEYWORD_OF_KEY, _MAX_TOP_K_KEY, *REFUSED_QAIC_CONFIG}
        raise ValueError(unknown("qaic_config has no key", name, known))
    return {_KEYWORD_OF_KEY[name]: value for name, value in rest.items() if value is not None}


def _warn(notes: list[str], *, callers: int) -> None:
    """A warning of a line, if there is something to say. callers: the functions between here and the user's."""
    if notes:
        warnings.warn(f"QEfficient's arguments: {'; '.join(notes)}", stacklevel=callers + 1)


def _put_nearest(keywords: dict[str, Any]) -> list[str]:
    """Put qsample's keywords in place of QEfficient's formats, unless the caller gives them, too. Returns what to
    say."""
    notes: list[str] = []
    for name, (keyword, value) in NEAREST_COMPILE.items():
        is_wanted = keywords.pop(name, None)
        if is_wanted not in (None, False, True):
            refuse(name, is_wanted, "True or False")
        if is_wanted and keywords.get(keyword) is None:
            keywords[keyword] = value
            notes.append(f'{name} is {keyword}="{value}" here')
    return notes


def _drop_ai100(keywords: dict[str, Any]) -> list[str]:
    """Remove the options of Cloud AI 100. Returns what to say."""
    found = [name for name in keywords if name in AI100_COMPILE or name.startswith(_AI100_PREFIX)]
    given = [name for name in found if keywords.pop(name) not in (None, False)]
    return [f"no effect here: {', '.join(given)}"] if given else []


def _drop_devices(keywords: dict[str, Any]) -> list[str]:
    """Remove a list of Cloud AI 100's devices. Returns what to say."""
    devices = keywords.get("device_id")
    if not isinstance(devices, list) or not all(is_integer(device, 0) for device in devices):
        return []  # `generate` takes None, and refuses the rest.
    del keywords["device_id"]
    return [] if devices in ([], [0]) else ["no effect here: device_id"]


def _read_prompts(keywords: dict[str, Any]) -> list[str]:
    """Put the lines of `prompts_txt_file_path` in place of `prompts`. Returns what to say."""
    path = keywords.pop("prompts_txt_file_path", None)
    if path is None:
        return []
    has_prompts = keywords.get("prompts") is not None
    text = Path(path).read_text(encoding="utf-8")
    keywords["prompts"] = [line.strip() for line in text.splitlines()]
    return ["prompts_txt_file_path takes the place of prompts"] if has_prompts else []


def _check_features(keywords: dict[str, Any], features: Features) -> None:
    """Remove the features that a call names. Raises ValueError if the graph has another value."""
    for name, field in _FIELD_OF_KEY.items():
        wanted = keywords.pop(name, None)
        there = getattr(features, field)
        if wanted is not None and wanted is not there:
            raise ValueError(
                f"{name} is {shown(wanted)}, and the package has it {there}; give it to from_pretrained"
            )


def _take_rows(rows: Any, keywords: dict[str, Any], notes: list[str]) -> Any:
    """The parameters of each row, or of all rows.

    Args:
        rows: QEfficient's `sampling_params`, or parameters as `generate` takes them.
        keywords: the other arguments. Those that belong to the parameters are removed, and the masks of the rows are
            added as allowed_tokens.
        notes: what to say; more is added.
    """
    new: dict[str, Any] = {}
    for name in ("max_new_tokens", "eos_token_id"):
        if name in keywords:
            new[name] = keywords.pop(name)
    if not isinstance(rows, Mapping):
        return rows
    rest = without_refused(REFUSED_SAMPLING_PARAMS, rows)
    masks = rest.pop(_MASKS_KEY, None)
    if masks is not None:
        keywords["allowed_tokens"] = _packed(masks)
    numbers = rest.pop(_RANDOM_NUMBERS_KEY, None)
    for name in rest.keys() - _SAMPLING_FIELD_OF_KEY.keys():
        known = {*_SAMPLING_FIELD_OF_KEY, _MASKS_KEY, _RANDOM_NUMBERS_KEY, *REFUSED_SAMPLING_PARAMS}
        raise ValueError(unknown("sampling_params has no key", name, known))
    columns = {name: np.asarray(values) for name, values in rest.items() if values is not None}
    sizes = [column.size for column in columns.values()]
    if numbers is not None:
        sizes.append(len(numbers))
    count = max(sizes, default=1)
    cells = {
        _SAMPLING_FIELD_OF_KEY[name]: _cells(name, column, count)
        for name, column in columns.items()
    }
    if numbers is not None:
        cells["seed"] = _seeds(numbers, count)
        if "seed" not in keywords:
            notes.append(f"the {_RANDOM_NUMBERS_KEY} of a row choose its seed")
    params = [
        SamplingParams(**{name: cell[row] for name, cell in cells.items()}, **new)
        for row in range(count)
    ]
    return params if count > 1 else params[0]


def _cells(name: str, column: Array, count: int) -> list[Any]:
    """The value of each of `count` rows, from an array [count, 1], or [1, 1] for all rows. Raises ValueError."""
    is_numeric = column.dtype.kind in "iuf"
    has_rows = column.size in (1, count) and column.shape[1:] in ((), (1,))
    if not (is_numeric and has_rows):
        refuse(
            f"{name} of sampling_params",
            column.tolist(),
            f"numbers of shape [{count}, 1], a row each",
        )
    if name == "top_ks":
        # -1 stands for all tokens.
        column = np.where(column == -1, 0, column)
    values: list[Any] = np.broadcast_to(column.ravel(), count).tolist()
    return values


def _seeds(numbers: Any, count: int) -> list[int]:
    """A seed for each of `count` rows, made of the row's random numbers: [count, n], or [1, n] for all rows. Raises
    ValueError."""
    rows = np.asarray(numbers)
    if rows.dtype.kind != "f" or rows.ndim != 2 or len(rows) not in (1, count):
        raise ValueError(
            f"{_RANDOM_NUMBERS_KEY} of sampling_params is {rows.dtype} {rows.shape}; give floats of shape [{count}, n]"
        )
    digests = [hashlib.sha256(row.astype("<f4").tobytes()).digest() for row in rows]
    seeds = [int.from_bytes(digest[:8], "little") % NUM_SEEDS for digest in digests]
    return seeds * (count // len(seeds))


def _packed(masks: Any) -> Array:
    """Masks [B, V], true for the tokens that may be sampled, as the contract's words, [B, ceil(V / 32)] int32."""
    bits = np.packbits(np.atleast_2d(np.asarray(masks)).astype(bool), axis=1, bitorder="little")
    return np.pad(bits, [(0, 0), (0, -bits.shape[1] % 4)]).view("<i4")
