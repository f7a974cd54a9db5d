"""What export and compile both do to ONNX graphs: edit, join, run."""
