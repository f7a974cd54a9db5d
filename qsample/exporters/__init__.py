"""A module enters; its ONNX graph, then a device package made from it, leave."""
