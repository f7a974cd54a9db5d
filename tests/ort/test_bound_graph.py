"""Graphs over bound memory: inputs that a provider wants in memory of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from qsample.ort.bound_graph import _foreign_inputs
from qsample.runtime import CausalLM


def test_inputs_in_memory_of_the_providers_own_are_bound_before_every_run(model: CausalLM) -> None:
    """ONNX Runtime copies such an input when it is bound; this session says so of all that a step reads."""

    class Foreign:
        def __init__(self, session: Any) -> None:
            self._session = session

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

        def get_input_memory_infos(self) -> list[Any]:
            return [SimpleNamespace(name="OpenVINO_shared_CPU") for _ in self._session.get_inputs()]

    session: Any = Foreign(model.sessions.decoder)
    assert _foreign_inputs(session) == {value.name for value in model.sessions.decoder.get_inputs()}
    assert _foreign_inputs(model.sessions.decoder) == set()
