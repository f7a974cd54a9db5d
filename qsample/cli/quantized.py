"""What a manifest says of quantized weights, in words and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qsample.cli.terminal import note
from qsample.errors import QsampleError

if TYPE_CHECKING:
    from qsample.package.package import Package


def note_divergence(package: Package) -> None:
    """Say how far a package is from its float model; nothing of one whose numbers are the float model's."""
    from qsample.package.divergence import FAR, Divergence

    if (found := Divergence.of(package)) is None:
        return
    note(f"beside its float model: {found}")
    if found.far:
        note(
            f"this is far: above a KL of {FAR:g}, answers may say other things than the float model's; compile it with "
            "--preset balanced or --weights int8"
        )


def divergence_in_words(package: Package) -> str:
    """The measured divergence; empty if nothing is quantized, and "unknown" if an older version measured it."""
    from qsample.package.divergence import Divergence

    compilation = package.manifest.compilation
    if compilation is None or compilation.quantization is None:
        return ""
    return str(
        Divergence.of(package) or "unknown: measured by an older version; compile the package again"
    )


def table_of_bits(package: Package) -> dict[str, str]:
    """The name of each quantized matrix → its bits and block size. Raises QsampleError without any."""
    compilation = package.manifest.compilation
    quantization = (compilation.quantization if compilation is not None else None) or {}
    table_of_bits = quantization.get("bits")
    if not isinstance(table_of_bits, dict) or not table_of_bits:
        raise QsampleError(
            f"{package.path} has no table of bits: compile quantized none of its weights; give a package that was "
            "compiled with --weights int4, int8 or int2"
        )
    return table_of_bits


def quantization_in_words(figures: Any) -> str:
    """The manifest's figures of a quantization: "int4 weights in blocks of 32 (quick, rtn), 28 matrices, ..."."""
    parts = []
    if "dtype" in figures:
        mib_before, mib_after = (figures[f"bytes_{when}"] / 2**20 for when in ("before", "after"))
        sizes = " and ".join(map(str, figures.get("block_sizes") or [figures.get("block_size")]))
        method = ", ".join(figures[key] for key in ("preset", "method") if key in figures)
        blocks = f" in blocks of {sizes} ({method})" if "block_size" in figures else ""
        parts.append(
            f"{figures['dtype']} weights{blocks}, {figures['matrices']} matrices{_experts(figures)}, "
            f"{mib_after:.1f} MiB, {mib_before:.1f} as float"
        )
        if figures.get("float_bytes"):
            parts.append(f"{figures['float_bytes'] / 2**20:.1f} MiB still float")
    if "packed_matrices" in figures:
        parts.append(f"{figures['packed_matrices']} matrices as the checkpoint packed them")
    if "kv_cache_dtype" in figures:
        parts.append(f"{figures['kv_cache_dtype']} keys and values")
    return "; ".join(parts)


def _experts(figures: Any) -> str:
    count, blocks = figures.get("experts"), figures.get("expert_block_size")
    if not count:
        return ""
    return f" and {count} experts" + (
        f" (blocks of {blocks})" if blocks != figures.get("block_size") else ""
    )
