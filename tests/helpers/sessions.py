"""Sessions that read prompts or step otherwise than their package's graphs and kernels ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qsample.ort.session import Sessions


def with_prompt_calls(sessions: Sessions, **changes: Any) -> Sessions:
    """`sessions` with other fields of `PromptCalls`."""
    return replace(sessions, prompts=replace(sessions.prompts, **changes))


def with_step_rows(sessions: Sessions, **changes: Any) -> Sessions:
    """`sessions` with other fields of `StepRows`."""
    return replace(sessions, rows=replace(sessions.rows, **changes))
