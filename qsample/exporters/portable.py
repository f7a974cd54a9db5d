"""A graph that returns logits enters, wherever it came from; the ONNX files and the manifest of a portable package
leave: the sampler behind it or beside it, and the starting state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

import qsample
from qsample.contract import CONTRACT_VERSION
from qsample.exporters.initial_state import build_initial_state
from qsample.exporters.parity import Parity
from qsample.graph.join import append_sampler
from qsample.graph.weights import narrow_weights, save_beside
from qsample.interface import Interface
from qsample.manifest import Manifest, Source, TokenIds
from qsample.sampler import build_sampler


def write_graphs(
    model: ir.Model, interface: Interface, pad_token_id: int, folder: Path, *, refer: bool = False
) -> None:
    """Write every ONNX file of `interface.graphs` into `folder`, and the weights of `model` beside `decoder.onnx`.

    Args:
        model: its inputs and outputs are those of `interface.model`. With a sampler among the features it is changed in
            place and has those of `interface.decoder` afterwards.
        pad_token_id: `next_ids` of a row that emitted nothing.
        refer: leave weights that lie in other files there (`stored.save_beside`), for a package that is not published.
    """
    sampler = build_sampler(interface, pad_token_id)
    if interface.features.sampler:
        append_sampler(model, sampler, interface.decoder)
    else:
        ir.save(sampler, folder / "sampler.onnx")
    if refer:
        save_beside(model, folder, "decoder.onnx")
    else:
        narrow_weights(model)
        ir.save(model, folder / "decoder.onnx", external_data="decoder.onnx.data")
    ir.save(build_initial_state(interface), folder / "initial_state.onnx")


def portable_manifest(
    interface: Interface,
    source: Source,
    token_ids: TokenIds,
    parity: Parity,
    *,
    max_position_embeddings: int | None,
    packed_weights: Mapping[str, Any] | None = None,
    libraries: Sequence[str] = (),
) -> Manifest:
    """What a portable package says of itself; `package.PackageWriter.finish` adds its files.

    libraries: distributions, besides qsample, onnxruntime and onnx, whose versions it shall name. The rest is as in
    `Manifest`.
    """
    return Manifest(
        kind="portable",
        contract_version=CONTRACT_VERSION,
        interface=interface,
        source=source,
        versions=_versions(libraries),
        token_ids=token_ids,
        max_position_embeddings=max_position_embeddings,
        parity=asdict(parity),
        packed_weights=packed_weights,
    )


def _versions(libraries: Sequence[str]) -> dict[str, str]:
    """ONNX Runtime has several distributions, so it is asked itself."""
    installed = {name: version(name) for name in (*libraries, "onnx")}
    return {"qsample": qsample.__version__, "onnxruntime": str(ort.__version__), **installed}
