"""How ONNX Runtime runs: the options that a caller may set, the options of every session, and the
number of threads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import onnxruntime as ort

from qsample.checks import check_fields, checked, flag, integer, refuse

FOLDER_OF_WEIGHTS: Final = (
    "session.model_external_initializers_file_folder_path"  # of a graph in bytes
)
# Kernels do not copy the weights into another layout: for a session that runs seldom, or never.
NO_PREPACKING: Final = {"session.disable_prepacking": "1"}
# Threads that wait for work leave the processors to other threads.
NO_SPINNING: Final = {"session.intra_op.allow_spinning": "0"}

_VARIABLE: Final = "ORT_INTRA_OP_NUM_THREADS"  # of ONNX Runtime; 0: as if it was not set
_CPUS: Final = Path("/sys/devices/system/cpu")
_NODES: Final = Path("/sys/devices/system/node")
_DEVICES: Final = Path("/sys/devices")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_SHARES_OF_HYBRIDS: Final = (
    4  # parts of an operator for a thread, on processors with cores of two kinds
)


def _texts(name: str, given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str | int | float)
        for key, value in given.items()
    ):
        refuse(name, given, "a mapping of names to texts or numbers")
    return {key: str(value) for key, value in given.items()}


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How ONNX Runtime runs.

    Attributes:
        intra_op_num_threads: threads of one operator; by default as `chosen_threads` says.
        provider_options: for the first provider.
        config: further session configuration entries by ONNX Runtime's key.
        batch_invariant: rows get the same last bits in any batch; see `ort.rounding`. False takes
            what is fastest.
    """

    intra_op_num_threads: int | None = integer(None, 1, math.inf, "an integer >= 1, or None")
    provider_options: Mapping[str, str] = checked(factory=dict, check=_texts)
    config: Mapping[str, str] = checked(
        factory=dict, check=lambda _, given: _texts("session_config", given)
    )
    batch_invariant: bool = flag(True)

    def __post_init__(self) -> None:
        check_fields(self)


def session_options(
    config: Mapping[str, str] | None = None, *, intra_op_num_threads: int | None = None
) -> ort.SessionOptions:
    """ONNX Runtime's options, from the fields of `SessionOptions`, without its log: warnings are
    about optimisations, errors are exceptions, and both print a graph's names as they are: such
    names could command a terminal. On AVX-512, its defaults for spinning, affinity, arena, memory
    patterns and shares of threads were the fastest, within 2 %: `benchmarks/session_options.py`."""
    ort.disable_telemetry_events()  # if onnxruntime was imported before qsample
    options = ort.SessionOptions()
    options.log_severity_level = 4
    threads = chosen_threads(intra_op_num_threads)
    if threads is not None:
        options.intra_op_num_threads = threads
    for key, value in (config or {}).items():
        options.add_session_config_entry(key, value)
    return options


def chosen_threads(asked: int | None) -> int | None:
    """The threads of a session: `asked`, or one for each core that this process may use; None: ONNX
    Runtime's choice. ONNX Runtime would start a thread for every core of the machine, and bind each
    to its core, regardless of the process's affinity and of its container's quota."""
    if asked is not None or _from_environment() is not None:
        return asked
    usable = min(_cores(_affinity()), *_quotas(), _machine())
    return usable if usable < _machine() else None


@dataclass(frozen=True, slots=True)
class PartThreads:
    """The threads of a part of a decoder.

    Attributes:
        processors: The numbers of the processors that they run on; None for any.
        count: The number of threads of the part's session; None if ORT_INTRA_OP_NUM_THREADS sets
            it.
    """

    processors: Sequence[int] | None = None
    count: int | None = None


def threads_of_parts(parts: int) -> list[PartThreads]:
    """Divide the machine among the parts of a decoder that run on the CPU.

    Each part gets the processors of a NUMA node, or of several, if there are as many nodes as
    parts; otherwise any processors and a share of the cores. All parts have the same number of
    threads, so that they round alike.

    Args:
        parts: The number of parts.
    """
    if _from_environment() is not None:
        return [PartThreads()] * parts
    nodes = _nodes() if hasattr(os, "sched_setaffinity") else []
    if len(nodes) < parts:
        cores = chosen_threads(None) or _machine()
        return [PartThreads(count=max(cores // parts, 1))] * parts
    groups = list[list[int]]()
    for part in range(parts):
        first, end = part * len(nodes) // parts, (part + 1) * len(nodes) // parts
        groups.append([number for node in nodes[first:end] for number in node])
    fewest_cores = min(_cores(processors) for processors in groups)
    return [PartThreads(processors, fewest_cores) for processors in groups]


def _nodes() -> list[list[int]]:
    """The processors of each NUMA node that this process may run on."""
    usable, nodes = set(_affinity() or ()), list[list[int]]()
    for path in sorted(
        _NODES.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])
    ):
        with suppress(OSError, ValueError):
            ends = [
                list(map(int, part.split("-")))
                for part in path.read_text().strip().split(",")
                if part
            ]
            nodes.append(
                [
                    number
                    for one in ends
                    for number in range(one[0], one[-1] + 1)
                    if number in usable
                ]
            )
    return [node for node in nodes if node]


def most_shares(asked: int | None) -> int:
    """The most parts into which ONNX Runtime cuts an operator; asked: as for `chosen_threads`."""
    threads = chosen_threads(asked) or _from_environment() or _machine()
    hybrid = all(
        (_DEVICES / name).exists() for name in ("cpu_core", "cpu_atom")
    )  # Linux says so of Intel's
    return threads * _SHARES_OF_HYBRIDS if hybrid and threads > 1 else threads


def _from_environment() -> int | None:
    try:
        return int(os.environ.get(_VARIABLE, "")) or None
    except ValueError:  # ONNX Runtime reports it
        return None


def _affinity() -> Iterable[int] | None:
    """Numbers of the processors that this process may run on; None if unknown."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _machine() -> int:
    """The machine's cores; if it is unknown which processors share a core, its processors."""
    return max(_cores(None), 1)


def _cores(processors: Iterable[int] | None) -> int:
    """The number of cores of some processors, by default of all."""
    if processors is None:
        online = [
            int(path.name[3:]) for path in _CPUS.glob("cpu[0-9]*") if (path / "topology").exists()
        ]
        processors = online or range(os.cpu_count() or 1)
    return len({_core(number) for number in processors})


def _core(number: int) -> str:
    """A text that the processors of a core have in common."""
    for name in (
        "core_cpus_list",
        "thread_siblings_list",
    ):  # the second is the name on Linux before 5.3
        with suppress(OSError):
            return (_CPUS / f"cpu{number}" / "topology" / name).read_text().strip()
    return str(number)


def _quotas() -> Iterator[int]:
    """The processor time that each control group around this process may take, in processors,
    rounded up."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        for root in [_CGROUPS / kinds, _CGROUPS / "cpu"] if kinds else [_CGROUPS]:
            own = PurePosixPath(path.lstrip("/"))
            # In a container the path may be the host's, of which only the root exists.
            for folder in (root / own, *(root / parent for parent in own.parents)):
                quota = _quota(folder, unified=not kinds)
                if quota is not None:
                    yield quota


def _quota(folder: Path, *, unified: bool) -> int | None:
    """unified: version 2 of control groups, with a single file."""
    try:
        if unified:
            most, period = (folder / "cpu.max").read_text().split()
        else:
            most, period = (
                (folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        return None if most in ("max", "-1") else max(-(-int(most) // int(period)), 1)
    except (OSError, ValueError, ZeroDivisionError):
        return None
