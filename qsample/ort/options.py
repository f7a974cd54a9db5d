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

# The folder of the external weights of a graph that is given as bytes.
WEIGHTS_FOLDER_KEY: Final = "session.model_external_initializers_file_folder_path"
# Kernels do not copy the weights to another layout; for sessions that run rarely or never.
NO_PREPACKING: Final = {"session.disable_prepacking": "1"}
# Threads that wait for work leave the processors to other threads.
NO_SPINNING: Final = {"session.intra_op.allow_spinning": "0"}

# ONNX Runtime reads this variable; 0 counts as unset.
_THREADS_VARIABLE: Final = "ORT_INTRA_OP_NUM_THREADS"
_CPUS_FOLDER: Final = Path("/sys/devices/system/cpu")
_NUMA_NODES_FOLDER: Final = Path("/sys/devices/system/node")
_DEVICES_FOLDER: Final = Path("/sys/devices")
_OWN_CGROUPS_FILE: Final = Path("/proc/self/cgroup")
_CGROUPS_FOLDER: Final = Path("/sys/fs/cgroup")
# ONNX Runtime divides an operator into this many shares for a thread if cores are of two kinds.
_SHARES_PER_HYBRID_THREAD: Final = 4


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
        intra_op_num_threads: The number of threads of an operator; the default is that of
            `chosen_threads`.
        provider_options: The options of the first provider.
        config: Further session configuration entries by ONNX Runtime's key.
        batch_invariant: Whether rows get the same last bits in any batch; see `ort.rounding`. False
            takes the fastest way.
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
    """ONNX Runtime's options, from the fields of `SessionOptions`.

    The log of ONNX Runtime is off: warnings are about optimisations, errors are exceptions, and
    both print the names in a graph unchanged, so a name could command a terminal. On AVX-512, ONNX
    Runtime's defaults for spinning, affinity, arena, memory patterns and shares of threads were the
    fastest, within 2 %.
    """
    # A program may have imported onnxruntime before qsample.
    ort.disable_telemetry_events()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    threads = chosen_threads(intra_op_num_threads)
    if threads is not None:
        options.intra_op_num_threads = threads
    for key, value in (config or {}).items():
        options.add_session_config_entry(key, value)
    return options


def chosen_threads(asked: int | None) -> int | None:
    """The number of threads of a session; None leaves the choice to ONNX Runtime.

    ONNX Runtime would start a thread for every core of the machine, and bind each to its core,
    regardless of the affinity of the process and the quota of its container.

    Args:
        asked: The number that the caller asks for; by default one thread for each core that this
            process may use.
    """
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
        cores = chosen_threads(None)
        if cores is None:
            cores = _machine()
        return [PartThreads(count=max(cores // parts, 1))] * parts
    groups = list[list[int]]()
    for part in range(parts):
        first = part * len(nodes) // parts
        end = (part + 1) * len(nodes) // parts
        groups.append([number for node in nodes[first:end] for number in node])
    fewest_cores = min(_cores(processors) for processors in groups)
    return [PartThreads(processors, fewest_cores) for processors in groups]


def _nodes() -> list[list[int]]:
    """The processors of each NUMA node that this process may run on."""
    usable = set(_affinity() or ())
    nodes = list[list[int]]()
    paths = _NUMA_NODES_FOLDER.glob("node[0-9]*/cpulist")
    for path in sorted(paths, key=lambda path: int(path.parent.name.removeprefix("node"))):
        with suppress(OSError, ValueError):
            numbers = _processors_in(path.read_text().strip())
            nodes.append([number for number in numbers if number in usable])
    return [node for node in nodes if node]


def _processors_in(text: str) -> Iterator[int]:
    """The numbers in a list such as "0-2,6-8"."""
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def most_shares(asked: int | None) -> int:
    """The largest number of shares into which ONNX Runtime divides an operator.

    Args:
        asked: The number of threads that the caller asks for; see `chosen_threads`.
    """
    choices = chosen_threads(asked), _from_environment()
    threads = next((threads for threads in choices if threads is not None), _machine())
    # Linux lists both kinds of cores of Intel's hybrid processors.
    is_hybrid = all((_DEVICES_FOLDER / name).exists() for name in ("cpu_core", "cpu_atom"))
    return threads * _SHARES_PER_HYBRID_THREAD if is_hybrid and threads > 1 else threads


def _from_environment() -> int | None:
    try:
        threads = int(os.environ.get(_THREADS_VARIABLE, ""))
    except ValueError:  # ONNX Runtime reports a wrong value.
        return None
    return None if threads == 0 else threads


def _affinity() -> Iterable[int] | None:
    """The numbers of the processors that this process may run on; None if unknown."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _machine() -> int:
    """The number of the machine's cores, or of its processors if it is unknown which share a
    core."""
    return max(_cores(None), 1)


def _cores(processors: Iterable[int] | None) -> int:
    """The number of cores of some processors, by default of all."""
    if processors is None:
        paths = _CPUS_FOLDER.glob("cpu[0-9]*")
        online = [
            int(path.name.removeprefix("cpu")) for path in paths if (path / "topology").exists()
        ]
        processors = online or range(max(os.cpu_count() or 0, 1))
    return len({_core(number) for number in processors})


def _core(number: int) -> str:
    """A text that the processors of a core have in common."""
    # The second is the name on Linux before 5.3.
    for name in ("core_cpus_list", "thread_siblings_list"):
        with suppress(OSError):
            return (_CPUS_FOLDER / f"cpu{number}" / "topology" / name).read_text().strip()
    return str(number)


def _quotas() -> Iterator[int]:
    """The processor time that each control group around this process may take, in processors,
    rounded up."""
    try:
        lines = _OWN_CGROUPS_FILE.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        # Version 2 of control groups has no kinds.
        roots = [_CGROUPS_FOLDER]
        if kinds:
            roots = [_CGROUPS_FOLDER / kinds, _CGROUPS_FOLDER / "cpu"]
        own = PurePosixPath(path.lstrip("/"))
        for root in roots:
            # In a container, the path may be a path of the host, and only its root exists here.
            for folder in (root / own, *(root / parent for parent in own.parents)):
                quota = _quota(folder, unified=not kinds)
                if quota is not None:
                    yield quota


def _quota(folder: Path, *, unified: bool) -> int | None:
    """The quota of a control group, in processors; None if there is none. unified: Whether this is
    version 2 of control groups, which has a single file."""
    try:
        if unified:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        if quota in ("max", "-1"):
            return None
        return max(-(-int(quota) // int(period)), 1)
    except (OSError, ValueError, ZeroDivisionError):
        return None
