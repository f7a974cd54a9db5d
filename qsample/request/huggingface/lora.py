"""The files of a LoRA adapter as peft writes them: the checked configuration, and the changes that
the weights make.

LoRA (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022) computes
W + scale * B A, with scale = alpha / r, or alpha / sqrt(r) for rank-stabilised adapters
(Kalajdzievski, 2023). The fields of a configuration mean the same as in peft:
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
from qsample.errors import QsampleError, UnsupportedModelError, shown
from qsample.package.disk.tensor_file import TensorFile
from qsample.package.disk.untrusted import read_json

T = TypeVar("T")

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_TENSOR_NAME: Final = re.compile(
    r"base_model\.model\.(?P<path>.{1,200})\."
    r"(lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<embedding>[AB])|(?P<base>base_layer)\.weight)"
)
ADVICE: Final = "merge it with the tool that trained it, and export the merged checkpoint"
# The fields of a configuration that are read.
_READ_FIELDS: Final = (
    "peft_type",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "bias",
    "init_lora_weights",
)
# Fields that change no number. They describe the training, or the layers; the names of the tensors
# give the layers, too. fan_in_fan_out follows from the layer itself.
_FIELDS_WITHOUT_EFFECT: Final = (
    "peft_version",
    "task_type",
    "auto_mapping",
    "base_model_name_or_path",
    "base_model_class",
    "parent_library",
    "revision",
    "inference_mode",
    "runtime_config",
    "megatron_core",
    "qalora_group_size",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
    "lora_dropout",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "velora_config",
)
_MAX_CONFIG_BYTES: Final = 1 << 22
_MAX_PATTERN_CHARACTERS: Final = 200
# Patterns are regular expressions from strangers. Python's `re` may match one for ever, and holds
# Python's lock meanwhile. So a pattern may only have characters and classes, repeated or not, and
# groups of these that are not repeated.
_ATOM: Final = r"(?:\\[dw]|\\[^\w\s]|\[\^?[\w.-]+\]|[\w.-])"
_PIECE: Final = rf"{_ATOM}(?:[*+]\??|\?)?"
_PATTERN: Final = re.compile(rf"\^?(?:{_PIECE}|\((?:\?:)?(?:{_PIECE}|\|)*\)\??|\|)*\$?")
# The most ways to match a pattern at a place: the product of the numbers of its choices, and of 2^5
# for each * and +.
_MAX_WAYS_OF_A_PATTERN: Final = 1 << 12
_MAX_WAYS_OF_ALL_PATTERNS: Final = 1 << 13
_MAX_MATCHING_SECONDS: Final = 10.0
# Initialisations that do not change the model's own weights. The others move a part of the weight
# into A and B, so trained A and B mean nothing without that weight.
_PLAIN_INITIALISATIONS: Final = (True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The settings of an adapter that its changes depend on.

    Attributes:
        rank, alpha: the values for a layer that no pattern names.
        ranks, alphas: pairs of a pattern and a value; the first pattern that matches counts.
        rank_stabilised: whether a change is scaled by the root of the rank.
    """

    rank: int
    alpha: float
    ranks: Sequence[tuple[re.Pattern[str], int]]
    alphas: Sequence[tuple[re.Pattern[str], float]]
    rank_stabilised: bool

    @property
    def largest_rank(self) -> int:
        """The largest rank of all layers."""
        return max([self.rank, *(rank for _, rank in self.ranks)])

    def rank_of(self, path: str) -> int:
        """The rank in the module at `path`."""
        return _first_match(self.ranks, path, self.rank)

    def scale_of(self, path: str) -> float:
        """The factor of the product of B and A in the module at `path`."""
        alpha = _first_match(self.alphas, path, self.alpha)
        rank = self.rank_of(path)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def read_config(path: Path) -> LoraConfig:
    """The configuration at `path`. Raises QsampleError if it is damaged, UnsupportedModelError if
    it is not plain LoRA."""
    try:
        options = read_json(path, _MAX_CONFIG_BYTES, infinities=True)
    except ValueError as error:
        raise QsampleError(
            f"{path} is not valid JSON ({error}); download the adapter again"
        ) from error
    if not isinstance(options, dict):
        raise QsampleError(
            f"{path} holds {shown(options, 60)}, and must hold an object; give the folder of a LoRA adapter"
        )
    _check_plain(options, path)
    ranks = []
    for text, pattern, value in _patterns(options, "rank", path):
        ranks.append((pattern, _rank(value, f"rank_pattern[{text!r}]", path)))
    alphas = []
    for text, pattern, value in _patterns(options, "alpha", path):
        alphas.append((pattern, _alpha(value, f"alpha_pattern[{text!r}]", path)))
    return LoraConfig(
        _rank(options.get("r", 8), "r", path),
        _alpha(options.get("lora_alpha", 8), "lora_alpha", path),
        ranks,
        alphas,
        _flag(options, "use_rslora", path),
    )


class Change(NamedTuple):
    """The change of a module's weight, scale * b a, with matrices from the adapter's file.

    Attributes:
        path: the path of the module.
        a, b: [rank, in] and [out, rank]; None if the adapter only has `base`.
        base: the weight itself, if the adapter has a copy of it: peft saves one with the LoRA of an
            embedding.
        scale: the factor of the product.
    """

    path: str
    a: Array | None
    b: Array | None
    base: Array | None
    scale: float


def read_changes(
    config_path: Path, weights_path: Path, max_bytes: int | None = None
) -> list[Change]:
    """The changes that an adapter makes, in order of their paths.

    Args:
        config_path: the file of the configuration.
        weights_path: the file of the matrices.
        max_bytes: the most bytes of that file that are read; None for any number.

    Raises QsampleError for files that cannot be read, for matrices without a partner, of another
    rank than the configuration's, or with numbers that are not finite, and for patterns that take
    long to match; UnsupportedModelError for more than plain LoRA.
    """
    config = read_config(config_path)
    parts_by_path = _read_parts(weights_path, max_bytes)
    changes = []
    began = time.monotonic()
    for path, parts in sorted(parts_by_path.items()):
        if time.monotonic() - began > _MAX_MATCHING_SECONDS:
            raise QsampleError(
                f"{config_path}: its patterns take more than {_MAX_MATCHING_SECONDS:.0f} s to match; give fewer"
            )
        _check_pair(weights_path, path, parts, config.rank_of(path))
        changes.append(
            Change(path, parts.get("A"), parts.get("B"), parts.get("base"), config.scale_of(path))
        )
    if all(change.a is None for change in changes):
        raise QsampleError(
            f"{weights_path} holds no LoRA matrices; give the adapter that was trained"
        )
    return changes


def _read_parts(weights_path: Path, max_bytes: int | None) -> dict[str, dict[str, Array]]:
    """The matrices "A", "B" and "base" of each module, by its path. Raises as `read_changes`
    does."""
    try:
        with TensorFile(weights_path, max_bytes) as file:
            tensors = {name: file.read(name) for name in file.tensors}
    except (OSError, ValueError, MemoryError) as error:
        raise QsampleError(
            f"{weights_path} cannot be read ({error!s:.200}); download the adapter again"
        ) from error
    parts: dict[str, dict[str, Array]] = {}
    for name, tensor in sorted(tensors.items()):
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(
                f"{weights_path} holds {name:.200}, which does not belong to a pair of LoRA matrices; {ADVICE}"
            )
        part = match["linear"] or match["embedding"] or "base"
        parts.setdefault(match["path"], {})[part] = tensor
        if tensor.ndim != 2 or not _is_finite(tensor):
            dtype = "bfloat16" if tensor.dtype == np.uint16 else tensor.dtype.name
            raise QsampleError(
                f"{weights_path}: {name:.200} is {dtype} {list(tensor.shape)}; it must be a matrix of finite floats"
            )
    return parts


def _check_pair(weights_path: Path, path: str, parts: Mapping[str, Array], rank: int) -> None:
    """Raise QsampleError unless a module has both matrices A and B, or none, and these have the
    rank of the configuration."""
    a = parts.get("A")
    b = parts.get("B")
    if (a is None) != (b is None):
        raise QsampleError(
            f"{weights_path} holds matrix {'A' if b is None else 'B'} of {path} without its partner"
        )
    if a is not None and b is not None and (len(a), b.shape[1]) != (rank, rank):
        raise QsampleError(
            f"{weights_path}: the matrices of {path} are {list(a.shape)} and {list(b.shape)}, and the rank that "
            f"{CONFIG} gives it is {rank}"
        )


def floats(matrix: Array) -> Array:
    """A float32 copy of a matrix of a `Change`."""
    if matrix.dtype == np.uint16:
        return (matrix.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return matrix.astype(np.float32)


def _is_finite(matrix: Array) -> bool:
    """Whether all numbers are finite floats. A uint16 matrix holds the bits of bfloat16."""
    if matrix.dtype == np.uint16:
        return bool(((matrix & 0x7F80) != 0x7F80).all())
    return matrix.dtype.kind == "f" and bool(np.isfinite(matrix).all())


def _first_match(patterns: Sequence[tuple[re.Pattern[str], T]], path: str, other: T) -> T:
    """The value of the first of `patterns` that matches, as in peft; `other` if none matches."""
    return next((value for pattern, value in patterns if pattern.match(path)), other)


def _check_plain(options: Mapping[str, Any], path: Path) -> None:
    kind = options.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{path}: an adapter of type {kind!s:.60} cannot be used here, only plain LoRA; {ADVICE}"
        )
    known = {*_READ_FIELDS, *_FIELDS_WITHOUT_EFFECT}
    asked = [name for name in sorted(options) if name not in known and options[name]]
    if options.get("bias", "none") != "none":
        asked.append("bias")
    if options.get("init_lora_weights", True) not in _PLAIN_INITIALISATIONS:
        asked.append(f"init_lora_weights={shown(options['init_lora_weights'], 60)}")
    if asked:
        raise UnsupportedModelError(
            f"{path}: an adapter with {', '.join(asked):.300} cannot be used here, only plain LoRA; {ADVICE}"
        )


def _patterns(
    options: Mapping[str, Any], kind: str, path: Path
) -> list[tuple[str, re.Pattern[str], Any]]:
    """The patterns of ranks or alphas, each with its text, compiled, and with its value. A pattern
    matches the path of a module whose end it matches, after a dot or from the beginning."""
    name = f"{kind}_pattern"
    patterns = options.get(name) or {}
    if not isinstance(patterns, dict):
        raise QsampleError(
            f"{path}: {name} is {shown(patterns, 60)}; it must be an object, from patterns to numbers"
        )
    compiled = []
    left = _MAX_WAYS_OF_ALL_PATTERNS - len(patterns)  # Each pattern has at least one way.
    for pattern, value in patterns.items():
        try:
            ways = _ways(pattern)
            if ways > _MAX_WAYS_OF_A_PATTERN or ways - 1 > left:
                raise ValueError(
                    "it is not simple"
                    if math.isinf(ways)
                    else "there are too many ways to match it"
                )
            left -= int(ways) - 1
            compiled.append((pattern, re.compile(rf"(.*\.)?({pattern})$"), value))
        except (ValueError, re.error) as error:
            raise QsampleError(
                f"{path}: {name} holds {pattern!r:.80}, which is not a regular expression that can be taken ({error}); "
                r"give fewer, of names, dots, \d, [...], two of * and + at most, and groups (a|b) that are not repeated"
            ) from error
    return compiled


def _ways(pattern: str) -> float:
    """The most ways to match a pattern that are tried at a place of a path; infinite for patterns
    that are not simple."""
    if len(pattern) > _MAX_PATTERN_CHARACTERS or not _PATTERN.fullmatch(pattern):
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
