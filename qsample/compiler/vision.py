"""vision.onnx of a portable package enters; that of a device package, compared with it, leaves.

The tower computes in float32 on every device, because it reads an image once and each token of its answer depends on
the result. Its weights are stored in float16 unless the decoder's stay in float32; a session makes them float32 again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from qsample.compiler.passes.fusions import fuse_operators
from qsample.compiler.pipeline import apply, load_optimized
from qsample.compiler.plan import CompilePlan
from qsample.compiler.quantize.float16 import store_as_float16
from qsample.compiler.write import optimize_file
from qsample.contract.arrays import DTYPES, Array
from qsample.contract.tensors import GRID, PIXEL_VALUES
from qsample.errors import CompileError
from qsample.exporters.parity import TOLERANCES, rounded_up
from qsample.graph.compare import largest_finite
from qsample.graph.save import save_graph
from qsample.graph.vision import furthest, give_features_as, vision_session
from qsample.graph.weights import load_graph, widen_weights
from qsample.ort.providers import CPU
from qsample.ort.session import VISION, open_vision
from qsample.package.package import Package

# Further digits of a cosine depend on the number of threads.
_COSINE_DIGITS: Final = 6


def compile_vision(
    plan: CompilePlan, providers: Sequence[str], folder: Path, scratch: Path
) -> None:
    """Write vision.onnx and its weights into `folder`, in fused operators; for the CPU, optimised offline, too."""
    on_cpu = tuple(providers) == (CPU,)
    model = load_graph(plan.source.path / VISION)
    widen_weights(model)
    give_features_as(model, ir.DataType(DTYPES[plan.interface.dtype].onnx))
    apply(model, partial(fuse_operators, provider="cpu" if on_cpu else "cuda"))
    if on_cpu:
        source = scratch / VISION
        optimized = scratch / f"optimized-{VISION}"
        save_graph(model, source)
        # As of a decode graph: all that any CPU of the architecture runs.
        optimize_file(source, optimized, providers, ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED)
        model = load_optimized(optimized)
    if _stored_in_float16(plan):
        store_as_float16(model)
    save_graph(model, folder / VISION)


def compare_vision(plan: CompilePlan, published: Package) -> dict[str, Any]:
    """Figures for the manifest's self-test: the least cosine of an image's features and those that the portable graph
    makes of the same pixels, and the largest difference. Raises CompileError if it is more than the tolerance of the
    dtype that the weights or the result have."""
    images = [_image(shapes) for shapes in (plan.source.manifest.parity or {})["vision_images"]]
    portable = vision_session(plan.source.path)
    wanted = [_as_float32(portable.features(*image)) for image in images]
    del portable  # before the next session has its weights
    session = open_vision(published)
    got = [_as_float32(session.features(*image)) for image in images]
    error = float(np.max([furthest(*pair) for pair in zip(got, wanted, strict=True)]))
    exact = plan.interface.dtype == "float32" and not _stored_in_float16(plan)
    most = TOLERANCES["float32" if exact else "float16"] * max(1.0, largest_finite(*wanted))
    cosine = min(_cosine(*pair) for pair in zip(got, wanted, strict=True))
    if not error <= most:  # NaN must not pass
        raise CompileError(
            f"self-test failed: features of {VISION} compiled for {plan.options.provider} differ from the portable "
            f"graph's by {error:.3g}, more than {most:.3g}, with a cosine of {cosine:.4f}; take weights='float32', or "
            "report it with the versions of onnxruntime and transformers"
        )
    return {
        "vision_max_error": rounded_up(error, most),
        "vision_cosine": round(cosine, _COSINE_DIGITS),
    }


def _stored_in_float16(plan: CompilePlan) -> bool:
    return plan.weights is not None or plan.store_float16


def _image(shapes: dict[str, list[int]]) -> tuple[Array, list[int] | None]:
    """Random pixels of a shape that was compared at export, and its grid."""
    pixels = np.random.default_rng(0).standard_normal(shapes[PIXEL_VALUES], np.float32)
    return pixels, shapes.get(GRID.name)


def _as_float32(rows: Array) -> Array:
    bfloat16 = rows.dtype == np.uint16
    return (rows.astype(np.uint32) << 16).view(np.float32) if bfloat16 else rows.astype(np.float32)


def _cosine(one: Array, other: Array) -> float:
    return float((one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum()))
