"""Session options: what reaches ONNX Runtime, and counts that are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from qsample.ort import options
from qsample.ort.options import (
    PartThreads,
    SessionOptions,
    chosen_threads,
    most_shares,
    session_options,
    threads_of_parts,
)


def test_what_reaches_onnxruntime() -> None:
    options = session_options({"session.intra_op.allow_spinning": "0"}, intra_op_num_threads=3)
    assert options.intra_op_num_threads == 3
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.log_severity_level == 4


def test_a_single_thread_is_a_choice() -> None:
    assert SessionOptions(1).intra_op_num_threads == 1


def test_defaults_leave_the_choice_to_onnxruntime() -> None:
    """The keys are those of onnxruntime_session_options_config_keys.h."""
    assert SessionOptions() == SessionOptions(None, {}, {}, batch_invariant=True)
    assert options.WEIGHTS_FOLDER_KEY == "session.model_external_initializers_file_folder_path"
    assert options.NO_PREPACKING == {"session.disable_prepacking": "1"}
    assert options.NO_SPINNING == {"session.intra_op.allow_spinning": "0"}
    with pytest.raises(ValueError, match="batch_invariant is 1"):
        SessionOptions(batch_invariant=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_wrong_counts(value: Any) -> None:
    with pytest.raises(ValueError, match=f"intra_op_num_threads is {value!r}"):
        SessionOptions(value)


@pytest.mark.parametrize("value", [5, ["a"], {"a": None}, {1: "a"}, "a"])
def test_entries_that_are_none(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"provider_options is .*; give a mapping of names to texts or numbers"
    ):
        SessionOptions(provider_options=value)
    with pytest.raises(ValueError, match="session_config is "):
        SessionOptions(config=value)


def test_numbers_are_texts_to_onnxruntime() -> None:
    options = SessionOptions(
        provider_options={"device_id": 3}, config={"session.set_denormal_as_zero": 1}
    )  # type: ignore[dict-item]
    assert (options.provider_options, options.config) == (
        {"device_id": "3"},
        {"session.set_denormal_as_zero": "1"},
    )


ROOT = Path(__file__).resolve().parents[2]
Machine = Callable[..., None]

# Prints the threads of an operator, the caller's among them, and what we say of it.
COUNT = """
import os, sys
import onnxruntime as ort
from qsample.ort import small_graphs
from qsample.ort.options import session_options
from qsample.ort.options import most_shares

if sys.argv[1]:
    os.sched_setaffinity(0, {int(sys.argv[1])})
before = len(os.listdir("/proc/self/task"))
options = session_options(intra_op_num_threads=int(sys.argv[2]) if sys.argv[2] else None)
session = ort.InferenceSession(small_graphs.identity(1), options, providers=["CPUExecutionProvider"])
print(len(os.listdir("/proc/self/task")) - before + 1, most_shares(int(sys.argv[2]) if sys.argv[2] else None))
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """(what it has) → this process is on such a machine."""

    def make(
        *,
        siblings: Mapping[int, str] | None = None,
        affinity: set[int] | None = None,
        cgroup: str = "0::/\n",
        quotas: Mapping[str, str] | None = None,
        hybrid: bool = False,
    ) -> None:
        """siblings: of each processor. quotas: files under the root of control groups."""
        monkeypatch.delenv("ORT_INTRA_OP_NUM_THREADS", raising=False)
        for name in ("_CPUS_FOLDER", "_DEVICES_FOLDER", "_CGROUPS_FOLDER"):
            (tmp_path / name).mkdir()
            monkeypatch.setattr(options, name, tmp_path / name)
        for number, text in (siblings or {}).items():
            topology = tmp_path / "_CPUS_FOLDER" / f"cpu{number}" / "topology"
            topology.mkdir(parents=True)
            (topology / "core_cpus_list").write_text(f"{text}\n")
        (tmp_path / "_CPUS_FOLDER" / "cpufreq").mkdir()  # no processor
        for name in ("cpu_core", "cpu_atom") if hybrid else ():
            (tmp_path / "_DEVICES_FOLDER" / name).mkdir()
        (tmp_path / "own").write_text(cgroup)
        monkeypatch.setattr(options, "_OWN_CGROUPS_FILE", tmp_path / "own")
        for name, text in (quotas or {}).items():
            file = tmp_path / "_CGROUPS_FOLDER" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        monkeypatch.setattr(os, "cpu_count", lambda: len(siblings or {}) or 6)
        processors = {*(siblings or range(6))} if affinity is None else affinity
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: processors, raising=False)

    return make


EIGHT_ON_FOUR = {number: f"{number % 4},{number % 4 + 4}" for number in range(8)}


@pytest.mark.parametrize(
    ("affinity", "quotas", "chosen", "shares"),
    [
        (None, {}, None, 4),  # ONNX Runtime's choice: a thread a core
        ({0, 1, 4, 5}, {}, 2, 2),  # two cores with both of their processors
        ({0, 1, 2, 3}, {}, None, 4),
        ({7}, {}, 1, 1),
        (None, {"cpu.max": "250000 100000"}, 3, 3),
        (None, {"cpu.max": "max 100000"}, None, 4),
        (None, {"cpu.max": "50000 100000"}, 1, 1),
        (None, {"cpu.max": "900000 100000"}, None, 4),
        ({0, 1, 2}, {"cpu.max": "200000 100000"}, 2, 2),
        ({0}, {"cpu.max": "200000 100000"}, 1, 1),
        (None, {"cpu.max": "nonsense"}, None, 4),
        (None, {"cpu.max": "1 0"}, None, 4),
    ],
)
def test_what_this_process_may_use(
    machine: Machine,
    affinity: set[int] | None,
    quotas: dict[str, str],
    chosen: int | None,
    shares: int,
) -> None:
    machine(siblings=EIGHT_ON_FOUR, affinity=affinity, quotas=quotas)
    assert (chosen_threads(None), most_shares(None)) == (chosen, shares)
    assert session_options().intra_op_num_threads == (chosen or 0)
    # Who says a number gets it.
    assert (chosen_threads(9), most_shares(9)) == (9, 9)
    assert session_options(intra_op_num_threads=9).intra_op_num_threads == 9


@pytest.mark.parametrize(
    ("cgroup", "quotas", "chosen"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2),  # of the group around its own
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "200000 100000"}, 1),
        ("0::/host/only\n", {"cpu.max": "300000 100000"}, 3),
        ("4:cpu,x:/a\n", {"cpu,x/a/cpu.cfs_quota_us": "150000", "cpu,x/a/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu:/host\n1:name=systemd:/x\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("7:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_quotas_of_control_groups(
    machine: Machine, cgroup: str, quotas: dict[str, str], chosen: int | None
) -> None:
    machine(siblings=EIGHT_ON_FOUR, cgroup=cgroup, quotas=quotas)
    assert chosen_threads(None) == chosen


def test_a_system_that_says_little(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine()
    assert (chosen_threads(None), most_shares(None)) == (None, 6)  # at most
    monkeypatch.setattr(options, "_OWN_CGROUPS_FILE", tmp_path / "nowhere")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert (chosen_threads(None), most_shares(None)) == (None, 6)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert most_shares(None) == 1


def test_cores_of_two_kinds(machine: Machine) -> None:
    machine(siblings=EIGHT_ON_FOUR, hybrid=True)
    assert (most_shares(None), most_shares(3), most_shares(1)) == (16, 12, 1)


@pytest.mark.parametrize(
    ("value", "chosen", "shares"), [("5", None, 5), ("0", 1, 1), ("", 1, 1), ("many", 1, 1)]
)
def test_onnxruntimes_own_variable(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, value: str, chosen: int | None, shares: int
) -> None:
    machine(siblings=EIGHT_ON_FOUR, affinity={0})
    monkeypatch.setenv("ORT_INTRA_OP_NUM_THREADS", value)
    assert (chosen_threads(None), most_shares(None)) == (chosen, shares)
    assert (chosen_threads(3), most_shares(3)) == (3, 3)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
@pytest.mark.parametrize(
    ("processor", "asked", "variable"),
    [("", "", ""), ("0", "", ""), ("", "3", ""), ("0", "3", ""), ("", "", "4")],
)
def test_threads_that_are_started(processor: str, asked: str, variable: str) -> None:
    environment = {
        **os.environ,
        "ORT_DISABLE_TELEMETRY": "1",
        "ORT_INTRA_OP_NUM_THREADS": variable or "0",
    }
    if processor and int(processor) not in os.sched_getaffinity(0):
        pytest.skip("this process may not run there")
    command = [sys.executable, "-c", COUNT, processor, asked]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    started, said = map(int, done.stdout.split())
    if (processor, asked, variable) == ("", "", ""):
        assert started <= said  # where the system does not say which processors share a core
    else:
        assert started == said
        assert started == int(asked or variable or 1)


@pytest.mark.parametrize(
    ("affinity", "parts", "expected"),
    [
        (None, 2, [([0, 1, 2, 6, 7, 8], 3), ([3, 4, 5, 9, 10, 11], 3)]),
        ({0, 1, 2, 3, 6}, 2, [([0, 1, 2, 6], 1), ([3], 1)]),  # the fewest cores of any
        (None, 3, [(None, 2)] * 3),  # fewer nodes than parts
        ({3, 4, 5}, 2, [(None, 1)] * 2),
        ({0}, 4, [(None, 1)] * 4),
    ],
)
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone has it")
def test_processors_of_parts(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    affinity: set[int] | None,
    parts: int,
    expected: Any,
) -> None:
    """Six cores of two processors each, on two NUMA nodes."""
    machine(
        siblings={number: f"{number % 6},{number % 6 + 6}" for number in range(12)},
        affinity=affinity,
    )
    for node, text in {"node0": "0-2,6-8", "node1": "3-5,9-11", "node2": ""}.items():
        (tmp_path / "nodes" / node).mkdir(parents=True)
        (tmp_path / "nodes" / node / "cpulist").write_text(f"{text}\n")
    monkeypatch.setattr(options, "_NUMA_NODES_FOLDER", tmp_path / "nodes")
    found = [(threads.processors, threads.count) for threads in threads_of_parts(parts)]
    assert found == expected
    monkeypatch.setenv("ORT_INTRA_OP_NUM_THREADS", "3")
    assert threads_of_parts(parts) == [PartThreads()] * parts
