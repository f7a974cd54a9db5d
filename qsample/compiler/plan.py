"""`CompilePlan`: everything that compile works out from a package and its options, before any work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from qsample.compiler.options import DEFAULT_CTX_LEN, CompileOptions
from qsample.compiler.quantize import INT_BITS, PRESETS
from qsample.compiler.quantize.kv_cache import BITS
from qsample.compiler.quantize.methods import WeightQuantization
from qsample.contract.interface import Interface
from qsample.errors import CompileError
from qsample.package.package import Package


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """What compile works out from a package and its options.

    Attributes:
        source: the portable package.
        options: the options of compile.
        interface: the interface of the compiled package.
        ctx_len: the capacity T of the state buffers, in tokens.
        dtype: the dtype of the model and, without kv_cache_dtype, of its cache.
        weights: how the weights are quantized; None leaves them as they are. A table may give a matrix other bits.
        store_float16: whether float32 weights are stored in float16.
        kv_cache_dtype: "int8", "int4", or None for the model's dtype.
    """

    source: Package
    options: CompileOptions
    interface: Interface
    ctx_len: int
    dtype: str
    weights: WeightQuantization | None = None
    store_float16: bool = False
    kv_cache_dtype: str | None = None

    @property
    def decoder(self) -> Path:
        """The portable decode graph."""
        return self.source.path / "decoder.onnx"

    @property
    def batch_size(self) -> int | None:
        """The most rows of a call; None for any number."""
        return self.options.batch_size

    @property
    def needs_new_attention(self) -> bool:
        """Whether the graph uses what GroupQueryAttention has from STEPS_ONNXRUNTIME on."""
        return self.options.num_speculative_tokens > 0 or self.interface.slides

    @property
    def pad_token_id(self) -> int:
        return self.source.manifest.token_ids.pad

    @property
    def calibrated(self) -> bool:
        """Whether quantized weights are fitted to a text."""
        return self.weights is not None and self.options.calibrated

    @property
    def expert_weights(self) -> WeightQuantization | None:
        """How to quantize the experts of mixtures. They are not fitted: in large blocks they would lose more than with
        the preset that fits nothing. QMoE has no kernels of 2 bits, and no zero points in those of 4."""
        if self.weights is None:
            return None
        smaller = self.calibrated and self.options.block_size is None
        size = PRESETS["quick"].block_size if smaller else self.weights.block_size
        return replace(
            self.weights, bits=max(self.weights.bits, 4), block_size=size, zero_points=False
        )

    @property
    def packed_weights(self) -> bool:
        """Whether the portable graph holds weights that were quantized in the checkpoint; they stay so."""
        return self.source.manifest.packed_weights is not None

    @property
    def quantized(self) -> bool:
        """Whether the model computes other numbers than the portable graph, beyond rounding. Packed weights do: their
        fast kernels take activations in 8 bits."""
        return (
            self.weights is not None
            or self.store_float16
            or self.kv_cache_dtype is not None
            or self.packed_weights
        )


def make_plan(source: Package, options: CompileOptions) -> CompilePlan:
    """The plan, still with the portable package's interface; CompileError if `source` and `options` do not fit."""
    own = source.interface.dtype
    if source.manifest.kind != "portable":
        raise CompileError(
            f"{source.path} is already compiled; compile the portable package that it was made from"
        )
    plan = CompilePlan(
        source,
        options,
        replace(
            source.interface,
            features=replace(
                source.interface.features, num_speculative_tokens=options.num_speculative_tokens
            ),
        ),
        ctx_len=_ctx_len(source, options.ctx_len),
        dtype=own if options.dtype is None else options.dtype,
        weights=_weights(source, options),
        store_float16=options.weights == "float16" and own == "float32",
        kv_cache_dtype=_kv_cache_dtype(options, own if options.dtype is None else options.dtype),
    )
    _check_cache(plan)
    return plan


def _ctx_len(source: Package, asked: int | None) -> int:
    limit = source.manifest.max_position_embeddings
    if asked is None:
        return min(DEFAULT_CTX_LEN if limit is None else limit, DEFAULT_CTX_LEN)
    if limit is not None and asked > limit:
        raise CompileError(
            f"ctx_len is {asked}; it must be 2 to {limit}, the model's max_position_embeddings"
        )
    return asked


def _weights(source: Package, options: CompileOptions) -> WeightQuantization | None:
    own = source.interface.dtype
    weights = options.weights
    if weights is None or weights == own or (weights, own) == ("float16", "float32"):
        return None
    if not options.quantizes:
        choices = [*INT_BITS, *(["float16"] if own == "float32" else []), own]
        raise CompileError(
            f"weights is {weights!r} and the package holds {own}; choose one of {', '.join(choices)}"
        )
    preset = PRESETS[options.preset]
    size = preset.block_size if options.block_size is None else options.block_size
    return WeightQuantization(options.bits, size, preset.method, zero_points=True)


def _kv_cache_dtype(options: CompileOptions, own: str) -> str | None:
    asked = options.kv_cache_dtype
    if asked not in (None, own, *BITS):
        choices = ", ".join(map(repr, BITS))
        raise CompileError(
            f"kv_cache_dtype is {asked!r} and the package holds {own}; choose that, or {choices}"
        )
    return None if asked == own else asked


def _check_cache(plan: CompilePlan) -> None:
    source = plan.source
    plain = (source.manifest.parity or {}).get("plain_attention_layers", 0)
    if plan.kv_cache_dtype is not None and (plain or source.interface.recurrent):
        raise CompileError(
            f"kv_cache_dtype={plan.kv_cache_dtype!r} needs GroupQueryAttention in every layer; {plain} layers of "
            f"this model attend through plain operators, and {len(source.interface.recurrent)} of its states are no "
            "keys or values; leave kv_cache_dtype out"
        )
    if plan.kv_cache_dtype == "int4":
        odd = sorted(
            {shape.head_dim for shape in source.interface.key_values if shape.head_dim % 2 != 0}
        )
        image = source.interface.image
        if odd or (image is not None and image.blockwise):
            why = (
                f"has heads of {odd[0]} numbers"
                if odd
                else "reads images whose tokens see each other"
            )
            raise CompileError(
                f"kv_cache_dtype is 'int4', two numbers in a byte, and this model {why}; take 'int8'"
            )
