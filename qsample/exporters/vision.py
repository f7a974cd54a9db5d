"""A Hugging Face model that reads images enters; vision.onnx, compared with the model's tower,
leaves.

The tower computes in float32; weights that are stored in half precision stay so, and the result has
the interface's dtype. The comparison runs the graph as the runtime does: fusions for ONNX Runtime
have turned a rotation in two dimensions into one in a single dimension
(https://github.com/onnxruntime/mobius/issues/151)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from transformers import PreTrainedModel

from qsample.contract.arrays import DTYPES, Array
from qsample.contract.interface import Interface
from qsample.contract.tensors import PIXEL_VALUES
from qsample.errors import ParityError
from qsample.exporters.lowering import fill_placeholders
from qsample.exporters.parity import TOLERANCES, rounded_up
from qsample.exporters.trace import trace
from qsample.graph.compare import largest_finite
from qsample.graph.save import MAX_INLINE_BYTES
from qsample.graph.vision import compute_in_float32, furthest, give_features_as, vision_session
from qsample.graph.weights import narrow_weights, save_beside
from qsample.ort.session import VISION
from qsample.transforms.deferred import computing
from qsample.transforms.vision import RandomImage, VisionModule, attention_of, vision_module

# The compared images have fewer or more rows and columns, of features or of tiles, than the image
# in the trace.
_FEATURE_SIZES: Final = ((2, 3), (5, 6), (1, 7))
_TILE_SIZES: Final = ((1, 2), (1, 1), (3, 1))


def write_vision(
    model: PreTrainedModel, folder: Path, interface: Interface, *, refer: bool = False
) -> dict[str, Any]:
    """Write vision.onnx and its weights into `folder`, compare it, and return the figures for the
    manifest's `parity`.

    Args:
        model: the model, in eval mode on the CPU; nothing of it changes.
        folder: the folder of the package.
        interface: the interface of the package, which has an `ImageShape`.
        refer: whether weights stay in other files (`weights.save_beside`).

    Raises:
        UnsupportedModelError: the tower cannot be exported.
        ParityError: its features differ.
    """
    module = vision_module(model).eval()
    spec = interface.vision
    example = module.example
    axes = {
        axis: size
        for one in spec.inputs
        for axis, size in zip(one.axes, example[one.name].shape, strict=True)
    }
    sizes = {
        axis: int(size)
        for axis, size in axes.items()
        if isinstance(axis, str) and axis not in module.free
    }
    graph = trace(module, spec, sizes, examples=example)
    fill_placeholders(graph)
    compute_in_float32(graph)
    give_features_as(graph, ir.DataType(DTYPES[interface.dtype].onnx))
    if refer:
        save_beside(graph, folder, VISION)
    else:
        narrow_weights(graph)
        # Small constants decide shapes, which onnx infers from this file alone.
        ir.save(
            graph,
            folder / VISION,
            external_data=f"{VISION}.data",
            size_threshold_bytes=MAX_INLINE_BYTES,
        )
    del graph
    return compare_vision(model, module, folder, interface.dtype)


def compare_vision(
    model: PreTrainedModel, module: VisionModule, folder: Path, dtype: str
) -> dict[str, Any]:
    """The figures of a passed comparison of vision.onnx in `folder` with `model`; else as
    `write_vision`."""
    images = [module.image(*size) for size in (_TILE_SIZES if module.by_tiles else _FEATURE_SIZES)]
    wanted = list(_features(model, module, images))
    scale = largest_finite(*wanted)
    most = TOLERANCES[dtype] * max(1.0, scale)

    def error(level: ort.GraphOptimizationLevel | None = None) -> float:
        session = vision_session(folder, level)
        results = [session.features(image.pixels.numpy(), image.grid) for image in images]
        return float(
            np.max(
                [
                    furthest(got.astype(np.float32), rows)
                    for got, rows in zip(results, wanted, strict=True)
                ]
            )
        )

    found = error()
    if not found <= most:  # NaN must not pass
        fused = error(ort.GraphOptimizationLevel.ORT_DISABLE_ALL) <= most
        cause = ", because of ONNX Runtime's fusions" if fused else ""
        raise ParityError(
            f"the features that vision.onnx makes differ from those of the eager {type(module.tower).__name__} by "
            f"{found:.3g}, more than {most:.3g} ({TOLERANCES[dtype]:g} of the largest, {scale:.3g})"
            f"{cause}; export the text alone (--text-only)"
        )
    return {
        "vision_max_error": rounded_up(found, most),
        "vision_scale": scale,
        "vision_tolerance": most,
        "vision_images": [_sizes_of(image) for image in images],
    }


def _sizes_of(image: RandomImage) -> dict[str, list[int]]:
    """The shape of the pixels, and the grid itself."""
    return {
        name: list(tensor.shape) if name == PIXEL_VALUES else tensor.tolist()
        for name, tensor in image.inputs.items()
    }


def _features(
    model: PreTrainedModel, module: VisionModule, images: list[RandomImage]
) -> Iterator[Array]:
    """[F, C] float32 of each image, as transformers computes it from the pixels."""
    inner: Any = model.base_model
    with torch.no_grad(), computing(), attention_of(module.tower, "eager"):
        for image in images:
            pixels = image.arguments[PIXEL_VALUES].to(model.dtype)
            output = inner.get_image_features(**{**image.arguments, PIXEL_VALUES: pixels})
            parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
            rows = [torch.cat([one.flatten(0, -2) for one in part]) for part in parts]
            yield torch.cat(rows, -1).to(torch.float32).numpy()
