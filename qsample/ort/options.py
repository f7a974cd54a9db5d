"""How ONNX Runtime runs: what a caller may set, and what every session of ours has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import onnxruntime as ort

from qsample.errors import shown
from qsample.ort.threads import chosen_threads
from qsample.values import check_count

FOLDER_OF_WEIGHTS: Final = "session.model_external_initializers_file_folder_path"  # of a graph that is given as bytes
# Kernels make no copies of the weights in a layout of their own: those of a session that runs seldom, or never.
NO_PREPACKING: Final = {"session.disable_prepacking": "1"}
# Threads that wait for work leave the processors to others.
NO_SPINNING: Final = {"session.intra_op.allow_spinning": "0"}


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How ONNX Runtime runs. intra_op_num_threads: threads of one operator, None = see `threads.chosen_threads`.
    provider_options: for the first provider. config: further session configuration entries by ONNX Runtime's key."""

    intra_op_num_threads: int | None = None
    provider_options: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("intra_op_num_threads", self.intra_op_num_threads)
        object.__setattr__(self, "provider_options", _texts("provider_options", self.provider_options))
        object.__setattr__(self, "config", _texts("session_config", self.config))

    @property
    def arguments(self) -> dict[str, Any]:
        """As `load` takes them."""
        threads, own = self.intra_op_num_threads, dict(self.provider_options)
        return {"intra_op_num_threads": threads, "provider_options": own, "session_config": dict(self.config)}


def _texts(name: str, given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping) or not all(
        isinstance(key, str) and isinstance(value, str | int | float) for key, value in given.items()
    ):
        raise ValueError(f"{name} is {shown(given)}; give a mapping of names to texts or numbers")
    return {key: str(value) for key, value in given.items()}


def session_options(
    config: Mapping[str, str] | None = None, *, intra_op_num_threads: int | None = None
) -> ort.SessionOptions:
    """ONNX Runtime's own options, without its warnings, which are about its own optimisations.

    config, intra_op_num_threads: as in `SessionOptions`.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    threads = chosen_threads(intra_op_num_threads)
    if threads is not None:
        options.intra_op_num_threads = threads
    for key, value in (config or {}).items():
        options.add_session_config_entry(key, value)
    return options
