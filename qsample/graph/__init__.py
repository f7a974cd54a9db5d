"""Operations on ONNX graphs that export and compile share: edits, joins, weights, saving, runs."""
