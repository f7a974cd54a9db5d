"""The files of a LoRA adapter as peft writes them: the checked configuration, and the changes that the weights make.

LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022; W + scale * B A, scale = alpha / r, or
alpha / sqrt(r) for rank-stabilised adapters (Kalajdzievski, 2023). The meaning of a configuration's fields is peft's:
https://huggingface.co/docs/peft/package_reference/lora
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from qsample.checks import is_integer, is_number
from qsample.contract.arrays import Array
from qsample.disk.tensor_file import TensorFile
from qsample.disk.untrusted import read_json
from qsample.errors import QsampleError, UnsupportedModelError, shown

T = TypeVar("T")

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PART: Final = re.compile(
    r"base_model\.model\.(?P<path>.{1,200})\.(lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<embedding>[AB])|(?P<base>base_layer)\.weight)"
)
ADVICE: Final = "merge it with the tool that trained it, and export the merged checkpoint"
_READ: Final = (
    "peft_type",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "bias",
    "init_lora_weights",
)
# Fields that change no number: the training, and the layers; the names of the tensors also give these.
# fan_in_fan_out follows from the layer itself.
_WITHOUT_EFFECT: Final = (
    *(
        "peft_version",
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "base_model_class",
        "parent_library",
    ),
    *("revision", "inference_mode", "runtime_config", "megatron_core", "qalora_group_size"),
    *(
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "fan_in_fan_out",
    ),
    *(
        "lora_dropout",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "velora_config",
    ),
)
_LARGEST_CONFIG: Final = 1 << 22  # bytes
_LONGEST_PATH: Final = 200  # characters of the path of a module, and of a pattern
# Patterns are regular expressions of strangers, and Python's `re` may take for ever, holding Python's lock. So they
# have characters, classes and repetitions of either, and groups of these that are not repeated.
_ATOM: Final = r"(?:\\[dw]|\\[^\w\s]|\[\^?[\w.-]+\]|[\w.-])"
_PIECE: Final = rf"{_ATOM}(?:[*+]\??|\?)?"
_PATTERN: Final = re.compile(rf"\^?(?:{_PIECE}|\((?:\?:)?(?:{_PIECE}|\|)*\)\??|\|)*\$?")
_MOST_WAYS: Final = 1 << 12  # to match a pattern: of choices, and 2^5 of each * and +
_MOST_WAYS_OF_ALL: Final = 1 << 13
_SECONDS: Final = 10.0  # to match all of them
# Initialisations that leave the model's own weights alone. The rest move a part of the weight into A and B,
# so a file of trained A and B means nothing without that weight.
_INITIALISATIONS: Final = (True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """rank, alpha: of a layer that no pattern names. ranks, alphas: pairs of a pattern and a value; the first pattern
    that matches counts. rank_stabilised: whether a change is scaled by the root of the rank."""

    rank: int
    alpha: float
    ranks: Sequence[tuple[re.Pattern[str], int]]
    alphas: Sequence[tuple[re.Pattern[str], float]]
    rank_stabilised: bool

    @property
    def largest_rank(self) -> int:
        """Of all layers."""
        return max([self.rank, *(rank for _, rank in self.ranks)])

    def rank_of(self, path: str) -> int:
        """The rank in the module at `path`."""
        return _first_match(self.ranks, path, self.rank)

    def scale_of(self, path: str) -> float:
        """The factor of the product of B and A in the module at `path`."""
        alpha, rank = _first_match(self.alphas, path, self.alpha), self.rank_of(path)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def read_config(path: Path) -> LoraConfig:
    """The configuration at `path`. Raises QsampleError if it is damaged, UnsupportedModelError if not plain LoRA."""
    try:
        options = read_json(path, _LARGEST_CONFIG, infinities=True)
    except ValueError as error:
        raise QsampleError(
            f"{path} is not valid JSON ({error}); download the adapter again"
        ) from error
    if not isinstance(options, dict):
        raise QsampleError(
            f"{path} holds {shown(options, 60)}, and must hold an object; give the folder of a LoRA adapter"
        )
    _check_plain(options, path)
    return LoraConfig(
        _rank(options.get("r", 8), "r", path),
        _alpha(options.get("lora_alpha", 8), "lora_alpha", path),
        [
            (key, _rank(value, f"rank_pattern[{name!r}]", path))
            for name, key, value in _patterns(options, "rank", path)
        ],
        [
            (key, _alpha(value, f"alpha_pattern[{name!r}]", path))
            for name, key, value in _patterns(options, "alpha", path)
        ],
        _flag(options, "use_rslora", path),
    )


class Change(NamedTuple):
    """The change of the weight of the module at `path`: scale * b a, of matrices in the adapter's file.
    a, b: [rank, in] and [out, rank]; None if the adapter has `base` alone. base: the weight itself, if the adapter has
    a copy of it: peft saves one with the LoRA of an embedding."""

    path: str
    a: Array | None
    b: Array | None
    base: Array | None
    scale: float


def read_changes(config_path: Path, weights_path: Path, largest: int | None = None) -> list[Change]:
    """The changes that an adapter makes, in order of their paths. largest: bytes of its weights. Raises QsampleError
    for files that cannot be read, for matrices without a partner, of another rank than the configuration's, or with
    numbers that are not finite, and for patterns that take long to match; UnsupportedModelError for more than plain
    LoRA."""
    config = read_config(config_path)
    try:
        with TensorFile(weights_path, largest) as file:
            tensors = {name: file.read(name) for name in file.tensors}
    except (OSError, ValueError, MemoryError) as error:
        raise QsampleError(
            f"{weights_path} cannot be read ({error!s:.200}); download the adapter again"
        ) from error
    parts: dict[str, dict[str, Array]] = {}
    for name, tensor in sorted(tensors.items()):
        match = _PART.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(
                f"{weights_path} holds {name:.200}, which does not belong to a pair of LoRA matrices; {ADVICE}"
            )
        parts.setdefault(match["path"], {})[match["linear"] or match["embedding"] or "base"] = (
            tensor
        )
        if tensor.ndim != 2 or not _is_finite(tensor):
            dtype = "bfloat16" if tensor.dtype == np.uint16 else tensor.dtype.name
            raise QsampleError(
                f"{weights_path}: {name:.200} is {dtype} {list(tensor.shape)}; it must be a matrix of finite floats"
            )
    changes = []
    began = time.monotonic()
    for path, found in sorted(parts.items()):
        if time.monotonic() - began > _SECONDS:
            raise QsampleError(
                f"{config_path}: its patterns take more than {_SECONDS:.0f} s to match; give fewer"
            )
        a, b, rank = found.get("A"), found.get("B"), config.rank_of(path)
        if (a is None) != (b is None):
            raise QsampleError(
                f"{weights_path} holds matrix {'A' if b is None else 'B'} of {path} without its partner"
            )
        if a is not None and b is not None and (len(a), b.shape[1]) != (rank, rank):
            raise QsampleError(
                f"{weights_path}: the matrices of {path} are {list(a.shape)} and {list(b.shape)}, and the rank that "
                f"{CONFIG} gives it is {rank}"
            )
        changes.append(Change(path, a, b, found.get("base"), config.scale_of(path)))
    if all(change.a is None for change in changes):
        raise QsampleError(
            f"{weights_path} holds no LoRA matrices; give the adapter that was trained"
        )
    return changes


def floats(matrix: Array) -> Array:
    """A float32 copy of a matrix of a `Change`."""
    if matrix.dtype == np.uint16:
        return (matrix.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return matrix.astype(np.float32)


def _is_finite(matrix: Array) -> bool:
    """Whether all numbers are finite floats. uint16: bits of bfloat16."""
    if matrix.dtype == np.uint16:
        return bool(((matrix & 0x7F80) != 0x7F80).all())
    return matrix.dtype.kind == "f" and bool(np.isfinite(matrix).all())


def _first_match(patterns: Sequence[tuple[re.Pattern[str], T]], path: str, other: T) -> T:
    """The value of the first of `patterns` that matches, as in peft; `other` if none does."""
    return next((value for pattern, value in patterns if pattern.match(path)), other)


def _check_plain(options: Mapping[str, Any], path: Path) -> None:
    kind = options.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{path}: an adapter of type {kind!s:.60} cannot be used here, only plain LoRA; {ADVICE}"
        )
    asked = [
        name for name in sorted(options) if name not in (*_READ, *_WITHOUT_EFFECT) and options[name]
    ]
    if options.get("bias", "none") != "none":
        asked.append("bias")
    if options.get("init_lora_weights", True) not in _INITIALISATIONS:
        asked.append(f"init_lora_weights={shown(options['init_lora_weights'], 60)}")
    if asked:
        raise UnsupportedModelError(
            f"{path}: an adapter with {', '.join(asked):.300} cannot be used here, only plain LoRA; {ADVICE}"
        )


def _patterns(
    options: Mapping[str, Any], kind: str, path: Path
) -> list[tuple[str, re.Pattern[str], Any]]:
    """The patterns of ranks or alphas, each compiled: it matches the path of a module that it ends with, at a dot."""
    name = f"{kind}_pattern"
    patterns = options.get(name) or {}
    if not isinstance(patterns, dict):
        raise QsampleError(
            f"{path}: {name} is {shown(patterns, 60)}; it must be an object, from patterns to numbers"
        )
    left, compiled = _MOST_WAYS_OF_ALL - len(patterns), []  # each has one at least
    for pattern, value in patterns.items():
        try:
            ways = _ways(pattern)
            if ways > _MOST_WAYS or ways - 1 > left:
                raise ValueError(
                    "it is not simple"
                    if math.isinf(ways)
                    else "there are too many ways to match it"
                )
            left -= int(ways) - 1
            compiled.append((pattern, re.compile(rf"(.*\.)?({pattern})$"), value))
        except (ValueError, re.error) as error:
            raise QsampleError(
                f"{path}: {name} holds {pattern!r:.80}, which is not a regular expression that is taken ({error}); "
                r"give fewer, of names, dots, \d, [...], two of * and + at most, and groups (a|b) that are not repeated"
            ) from error
    return compiled


def _ways(pattern: str) -> float:
    """At most that many ways to match a pattern are tried at each place of a path; infinite for patterns that are not
    simple."""
    if len(pattern) > _LONGEST_PATH or not _PATTERN.fullmatch(pattern):
        return math.inf
    bare = re.sub(_ATOM, "a", pattern.replace("(?:", "("))
    choices = math.prod(part.count("|") + 1 for part in re.split(r"[()]", bare))
    return float(choices) * 2.0 ** (bare.count("?") + 5 * bare.count("*") + 5 * bare.count("+"))


def _rank(value: Any, name: str, path: Path) -> int:
    if not is_integer(value, 1):
        raise QsampleError(
            f"{path}: {name} is {shown(value, 60)}; it must be an integer of at least 1"
        )
    return value


def _alpha(value: Any, name: str, path: Path) -> float:
    if not is_number(value, -sys.float_info.max, sys.float_info.max):
        raise QsampleError(f"{path}: {name} is {shown(value, 60)}; it must be a number")
    return float(value)


def _flag(options: Mapping[str, Any], name: str, path: Path) -> bool:
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise QsampleError(f"{path}: {name} is {shown(value, 60)}; it must be true or false")
    return value
