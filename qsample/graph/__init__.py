"""Operations on ONNX graphs that export and compile share: edit, join, run."""
