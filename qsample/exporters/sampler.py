"""An `Interface` enters; the sampler as a graph of its own leaves: `sampler.onnx`, or what a decode graph ends with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import onnx
import onnx_ir as ir
from torch import Tensor, nn

from qsample.contract import LOGITS, Features, Interface
from qsample.exporters.control_flow import outline_branches
from qsample.exporters.sampler_rewrites import simplify
from qsample.exporters.trace import trace
from qsample.transforms.sampler import Sampler
from qsample.transforms.sampler.branching import inline_branches


class _FromLogits(nn.Module):
    """The sampler with its logits among the named inputs."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self.sampler = sampler

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rest = {name: tensor for name, tensor in inputs.items() if name != LOGITS.name}
        results: dict[str, Tensor] = self.sampler(inputs[LOGITS.name], rest)
        return results


def export_sampler(
    interface: Interface,
    pad_token_id: int,
    *,
    num_candidates: int | None = None,
    chunk_size: int | None = None,
    control_flow: bool = True,
    resumes: bool = False,
) -> ir.Model:
    """`sampler.onnx`: logits in, next-token ids and new state out. The options are those of `Sampler`."""
    features = replace(interface.features, sampler=True)  # in a graph of its own or in the decoder's, it is the same
    options = (num_candidates, chunk_size, control_flow, resumes)
    traced = _trace(interface.vocab_size, features, pad_token_id, *options)
    return ir.from_proto(onnx.load_model_from_string(traced))


# Tracing takes half a minute and depends on nothing else of a model; the bytes are a few hundred kilobytes.
@functools.lru_cache(maxsize=16)
def _trace(
    vocab_size: int,
    features: Features,
    pad_token_id: int,
    num_candidates: int | None,
    chunk_size: int | None,
    control_flow: bool,
    resumes: bool,
) -> bytes:
    """The serialized graph."""
    interface = Interface(vocab_size, (), features=features)
    sampler = Sampler(
        interface,
        pad_token_id,
        num_candidates=num_candidates,
        chunk_size=chunk_size,
        control_flow=control_flow,
        resumes=resumes,
    )
    with inline_branches():
        model = trace(_FromLogits(sampler), interface.sampler, interface.sizes)
    simplify(model, bool_maximum=control_flow and not resumes)
    outline_branches(model)
    return bytes(ir.to_proto(model).SerializeToString())
