"""`CompileOptions`: the options of compile, checked. Importing it loads neither onnx nor torch."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

from qsample.checks import as_path, check_fields, checked, choice, flag, integer, number, refuse
from qsample.compiler.quantize import FLOAT, INT_BITS, PRESETS, entry_of_table
from qsample.contract.tensors import (
    BLOCK_SIZES,
    KV_CACHE_DTYPES,
    MODEL_DTYPES,
    MOST_SPECULATIVE_TOKENS,
)
from qsample.errors import CompileError
from qsample.request.sampling_params import INT32_MAX

DEFAULT_CTX_LEN: Final = 4096


def _target(name: str, value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else refuse(name, value, "the name of a compile target, such as 'cpu'")
    )


def _weights(name: str, value: Any) -> str | Mapping[str, str]:
    """A kind of weights; or a table of patterns, as a mapping or in a JSON file."""
    kinds = (*INT_BITS, *MODEL_DTYPES)
    entries = f"{', '.join(INT_BITS)} (with a block size: int4:32) or {FLOAT}"
    accepted = f"{', '.join(kinds)}, a table, such as {{'lm_head': 'int8', '*': 'int4'}}, or the JSON file of one"
    if isinstance(value, str) and value.endswith(".json"):
        try:
            value = json.loads(Path(value).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CompileError(f"{name}: cannot read the table {value}: {error}") from error
    if isinstance(value, str):
        return value if value in kinds else refuse(name, value, accepted)
    if not isinstance(value, Mapping) or not value:
        refuse(name, value, accepted)
    for pattern, kind in value.items():
        try:
            entry_of_table(kind)
        except (ValueError, AttributeError):
            refuse(f"{name}[{pattern!r}]", kind, entries)
    return dict(value)


def _folder(name: str, value: Any) -> str | PathLike[str]:
    accepted = "the path of a new or empty folder, or None"
    if not isinstance(value, str | PathLike):
        refuse(name, value, accepted)
    as_path(name, value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """The options of compile. Every field has a default; None leaves the choice to the package.

    The `help` of a field says what it is. More about some:

    Args:
        provider: a device, or the name of an installed target (`targets.target_names`).
        dtype: "float16" or "bfloat16" for cuda, "float16" for webgpu, the package's for cpu, web and openvino.
        weights: "int4" or "int8" quantizes every matrix that a token is multiplied by, and the embedding, but no table
            of positions, and no weights that the checkpoint has quantized. The head may keep more bits, as the preset
            says. "int2", for cpu, is for models that bear it: 2 bits for feed-forward matrices, 4 for the others. A
            table gives each matrix its own bits: {"lm_head": "int8", "layers.0.*": "int8", "*": "int4"}, or a JSON
            file of that form; the first pattern that matches counts. `qsample inspect --bits` prints a package's.
            "float16", for cpu, stores float32 weights in half the space; loaded, they are float32 again. The package's
            dtype leaves them as exported.
        preset: "quick" is compiled fastest, "speed" runs fastest, and "balanced" is between. The last two fit the
            levels to a text, for cpu; see `quantize.PRESETS`.
        block_size: 16, 32, 64, 128 or 256, in place of the preset's; a smaller size if that takes fewer bytes for the
            inputs of a matrix.
        calibration_text: a text for "balanced" and "speed", like the model's future input, a list of them, or token ids
            of the same form; 128 tokens at least, of which 65,536 are read. Not the text of an evaluation. None: the
            model writes one.
        kv_cache_dtype: "int8" has a scale a channel, measured on the model's own text: a quarter of float32's memory,
            faster steps over long contexts, slower long prompts. "int4", for cpu, takes an eighth and diverges further.
            The package's dtype leaves it as exported.
        sliding_window_cache: whether layers with an attention window keep only the newest tokens, on the CPU and
            with ONNX Runtime 1.32. See `passes.window_caches`.
        num_speculative_tokens: needs provider="cpu" and kv_cache_dtype="int8" or "int4". Each request says whether its
            rows guess.
        num_devices: the number of devices that share the layers, for cpu and cuda; see docs/devices.md.
        max_divergence: the largest `package.divergence.Divergence.kl`. 4 bits put SmolLM2-135M-Instruct 0.1 to 0.4
            off, 8 bits 0.006: docs/quantization.md.
        debug_dump: the folder for the graph after each phase, without large weights; see `compiler.debug_dump`.

    Raises CompileError, naming the field, if a value is outside its range. Checks that depend on the package or the
    target follow when these are known.

    >>> CompileOptions(provider="cuda", dtype="bfloat16", ctx_len=2048)
    """

    provider: str = checked(
        "cpu", _target, help="cpu, cuda, webgpu, web, openvino, or a target of your own."
    )
    batch_size: int | None = integer(
        None,
        1,
        INT32_MAX,
        f"1 to {INT32_MAX}, or None for any number of rows",
        help="Most rows of a call. (default: any)",
    )
    ctx_len: int | None = integer(
        None,
        2,
        INT32_MAX,
        f"2 to the model's max_position_embeddings, or None for that, at most {DEFAULT_CTX_LEN}",
        help=f"Tokens that a row holds. (default: the model's, at most {DEFAULT_CTX_LEN})",
    )
    dtype: str | None = choice(
        None,
        MODEL_DTYPES,
        help="Of weights and cache, on a GPU. (default: as exported)",
        metavar="float16|bfloat16",
    )
    weights: str | Mapping[str, str] | None = checked(
        None,
        _weights,
        help="Quantize the weights, or each matrix by a table; float16 halves the file. (default: as exported)",
        metavar="int2|int4|int8|float16|FILE.json",
    )
    preset: str = choice(
        "quick",
        PRESETS,
        help="Of quantized weights: quick is made fastest, speed runs fastest.",
        metavar="|".join(PRESETS),
    )
    block_size: int | None = choice(
        None,
        BLOCK_SIZES,
        help="Quantized weights that share a scale: 16 to 256. (default: the preset's)",
    )
    calibration_text: Any = field(
        default=None,
        repr=False,
        metadata={
            "help": "Text in UTF-8 to fit weights to; may be repeated. (default: the model's own)",
            "metavar": "FILE",
            "repeated": str,
        },
    )
    kv_cache_dtype: str | None = choice(
        None,
        KV_CACHE_DTYPES,
        help="Quantize keys and values. (default: as exported)",
        metavar="int8|int4",
    )
    sliding_window_cache: bool = flag(
        True,
        flag="--sliding-window-cache/--no-sliding-window-cache",
        help="Layers with an attention window keep the newest tokens only.",
    )
    num_speculative_tokens: int = integer(
        0,
        0,
        MOST_SPECULATIVE_TOKENS,
        f"the most tokens that a step may guess for a row, 1 to {MOST_SPECULATIVE_TOKENS}, or 0 for none",
        help="Guesses that a step may check, for requests that ask for it: 7, with --kv-cache-dtype int8.",
    )
    num_devices: int = integer(
        1,
        1,
        INT32_MAX,
        "the number of devices that share the model's layers, at least 1",
        help="Cut the graph between layers, for N GPUs or NUMA nodes.",
        metavar="N",
    )
    max_divergence: float = number(
        0.7,
        0,
        math.inf,
        "a number of nats a token, at least 0",
        help="Refuse quantized weights that diverge further, in nats a token.",
    )
    debug_dump: str | PathLike[str] | None = checked(
        None,
        _folder,
        help="New folder for the graph after each phase, with its node counts.",
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        check_fields(self, CompileError)
        self._check_quantization()

    @property
    def quantizes(self) -> bool:
        """Whether weights become integers."""
        return isinstance(self.weights, Mapping) or self.weights in INT_BITS

    @property
    def bits(self) -> int:
        """The bits of matrices that no table names; 4 beside a table."""
        return INT_BITS.get(str(self.weights), 4)

    @property
    def table(self) -> Mapping[str, str]:
        """The caller's table of bits; empty without one."""
        return self.weights if isinstance(self.weights, Mapping) else {}

    @property
    def calibrated(self) -> bool:
        """Whether weights are fitted to a text."""
        return self.quantizes and PRESETS[self.preset].fitted

    def described(self) -> dict[str, Any]:
        """The options for a manifest, except defaults and `debug_dump`; the calibration text is the sha256 of its
        JSON."""
        given = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if entry.name != "debug_dump"
        }
        if (text := given["calibration_text"]) is not None:
            content = json.dumps(text, default=lambda ids: ids.tolist())
            given["calibration_text"] = hashlib.sha256(content.encode()).hexdigest()
        return {
            entry.name: given[entry.name]
            for entry in fields(self)
            if given.get(entry.name) != entry.default
        }

    def _check_quantization(self) -> None:
        if self.calibration_text is not None and not self.calibrated:
            fitting = " or ".join(repr(name) for name, preset in PRESETS.items() if preset.fitted)
            raise CompileError(
                f"calibration_text is only read with weights={' or '.join(map(repr, INT_BITS))} and "
                f"preset={fitting}; leave it out, or give these"
            )
        own = {entry.name: entry.default for entry in fields(self)}
        for name in ("preset", "block_size"):
            if not self.quantizes and getattr(self, name) != own[name]:
                raise CompileError(
                    f"{name} is {getattr(self, name)!r}, which is only read if weights are quantized "
                    f"({', '.join(INT_BITS)}); leave it out, or give weights="
                )
        if self.weights == "int2" and self.block_size not in (None, 32, 64, 128):
            raise CompileError(
                f"block_size is {self.block_size}, and the kernels of 2 bits take blocks of 32, 64 or 128; give one of "
                f"these, or other weights than {self.weights!r}"
            )

    def override(self, **changes: Any) -> CompileOptions:
        """These options with `changes` of fields. TypeError names an unknown field, and the closest that exists."""
        names = [entry.name for entry in fields(self)]
        for name in changes:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}"
                raise TypeError(f"compile has no option {name!r}; {hint}")
        return replace(self, **changes)
