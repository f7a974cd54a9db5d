"""Tables over a model's vocabulary that an ONNX graph walks to keep an answer in its form."""
