"""A package enters; ONNX Runtime sessions of its graphs, checked against the contract, leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import onnxruntime as ort

from qsample.contract import BATCH, CAPACITY, GraphSpec, Interface, TensorSpec, retained_name
from qsample.errors import PackageError, QsampleError
from qsample.package import Package

PROVIDERS: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
}
_ELEMENTS: Final = {"float32": "float"}  # ONNX's names, where they are not NumPy's


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How ONNX Runtime runs. intra_op_num_threads: threads of one operator, None = its own choice. provider_options:
    for the first provider. config: further session configuration entries by their ONNX Runtime key."""

    intra_op_num_threads: int | None = None
    provider_options: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("intra_op_num_threads", self.intra_op_num_threads)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless `value` is an integer of at least `least`, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name} is {value!r}; give an integer >= {least}, or None")


@dataclass(frozen=True, slots=True)
class Sessions:
    """The loaded graphs of a package.

    sampler: samples on the host; None where the decoder does it by itself. resuming: gives the rows that a captured
    decoder stalled their token; None where the decoder settles every row. device: where the decoder's buffers live,
    "cpu" or "cuda". replays: the decoder's runs can be captured and replayed.
    """

    interface: Interface
    decoder: ort.InferenceSession
    sampler: ort.InferenceSession | None
    device: str
    resuming: ort.InferenceSession | None = None
    replays: bool = False


def open_sessions(
    package: Package, provider: str | Sequence[str] | None = None, options: SessionOptions | None = None
) -> Sessions:
    """Load the graphs of `package`.

    provider: a key of PROVIDERS, or ONNX Runtime's own provider names in order of preference; None = what a device
    package was compiled for, otherwise "cpu".

    Raises QsampleError where the provider does not exist here or is not the one that the package was compiled for,
    PackageError where a graph does not have the interface that the manifest promises.
    """
    providers = _providers(package, provider)
    options = options or SessionOptions()
    device = "cuda" if providers[0] == "CUDAExecutionProvider" else "cpu"
    interface = package.interface
    sizes = dict(interface.sizes)
    if package.manifest.compilation is not None:
        sizes[CAPACITY] = package.manifest.compilation.ctx_len
        if package.manifest.compilation.batch_size == 1:
            sizes[BATCH] = 1

    def load(name: str, used: Sequence[str], used_options: SessionOptions) -> ort.InferenceSession:
        session = _load(package, name, used, used_options)
        # The batch and the capacity of the other graphs are free even where the decoder's are not.
        check_interface(session, interface.graphs[name], sizes if name == "decoder.onnx" else interface.sizes, name)
        return session

    on_host = SessionOptions(options.intra_op_num_threads, config=options.config)
    return Sessions(
        interface,
        decoder=load("decoder.onnx", providers, options),
        sampler=None if interface.features.sampler else load("sampler.onnx", PROVIDERS["cpu"], on_host),
        device=device,
        resuming=load("sampler.onnx", providers, options) if interface.captured else None,
        replays=_replays(package, options),
    )


def _replays(package: Package, options: SessionOptions) -> bool:
    compilation = package.manifest.compilation
    chosen = {**(compilation.provider_options if compilation else {}), **options.provider_options}
    return chosen.get("enable_cuda_graph") == "1"


def _providers(package: Package, provider: str | Sequence[str] | None) -> tuple[str, ...]:
    compilation = package.manifest.compilation
    if provider is None:
        providers = compilation.execution_providers if compilation else PROVIDERS["cpu"]
    elif isinstance(provider, str):
        if compilation is not None and provider != compilation.provider:
            raise QsampleError(
                f"{package.path} was compiled for {compilation.provider!r}, not {provider!r}; compile the portable "
                f"package for {provider!r}, or leave provider out"
            )
        if compilation is None and provider not in PROVIDERS:
            raise QsampleError(
                f"no provider {provider!r}; choose {' or '.join(map(repr, PROVIDERS))}, or give a list of ONNX "
                f"Runtime's names: {', '.join(ort.get_available_providers())}"
            )
        providers = compilation.execution_providers if compilation else PROVIDERS[provider]
    else:
        providers = tuple(provider)
    available = ort.get_available_providers()
    absent = [name for name in providers if name not in available]
    if absent or not providers:
        raise QsampleError(
            f"this onnxruntime has no {', '.join(absent) or 'provider in an empty list'}; it has "
            f"{', '.join(available)}. `pip install qsample[gpu]` (in place of qsample[cpu]) brings CUDA"
        )
    return providers


def _load(package: Package, name: str, providers: Sequence[str], options: SessionOptions) -> ort.InferenceSession:
    session_options = ort.SessionOptions()
    session_options.log_severity_level = 3  # its warnings are about its own optimisations
    if options.intra_op_num_threads is not None:
        session_options.intra_op_num_threads = options.intra_op_num_threads
    for key, value in options.config.items():
        session_options.add_session_config_entry(key, value)
    if "CUDAExecutionProvider" in providers:
        ort.preload_dlls()  # the CUDA libraries of pip packages
    compilation = package.manifest.compilation
    compiled = dict(compilation.provider_options) if compilation and name == "decoder.onnx" else {}
    first = compiled | dict(options.provider_options)
    if name != "decoder.onnx":
        first.pop("enable_cuda_graph", None)  # they have control flow, or run once
    try:
        return ort.InferenceSession(
            package.file(name),
            session_options,
            providers=list(providers),
            provider_options=[first, *({} for _ in providers[1:])],
        )
    except Exception as error:  # ONNX Runtime's own exceptions share no base but Exception
        raise PackageError(f"ONNX Runtime cannot load {package.path / name}: {error}") from error


def check_interface(session: ort.InferenceSession, spec: GraphSpec, sizes: Mapping[str, int], graph_name: str) -> None:
    """Raise PackageError where the names, dtypes or shapes of the session's tensors are not those of `spec`."""
    retained = [_renamed(state, retained_name(state.name)) for state in spec.states if not state.read_only]
    for side, found, wanted in (
        ("input", session.get_inputs(), (*spec.inputs, *spec.states)),
        ("output", session.get_outputs(), (*spec.outputs, *retained)),
    ):
        actual = {value.name: value for value in found}
        missing = [tensor.name for tensor in wanted if tensor.name not in actual]
        unexpected = [name for name in actual if name not in {tensor.name for tensor in wanted}]
        if missing or unexpected:
            problems = [f"lacks {side} {name}" for name in missing] + [
                f"has an unknown {side} {name}" for name in unexpected
            ]
            raise PackageError(
                f"{graph_name} does not follow the decode contract: it {', '.join(problems)}; export it again"
            )
        for tensor in wanted:
            problem = _mismatch(actual[tensor.name], tensor, sizes, shape_known=side == "input")
            if problem:
                raise PackageError(
                    f"{graph_name} does not fit the manifest: {side} {tensor.name} {problem}; export it again"
                )


def _renamed(state: TensorSpec, name: str) -> TensorSpec:
    return TensorSpec(name, state.dtype, state.axes, state.meaning)


def _mismatch(value: Any, spec: TensorSpec, sizes: Mapping[str, int], *, shape_known: bool) -> str | None:
    """What is wrong with a session's input or output, or None. An output may have lost its shape to optimisation."""
    wanted_type = f"tensor({_ELEMENTS.get(spec.dtype, spec.dtype)})"
    if value.type != wanted_type:
        return f"is {value.type}, not {wanted_type}"
    if not value.shape and not shape_known:
        return None
    wanted = [axis if isinstance(axis, int) else sizes.get(axis, axis) for axis in spec.axes]
    # A free axis may be free under any name, a fixed one must have its size.
    fits = len(value.shape) == len(wanted) and all(
        not isinstance(have, int) or not isinstance(want, int) or have == want
        for have, want in zip(value.shape, wanted, strict=True)
    )
    return None if fits else f"has shape {value.shape}, not {wanted}"
