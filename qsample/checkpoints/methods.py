"""The method that quantized the weights of a checkpoint, by its config.json, and the interface of
its reader.

The readers are add-ons: each registers a `QuantizationMethod` in the group `qsample.checkpoints`,
under the `quant_method` of config.json. Nothing heavy is imported here: a checkpoint that cannot be
read is refused before torch is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from qsample.errors import UnsupportedModelError, shown
from qsample.extensions import CHECKPOINTS, extension_names, load_extension

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from qsample.checkpoints.stored_matrices import FloatMatrix, StoredMatrix

ADVICE: Final = (
    "export the unquantized checkpoint that it was made from, and compile that with weights='int4'"
)
# The methods whose weights transformers turns into float32 on request, and how many times larger
# they then are.
AS_FLOAT: Final = {"fp8": 4.0, "mxfp4": 7.5}
# The keys of a config.json that state a quantization: transformers', compressed-tensors' until
# 2024, and MLX's.
CONFIG_KEYS: Final = ("quantization_config", "compression_config", "quantization")


class Format(Protocol):
    """How the weights of quantized layers are stored: a layer's tensors enter, its weight
    leaves."""

    @property
    def mark(self) -> str:
        """The end of the name of a tensor that every quantized layer has, and no other layer."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The ends of the names of all tensors of such weights."""

    @property
    def unread(self) -> tuple[str, ...]:
        """The ends of the names of tensors that change no weight."""

    def matrix(self, layer: str, parts: Mapping[str, Tensor]) -> StoredMatrix | FloatMatrix:
        """The weight of a layer. Raises ValueError for a missing part, or parts that do not fit."""


class QuantizationMethod(ABC):
    """A method of quantization whose packed weights can be read.

    The module of a registered object imports torch and transformers only when `format_of` is
    called.
    """

    def options_in(self, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The options of this method in a config.json that names no `quant_method`; None if they
        are another method's, or if this method always writes its name."""
        return None

    @abstractmethod
    def format_of(
        self, options: Mapping[str, Any], config: PretrainedConfig, model_id: str
    ) -> Format:
        """How the weights are stored.

        Args:
            options: the options of the method in the configuration.
            config: the model's configuration, without its quantization.
            model_id: the model's name, for messages.

        Raises:
            UnsupportedModelError: for weights of this method that cannot be read.
        """


@dataclass(frozen=True, slots=True)
class StatedQuantization:
    """A quantization that a config.json states.

    Attributes:
        method: a key of `AS_FLOAT`, or the name of a registered method.
        options: the options of the method in the configuration.
    """

    method: str
    options: Mapping[str, Any]


def stated_quantization(config: Mapping[str, Any], name: str) -> StatedQuantization | None:
    """The quantization that a configuration states; None for float weights.

    Args:
        config: the configuration, as in config.json.
        name: the model's name, for messages.

    Raises:
        UnsupportedModelError: for a method that cannot be read.
    """
    options = config.get("quantization_config")
    if options is None:
        options = config.get("compression_config")
    method = options.get("quant_method") if isinstance(options, Mapping) else None
    if method is None:
        recognised = _recognised(config)
        if recognised is not None or options is None:
            return recognised
    if not isinstance(options, Mapping):
        raise UnsupportedModelError(
            f"{name}: quantization_config is {shown(options, 60)}; it must be an object with a quant_method"
        )
    method_name = str(getattr(method, "value", method)).lower()
    registered = extension_names(CHECKPOINTS)
    if method_name not in registered and method_name not in AS_FLOAT:
        raise UnsupportedModelError(
            f"{name} is quantized with {method_name:.60}; only {_enumerated(['float weights', *registered])} can be "
            f"read (and {_enumerated([*AS_FLOAT])}, which become float); {ADVICE}"
        )
    return StatedQuantization(method_name, options)


def _recognised(config: Mapping[str, Any]) -> StatedQuantization | None:
    """The quantization of a configuration without a `quant_method`, if a registered method
    recognises its options."""
    if all(config.get(key) is None for key in CONFIG_KEYS):
        return None
    for name in extension_names(CHECKPOINTS):
        method: QuantizationMethod = load_extension(CHECKPOINTS, name)
        options = method.options_in(config)
        if options is not None:
            return StatedQuantization(name, options)
    return None


def _enumerated(names: list[str]) -> str:
    """The names, separated by commas and "and"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
