"""ONNX Runtime's sessions, and the memory that they are bound to."""
