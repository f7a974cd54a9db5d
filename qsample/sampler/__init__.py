"""The sampler as an ONNX graph, built by a program: logits in, the next token id and the next state of each row out.

`build` has the flow of a step: `adjust` changes the logits; `blocks` finds the largest; in `draw`, `filters` take
tokens away from a pool (`pools`), with thresholds from `search`, and the pool draws; `commit` gives the next states and
the outputs. `tensor` has the operators. For steps that check guesses, `guess` has the graph before the model, and the
sampler.
"""

from qsample.sampler.build import build_sampler

__all__ = ["build_sampler"]
