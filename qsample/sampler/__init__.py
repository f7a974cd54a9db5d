"""The sampler as an ONNX graph, built by a program: logits in, the next tokens and states out.

`build` has the flow of a step: `adjust` changes the logits; `blocks` finds the largest of them; in
`draw`, `filters` take tokens away from a pool (`pools`), with thresholds from `search`, and a token
is drawn from the rest; `commit` computes the next states and the outputs. `tensor` has the
operators that all of them use. If a step checks guesses, `guess` has the graph before the model,
and the sampler after it.
"""

from qsample.sampler.build import build_sampler

__all__ = ["build_sampler"]
