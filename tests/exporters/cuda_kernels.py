"""The operators that ONNX Runtime's CUDA provider has kernels for, with their dtypes, as far as decode graphs use them.

Facts from https://github.com/microsoft/onnxruntime/blob/main/docs/OperatorKernels.md (opset 20 and com.microsoft). The
dtypes are those of the operator's main type parameter: for ScatterElements of the data, not of the indices.
"""

from __future__ import annotations

NUMBERS = {"float", "float16", "double", "int32", "int64"}
HALVES = {"float16", "bfloat16"}
FLOATS = {"float", "float16", "bfloat16"}
EVERYTHING = NUMBERS | {"bfloat16", "bool", "int8", "uint8"}

KERNELS: dict[str, set[str]] = {
    "Add": NUMBERS | {"bfloat16"},
    "And": {"bool"},
    "ArgMax": {"float", "float16", "double"},
    "Cast": EVERYTHING,
    "Clip": {"float", "double", "int64", "int8", "uint8"},
    "Concat": EVERYTHING,
    "ConstantOfShape": {"int64"},
    "Cos": {"float", "float16", "double"},
    "CumSum": NUMBERS,
    "Div": NUMBERS | {"bfloat16"},
    "Equal": NUMBERS | {"bool"},
    "Exp": FLOATS | {"double"},
    "Expand": EVERYTHING,
    "Floor": {"float", "float16", "double"},
    "Gather": EVERYTHING,
    "GatherElements": EVERYTHING,
    "Gelu": FLOATS,
    "Greater": NUMBERS,
    "GreaterOrEqual": NUMBERS,
    "Identity": EVERYTHING,
    "LayerNormalization": FLOATS | {"double"},
    "Less": NUMBERS,
    "LessOrEqual": NUMBERS,
    "MatMul": FLOATS | {"double"},
    "Max": NUMBERS | {"bfloat16"},
    "Min": NUMBERS | {"bfloat16"},
    "Mod": NUMBERS | {"bfloat16"},
    "Mul": NUMBERS | {"bfloat16"},
    "Neg": NUMBERS | {"bfloat16"},
    "Not": {"bool"},
    "Or": {"bool"},
    "Pad": {"float", "float16", "double", "bool"},
    "Range": {"float", "double", "int32", "int64"},
    "Reciprocal": {"float", "float16", "double"},
    "ReduceMax": NUMBERS,
    "ReduceMin": NUMBERS | {"int8", "uint8"},
    "ReduceSum": NUMBERS | {"bfloat16"},
    "Reshape": EVERYTHING,
    "ScatterElements": EVERYTHING,
    "Shape": EVERYTHING,
    "Sigmoid": FLOATS | {"double"},
    "SimplifiedLayerNormalization": FLOATS | {"double"},
    "Sin": {"float", "float16", "double"},
    "Slice": EVERYTHING,
    "Split": EVERYTHING,
    "Squeeze": EVERYTHING,
    "Sub": NUMBERS | {"bfloat16"},
    "Tanh": FLOATS | {"double"},
    "TopK": NUMBERS,
    "Transpose": EVERYTHING,
    "Unsqueeze": EVERYTHING,
    "Where": {"bool"},  # of the condition; its values are checked by VALUES_OF_WHERE
    # com.microsoft
    "FastGelu": FLOATS,
    "GatherBlockQuantized": {"uint8"},
    "GroupQueryAttention": HALVES,
    "MatMulNBits": FLOATS,
    "RotaryEmbedding": FLOATS,
    "SkipLayerNormalization": FLOATS,
    "SkipSimplifiedLayerNormalization": FLOATS,
}
VALUES_OF_WHERE = NUMBERS | {"bfloat16", "uint8"}
