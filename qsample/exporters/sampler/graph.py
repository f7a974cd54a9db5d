"""An `Interface` enters; the sampler as a graph of its own leaves: `sampler.onnx`, or what a decode graph ends with.

A trace of `transforms.sampler.Sampler` takes torch and half a minute, and differs from another in a few numbers and in
what was left out. So the package has templates (`template.py`), and this fills one in.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from qsample.contract import Interface, with_searched_rows
from qsample.exporters.control_flow import outline_branches
from qsample.exporters.sampler.template import fill_template, numbers
from qsample.transforms.sampler.sizes import choose_sizes, is_large


def export_sampler(
    interface: Interface,
    pad_token_id: int,
    *,
    num_candidates: int | None = None,
    chunk_size: int | None = None,
    control_flow: bool = True,
    resumes: bool = False,
) -> ir.Model:
    """`sampler.onnx`: logits in, next-token ids and new state out. The options are those of `Sampler`.

    Without control flow, it has the input `searched_rows` as well.
    """
    features = replace(interface.features, sampler=True)  # in a graph of its own or in the decoder's, it is the same
    interface = Interface(interface.vocab_size, (), features=features)
    vocab, default = interface.vocab_size, choose_sizes(interface.vocab_size)
    candidates = min(default.num_candidates if num_candidates is None else num_candidates, vocab)
    chunk = default.chunk_size if chunk_size is None else chunk_size
    if candidates < 1 or chunk < 1:
        raise ValueError("num_candidates and chunk_size must be at least 1")
    options = {
        "allowed_tokens": features.allowed_tokens,
        "logit_bias": features.logit_bias,
        "large_vocabulary": is_large(vocab),
        "all_candidates": candidates >= vocab,
        "pad_token": pad_token_id != 0,
    }
    kind = "resumes" if resumes else "control_flow" if control_flow else "straight"
    given, spec = numbers(interface, pad_token_id, candidates, chunk), interface.sampler
    model = fill_template(kind, given, options, spec if control_flow else with_searched_rows(spec))
    outline_branches(model)
    return model
