"""Decoder files that others exported, given the sampler: onnxruntime-genai's, onnx-community's, optimum's."""
