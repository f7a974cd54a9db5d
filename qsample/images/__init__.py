"""Images → the pixels that vision.onnx reads, and the rows of image features that stand in a
prompt."""
