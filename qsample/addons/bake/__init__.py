"""Decoder files of other exporters, given the sampler: onnxruntime-genai's, onnx-community's,
optimum's."""
