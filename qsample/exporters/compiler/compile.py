"""A portable package enters; a device package, optimised for one execution provider and self-tested, leaves."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from qsample import package
from qsample.errors import CompileError
from qsample.exporters.compiler.divergence import Divergence, measure_divergence
from qsample.exporters.compiler.options import CompileOptions
from qsample.exporters.compiler.placement import Placement
from qsample.exporters.compiler.quantize.kv_cache import measure_ranges
from qsample.exporters.compiler.quantize.weights import BITS, WeightQuantization
from qsample.exporters.compiler.targets import Target, find_target
from qsample.exporters.graph.runner import GraphRunner
from qsample.exporters.initial_state import build_initial_state
from qsample.progress import Progress
from qsample.tensors import Array

DEFAULT_CTX_LEN: Final = 4096
SELF_TEST_STEPS: Final = 8
# A little of everything, so that the self-test runs every step of the sampler.
_SELF_TEST_PARAMETERS: Final = {
    "temperature": 0.9,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
}
# The same float32 arithmetic in another order moves a token about once in a million; float16 rounds visibly.
_AGREEMENT: Final = {"float32": 1.0, "float16": 0.8, "bfloat16": 0.5}
# Nats a token. 4 bits put the bundled model 0.06 off and 8 bits 0.0006; at 1 a token is on average e times less likely.
MAX_DIVERGENCE: Final = 1.0


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Tokens that the compiled graph chose, and how many of them the portable graph chose too."""

    tokens: int
    agreeing: int


def compile_package(
    source: package.Package,
    path: str | Path,
    *,
    provider: str = "cpu",
    batch_size: int | None = None,
    ctx_len: int | None = None,
    weights: str | None = None,
    block_size: int = 32,
    quantization_method: str = "rtn",
    kv_cache_dtype: str | None = None,
    max_divergence: float = MAX_DIVERGENCE,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> package.Package:
    """Compile the portable package `source` into a device package at `path` and return it.

    Args:
        provider: the target's name, one of `targets.target_names()`.
        batch_size: most rows in one call, at least 1; None = any number.
        ctx_len: tokens that the state of a row holds, 2 to the model's max_position_embeddings; None = the smaller of
            that and 4,096.
        weights: "int4" or "int8", to quantize every matrix that a token is multiplied by, and the embedding; None, or
            the package's own dtype: as they were exported. Weights that came packed stay as they are. "float16", for
            cpu: float32 ones are stored in half the space, and are float32 again once they are loaded.
        block_size: weights that share a scale: 16, 32, 64, 128 or 256. quantization_method: "rtn" rounds to the nearest
            level; "k_quant" and "hqq" search each block's offset, slower and closer; see `quantize.WeightQuantization`.
        kv_cache_dtype: "int8", to hold keys and values with a scale a channel, measured on the model's own text: a
            quarter of float32's memory, faster steps over long contexts, slower long prompts. None, or the package's
            own dtype: as it is.
        max_divergence: refuse quantized weights that are further off than this, in nats a token; see
            `divergence.Divergence`.
        dtype: of the compiled model: "float16" or "bfloat16" for cuda, "float16" for tensorrt; None, or the package's
            own: as it is.
        progress: called with a stage's name and the fraction done, in [0, 1].

    Raises CompileError where an option does not fit, the self-test fails or quantized weights are too far off,
    PackageError where `path` cannot be written. Nothing is left behind then.
    """
    report = progress or (lambda stage, fraction: None)
    target = find_target(provider)
    quantization = _quantization(source, weights, block_size, quantization_method)
    options = _options(source, batch_size, ctx_len, quantization)
    options = replace(
        options,
        dtype=dtype or source.interface.dtype,
        pad_token_id=source.manifest.token_ids.pad,
        kv_cache_dtype=_kv_cache_dtype(kv_cache_dtype, dtype or source.interface.dtype),
        store_float16=_stored_in_half(source, weights),
        packed_weights=source.manifest.packed_weights is not None,
    )
    _check_cache(source, options)
    target.check(source.interface, options)
    interface = target.interface(source.interface, options)
    size = sum(entry.bytes for entry in source.manifest.files.values())
    with package.write_package(path, overwrite=overwrite, required_bytes=2 * size) as writer:
        folder = writer.directory
        if options.kv_cache_dtype is not None:
            ranges = measure_ranges(
                source.path,
                source.interface,
                options.ctx_len,
                lambda fraction: report("measuring keys and values", 0.2 * fraction),
            )
            options = replace(options, cache_ranges=ranges)
        report(f"optimising for {provider}", 0.2)
        placement = target.compile(source.path / "decoder.onnx", folder, interface, options)
        for name in source.manifest.files:
            if not name.startswith("decoder.onnx"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.path / name, folder / name)
        if interface.cache_states != source.interface.cache_states:
            ir.save(build_initial_state(interface), folder / "initial_state.onnx")
        report("self-test", 0.6)
        self_test = _self_test(source, folder, target, options)
        figures = None
        if options.quantized:
            divergence = measure_divergence(
                source.path,
                folder,
                source.interface,
                options.ctx_len,
                target.execution_providers,
                lambda fraction: report("measuring the divergence", 0.7 + 0.2 * fraction),
            )
            _check_divergence(divergence, options, max_divergence)
            figures = _quantization_figures(weights, options, placement, divergence)
            if source.manifest.packed_weights is not None:
                figures["packed_matrices"] = source.manifest.packed_weights["matrices"]
        report("publishing", 0.9)
        writer.finish(
            replace(
                source.manifest,
                kind="device",
                interface=interface,
                versions={**source.manifest.versions, "onnxruntime": version_of_onnxruntime()},
                compilation=package.Compilation(
                    provider=provider,
                    execution_providers=target.execution_providers,
                    batch_size=options.batch_size,
                    ctx_len=options.ctx_len,
                    placement={ep: dict(operators) for ep, operators in placement.nodes.items()},
                    self_test=asdict(self_test),
                    provider_options=target.provider_options,
                    quantization=figures,
                ),
            )
        )
    report("done", 1.0)
    return package.read_package(path, verify=False)


def version_of_onnxruntime() -> str:
    """The version of whichever onnxruntime distribution is installed."""
    import onnxruntime

    return str(onnxruntime.__version__)


def _quantization(
    source: package.Package, weights: str | None, block_size: int, method: str
) -> WeightQuantization | None:
    own = source.interface.dtype
    if weights in (None, own) or _stored_in_half(source, weights):
        return None
    if weights not in BITS:
        choices = [*BITS, *(["float16"] if own == "float32" else []), own]
        raise CompileError(f"weights is {weights!r} and the package holds {own}; choose one of {', '.join(choices)}")
    try:
        return WeightQuantization(BITS[weights], block_size, method)
    except ValueError as error:
        raise CompileError(str(error)) from error


def _stored_in_half(source: package.Package, weights: str | None) -> bool:
    return weights == "float16" and source.interface.dtype == "float32"


def _kv_cache_dtype(asked: str | None, own: str) -> str | None:
    if asked not in (None, own, "int8"):
        raise CompileError(f"kv_cache_dtype is {asked!r} and the package holds {own}; choose that or 'int8'")
    return None if asked == own else asked


def _check_cache(source: package.Package, options: CompileOptions) -> None:
    plain = (source.manifest.parity or {}).get("plain_attention_layers", 0)
    if options.kv_cache_dtype is not None and (plain or source.interface.recurrent):
        raise CompileError(
            f"kv_cache_dtype={options.kv_cache_dtype!r} needs GroupQueryAttention in every layer; {plain} layers of "
            f"this model attend through plain operators, and {len(source.interface.recurrent)} of its states are no "
            "keys or values; leave kv_cache_dtype out"
        )


def _check_divergence(divergence: Divergence, options: CompileOptions, limit: float) -> None:
    if divergence.kl <= limit:
        return
    found, advice = [], []
    if options.weights is not None:
        weights = options.weights
        found.append(f"{weights.bits}-bit weights in blocks of {weights.block_size} ({weights.method})")
        advice.append("int8, smaller blocks, or quantization_method='k_quant' or 'hqq'")
    if options.store_float16:
        found.append("float16 weights")
        advice.append("weights='float32'")
    if options.kv_cache_dtype is not None:
        found.append("an int8 cache")
        advice.append("the model's own dtype for the cache")
    if options.packed_weights:
        found.append("activations in 8 bits, for the weights that came packed,")
        advice.append("the unquantized checkpoint")
    raise CompileError(
        f"{' and '.join(found)} change the model too much: {divergence.kl:.3f} nats a token from the float "
        f"distribution (at most {limit:g}), perplexity {divergence.quantized_perplexity:.4g} instead of "
        f"{divergence.perplexity:.4g}; take {', or '.join(advice)}; max_divergence= moves the limit"
    )


def _quantization_figures(
    weights: str | None,
    options: CompileOptions,
    placement: Placement,
    divergence: Divergence,
) -> dict[str, object]:
    """What the manifest says of quantized weights and of a quantized cache."""
    figures: dict[str, object] = {"divergence": asdict(divergence)}
    if options.weights is not None and placement.quantization is not None:
        figures |= {"dtype": weights, **asdict(options.weights), **asdict(placement.quantization)}
    if options.store_float16 and placement.quantization is not None:
        figures |= {"dtype": weights, **asdict(placement.quantization)}
    if options.kv_cache_dtype is not None:
        figures["kv_cache_dtype"] = options.kv_cache_dtype
    return figures


def _options(
    source: package.Package, batch_size: int | None, ctx_len: int | None, weights: WeightQuantization | None
) -> CompileOptions:
    if source.manifest.kind != "portable":
        raise CompileError(f"{source.path} is already compiled; compile the portable package that it was made from")
    if batch_size is not None and batch_size < 1:
        raise CompileError(f"batch_size is {batch_size}; it must be at least 1, or None for any number of rows")
    limit = source.manifest.max_position_embeddings
    if ctx_len is None:
        ctx_len = min(limit or DEFAULT_CTX_LEN, DEFAULT_CTX_LEN)
    if ctx_len < 2 or (limit is not None and ctx_len > limit):
        raise CompileError(
            f"ctx_len is {ctx_len}; it must be 2 to {limit if limit is not None else 'any length'}"
            + (", the model's max_position_embeddings" if limit is not None else "")
        )
    return CompileOptions(batch_size, ctx_len, weights=weights)


def _self_test(source: package.Package, folder: Path, target: Target, options: CompileOptions) -> SelfTest:
    """Let the portable graph generate, greedily and sampled, feed its tokens to the compiled graph, and count how many
    times that one chooses the same token. Raises CompileError where they agree too rarely."""
    rows, interface = min(options.batch_size or 2, 2), source.interface
    steps = min(SELF_TEST_STEPS, options.ctx_len - 1)
    graphs = [
        (source.path, ("CPUExecutionProvider",), True),
        (folder, target.execution_providers, options.weights is None and not options.packed_weights),
    ]
    portable, device = (
        GraphRunner(
            path / "decoder.onnx",
            path / "initial_state.onnx",
            interface,
            options.ctx_len,
            providers,
            weights_mapped=weights_mapped,
        )
        for path, providers, weights_mapped in graphs
    )
    prompt = np.random.default_rng(0).integers(0, interface.vocab_size, (rows, 1))
    same = total = 0
    for parameters in ({}, _SELF_TEST_PARAMETERS):
        states = portable.start(rows), device.start(rows)
        ids = prompt
        for _ in range(steps):
            wanted = _chosen(portable.step(ids, np.ones(rows), states[0], parameters))
            got = _chosen(device.step(ids, np.ones(rows), states[1], parameters))
            same, total = same + int((got == wanted).sum()), total + rows
            ids = wanted[:, None]
    # A quantized model is another model; how close is for the divergence to say.
    if not options.quantized and same < _AGREEMENT[options.dtype] * total:
        raise CompileError(
            f"self-test failed: the graph compiled for {target.name} chose the portable graph's token {same} times of "
            f"{total}, and {options.dtype} needs {_AGREEMENT[options.dtype]:.0%}"
        )
    return SelfTest(tokens=total, agreeing=same)


def _chosen(results: dict[str, Array]) -> Array:
    """[rows]: the tokens of one step, or the argmax where the graph returns logits."""
    chosen: Array = results["next_ids"][:, 0] if "next_ids" in results else results["logits"].argmax(-1)
    return chosen
