"""The quantized weights of a package, in words and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from qsample.cli.terminal import note
from qsample.errors import QsampleError

if TYPE_CHECKING:
    from qsample.package.package import Package

_MIB: Final = 2**20  # bytes


def note_divergence(package: Package) -> None:
    """Print a remark on the divergence of a package from its float model, if it was measured."""
    from qsample.package.divergence import FAR, Divergence

    divergence = Divergence.of(package)
    if divergence is None:
        return
    note(f"beside its float model: {divergence}")
    if divergence.far:
        note(
            f"this is far: above a KL of {FAR:g}, answers may say other things than the float model's; compile it with "
            "--preset balanced or --weights int8"
        )


def divergence_in_words(package: Package) -> str:
    """The divergence of a package from its float model.

    It is empty if nothing is quantized, and begins with "unknown" if an older version measured it.
    """
    from qsample.package.divergence import Divergence

    compilation = package.manifest.compilation
    if compilation is None or compilation.quantization is None:
        return ""
    divergence = Divergence.of(package)
    if divergence is None:
        return "unknown: measured by an older version; compile the package again"
    return str(divergence)


def table_of_bits(package: Package) -> dict[str, str]:
    """The name of each quantized matrix → its bits and block size.

    Raises:
        QsampleError: compile quantized no matrix.
    """
    compilation = package.manifest.compilation
    quantization = None if compilation is None else compilation.quantization
    bits = (quantization or {}).get("bits")
    if not isinstance(bits, dict) or not bits:
        raise QsampleError(
            f"{package.path} has no table of bits: compile quantized none of its weights; give a package that was "
            "compiled with --weights int4, int8 or int2"
        )
    return bits


def quantization_in_words(figures: Any) -> str:
    """The figures of a quantization, in words: "int4 weights in blocks of 32 (quick, rtn), ...".

    Args:
        figures: the quantization of a manifest.
    """
    parts: list[str] = []
    if "dtype" in figures:
        parts.append(_weights_in_words(figures))
        if figures.get("float_bytes"):
            parts.append(f"{figures['float_bytes'] / _MIB:.1f} MiB still float")
    if "packed_matrices" in figures:
        experts = f" and {figures['packed_experts']} experts" if "packed_experts" in figures else ""
        parts.append(
            f"{figures['packed_matrices']} matrices{experts} as the checkpoint packed them"
        )
    if "kv_cache_dtype" in figures:
        parts.append(f"{figures['kv_cache_dtype']} keys and values")
    return "; ".join(parts)


def _weights_in_words(figures: Any) -> str:
    """The type, blocks, matrices and sizes of the quantized weights."""
    blocks = ""
    if "block_size" in figures:
        block_sizes = figures.get("block_sizes") or [figures["block_size"]]
        sizes = " and ".join(str(size) for size in block_sizes)
        method = ", ".join(figures[key] for key in ("preset", "method") if key in figures)
        blocks = f" in blocks of {sizes} ({method})"
    mib_before = figures["bytes_before"] / _MIB
    mib_after = figures["bytes_after"] / _MIB
    return (
        f"{figures['dtype']} weights{blocks}, {figures['matrices']} matrices{_experts(figures)}, "
        f"{mib_after:.1f} MiB, {mib_before:.1f} as float"
    )


def _experts(figures: Any) -> str:
    """The number of experts, and the size of their blocks if it is not that of other matrices."""
    count = figures.get("experts")
    if not count:
        return ""
    block_size = figures.get("expert_block_size")
    if block_size == figures.get("block_size"):
        return f" and {count} experts"
    return f" and {count} experts (blocks of {block_size})"
