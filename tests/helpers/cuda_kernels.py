"""The operators that ONNX Runtime's CUDA provider has kernels for, with their dtypes, as far as decode graphs use them.

Facts from https://github.com/microsoft/onnxruntime/blob/main/docs/OperatorKernels.md (opset 18 and com.microsoft). The
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
    "Gemm": FLOATS | {"double"},
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
    "Softplus": {"float", "float16", "double"},
    "Split": EVERYTHING,
    "Squeeze": EVERYTHING,
    "Sub": NUMBERS | {"bfloat16"},
    "Tanh": FLOATS | {"double"},
    "TopK": NUMBERS,
    "Transpose": EVERYTHING,
    "Unsqueeze": EVERYTHING,
    "Where": {"bool"},  # of the condition; its values are checked by VALUES_OF_WHERE
    # com.microsoft
    "CausalConvWithState": FLOATS,
    "FastGelu": FLOATS,
    "Gelu": FLOATS,
    "GatherBlockQuantized": {"uint8"},
    "GroupQueryAttention": HALVES,
    "LinearAttention": FLOATS,
    "MatMulNBits": FLOATS,
    "RotaryEmbedding": FLOATS,
    "SkipLayerNormalization": FLOATS,
    "SkipSimplifiedLayerNormalization": FLOATS,
}
VALUES_OF_WHERE = NUMBERS | {"bfloat16", "uint8"}

# The versions of ONNX's operators that have a kernel: (first, last), or (version, None), which that page writes "13+"
# and which serves this one version. ONNX Runtime: core/framework/kernel_registry.cc, VerifyKernelDef.
VERSIONS: dict[str, tuple[int, int | None]] = {
    "Add": (14, None),
    "And": (7, None),
    "ArgMax": (13, None),
    "Cast": (13, 18),
    "Clip": (13, None),
    "Concat": (13, None),
    "ConstantOfShape": (9, None),
    "Cos": (7, None),
    "CumSum": (14, None),
    "Div": (14, None),
    "Equal": (13, None),
    "Exp": (13, None),
    "Expand": (13, None),
    "Floor": (13, None),
    "Gather": (13, None),
    "GatherElements": (13, None),
    "Gemm": (13, None),
    "Greater": (13, None),
    "GreaterOrEqual": (16, None),
    "Identity": (14, 18),
    "LayerNormalization": (17, None),
    "Less": (13, None),
    "LessOrEqual": (16, None),
    "MatMul": (13, None),
    "Max": (13, None),
    "Min": (13, None),
    "Mod": (13, None),
    "Mul": (14, None),
    "Neg": (13, None),
    "Not": (1, None),
    "Or": (7, None),
    "Pad": (18, None),
    "Range": (11, None),
    "Reciprocal": (13, None),
    "ReduceMax": (18, None),
    "ReduceMin": (18, None),
    "ReduceSum": (13, None),
    "Reshape": (14, 18),
    "ScatterElements": (18, None),
    "Shape": (15, 18),
    "Sigmoid": (13, None),
    "Sin": (7, None),
    "Slice": (13, None),
    "Softplus": (1, None),
    "Split": (18, None),
    "Squeeze": (13, 20),
    "Sub": (14, None),
    "Tanh": (13, None),
    "TopK": (11, None),
    "Transpose": (13, 20),
    "Unsqueeze": (13, 20),
    "Where": (16, None),
}


def has_kernel(operator: str, version: int) -> bool:
    """Whether a version of one of ONNX's operators has a kernel."""
    first, last = VERSIONS[operator]
    return version == first or (last is not None and first <= version <= last)
