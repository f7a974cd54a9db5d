"""Arguments under QEfficient's names (quic/efficient-transformers) → qsample's arguments of the same meaning.

`refusals` has the names without one. docs/qefficient.md is the page for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from qsample.checks import check_count, refuse
from qsample.contract.arrays import Array
from qsample.errors import shown, unknown
from qsample.request.refusals import (
    COMPILE,
    COMPILE_IGNORED,
    QAIC_CONFIG,
    SAMPLING_PARAMS,
    without_refused,
)
from qsample.request.sampling_params import SAMPLING_FIELDS, SamplingParams

# Keys of `qaic_config` → fields of `Features`.
_FEATURES: Final = {
    "include_sampler": "sampler",
    "return_pdfs": "probs",
    "include_guided_decoding": "allowed_tokens",
}
# Keys of `sampling_params` → fields of `SamplingParams`.
_ROWS: Final = {
    "repetition_penalties": "repetition_penalty",
    "presence_penalties": "presence_penalty",
    "frequency_penalties": "frequency_penalty",
    "temperatures": "temperature",
    "top_ks": "top_k",
    "top_ps": "top_p",
    "min_ps": "min_p",
}
_MOST: Final = "max_top_k_ids"  # the graph draws from the whole vocabulary, so it has no such limit
_MASKS: Final = "token_bitmasks"


def read_config(config: Any) -> dict[str, Any]:
    """The fields of `Features` that a `qaic_config` sets. Raises ValueError for another value than a mapping, for an
    unknown key and for a key that is refused."""
    if not isinstance(config, Mapping):
        refuse("qaic_config", config, 'a mapping, such as {"include_sampler": True}, or None')
    rest = without_refused(QAIC_CONFIG, config)
    check_count(_MOST, rest.pop(_MOST, None))
    for name in rest.keys() - _FEATURES.keys():
        raise ValueError(unknown("qaic_config has no key", name, {*_FEATURES, _MOST, *QAIC_CONFIG}))
    return {_FEATURES[name]: value for name, value in rest.items() if value is not None}


def read_compile(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `compile`; ValueError for those that are refused. With full_batch_size, batch_size is the number
    of prompts that are read at once, and the runtime chooses that."""
    rest = {
        name: value
        for name, value in without_refused(COMPILE, given).items()
        if name not in COMPILE_IGNORED
    }
    if (rows := rest.pop("full_batch_size", None)) is not None:
        rest["batch_size"] = rows
    if rest.get("num_speculative_tokens", 0) is None:
        del rest["num_speculative_tokens"]
    if rest.get("num_devices") == 0:  # the length of an empty group of devices
        del rest["num_devices"]
    return rest


def read_generate(
    inputs: Any, params: Any, given: Mapping[str, Any], features: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """The inputs, the params and the other arguments of `generate`, for a graph with `features`. `prompts` without
    sampling parameters are continued greedily, as by QEfficient. Raises ValueError for a wrong value."""
    rest = dict(given)
    if callable(getattr(inputs, "batch_decode", None)):  # generate(tokenizer, prompts)
        rest = {"tokenizer": inputs, "prompts": params, **rest}
        inputs = params = None
    for name, feature in _FEATURES.items():
        wanted, there = rest.pop(name, None), getattr(features, feature)
        if wanted is not None and wanted is not there:
            raise ValueError(
                f"{name} is {shown(wanted)}, and the package has it {there}; give it to from_pretrained"
            )
    if "generation_len" in rest:
        rest["max_new_tokens"] = rest.pop("generation_len")
    rows = rest.pop("sampling_params", None)
    if rows is not None:
        if params is not None:
            raise ValueError("params and sampling_params were given; put everything into either")
        new: dict[str, Any] = {
            name: rest.pop(name) for name in ("max_new_tokens", "eos_token_id") if name in rest
        }
        params, masks = _read_rows(rows, new) if isinstance(rows, Mapping) else (rows, {})
        rest |= masks
    if "prompts" in rest:
        if inputs is not None:
            raise ValueError(
                "inputs and prompts were given, which are two names of the same argument; give either"
            )
        inputs = rest.pop("prompts")
        if params is None and not rest.keys() & {
            *SAMPLING_FIELDS,
            "do_sample",
            "generation_config",
        }:
            rest["do_sample"] = False
    return inputs, params, rest


def _read_rows(given: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Any, dict[str, Array]]:
    """The parameters of each row, or of all rows, from arrays [B, 1]; and the masks, [B, V] bool, as allowed_tokens."""
    rest = without_refused(SAMPLING_PARAMS, given)
    masks = rest.pop(_MASKS, None)
    for name in rest.keys() - _ROWS.keys():
        raise ValueError(
            unknown("sampling_params has no key", name, {*_ROWS, _MASKS, *SAMPLING_PARAMS})
        )
    columns = {name: np.asarray(values) for name, values in rest.items() if values is not None}
    count = max((column.size for column in columns.values()), default=1)
    for name, column in columns.items():
        if (
            column.dtype.kind not in "iuf"
            or column.size not in (1, count)
            or column.shape[1:] not in ((), (1,))
        ):
            refuse(
                f"{name} of sampling_params",
                column.tolist(),
                f"numbers of shape [{count}, 1], a row each",
            )
        if name == "top_ks":
            columns[name] = np.where(column == -1, 0, column)  # all tokens
    cells = {
        _ROWS[name]: np.broadcast_to(column.ravel(), count).tolist()
        for name, column in columns.items()
    }
    rows = [
        SamplingParams(**{name: cell[row] for name, cell in cells.items()}, **new)
        for row in range(count)
    ]
    return rows if count > 1 else rows[0], {} if masks is None else {
        "allowed_tokens": _packed(masks)
    }


def _packed(masks: Any) -> Array:
    """Masks [B, V], true for the tokens that may be sampled, as the contract's words, [B, ceil(V / 32)] int32."""
    bits = np.packbits(np.atleast_2d(np.asarray(masks)).astype(bool), axis=1, bitorder="little")
    return np.pad(bits, [(0, 0), (0, -bits.shape[1] % 4)]).view("<i4")
