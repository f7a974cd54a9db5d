"""What a device package is compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qsample.exporters.compiler.quantize.weights import WeightQuantization
from qsample.tensors import Array


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What a device package is compiled for.

    batch_size: most rows in one call; None = any number. ctx_len: capacity T of the state buffers, in tokens. dtype: of
    the model and, unless kv_cache_dtype is "int8", of its cache. pad_token_id: the package's. weights: how to quantize
    them; None = not. store_float16: whether float32 weights are stored in float16. cache_ranges: for an int8 cache, the
    largest absolute value of each channel of each cache state, [H, D] by the state's name. packed_weights: whether the
    portable graph holds weights that came packed; they stay so.
    """

    batch_size: int | None
    ctx_len: int
    dtype: str = "float32"
    pad_token_id: int = 0
    weights: WeightQuantization | None = None
    store_float16: bool = False
    kv_cache_dtype: str | None = None
    cache_ranges: Mapping[str, Array] | None = None
    packed_weights: bool = False

    @property
    def quantized(self) -> bool:
        """Whether the model computes something else than the portable graph, beyond rounding. Packed weights do: their
        fast kernels take activations in 8 bits."""
        return self.weights is not None or self.store_float16 or self.kv_cache_dtype is not None or self.packed_weights
