"""The sampler as a component of ONNX workflows: `qsample policy`; docs/standard.md."""
