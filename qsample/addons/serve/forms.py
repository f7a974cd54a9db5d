"""The form of the answers to a request: what they may contain, and the arguments that keep the engine
to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from qsample.request.structured.grammars import PreparedForm

# Who keeps an answer to its form: the graph, by tables, or the host, by a mask for each token.
FormKeeper = Literal["graph", "host"]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of the answers to a request.

    Attributes:
        prepared: the form, compiled for the model; None for any text.
        may_have_thoughts: whether answers may have thoughts, if the model writes any.
        thinking_token_budget: the largest number of tokens of the thoughts; None for no limit.
    """

    prepared: PreparedForm | None = None
    may_have_thoughts: bool = True
    thinking_token_budget: int | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of the engine's request for an answer. Each answer needs its own."""
        if self.prepared is None:
            return {}
        arguments: dict[str, Any] = {"grammar": self.prepared.grammar}
        if self.thinking_token_budget is not None:
            arguments["thinking_token_budget"] = self.thinking_token_budget
        return arguments

    @property
    def keeper(self) -> FormKeeper | None:
        """Who keeps answers to the form; None for any text, also after limited thoughts."""
        if self.prepared is None:
            return None
        if self.prepared.tables is None:
            return "host"
        return "graph" if self.shortest > 0 else None

    @property
    def usage_details(self) -> dict[str, str]:
        """The entry of an answer's usage that says who keeps it to the form, if it has one."""
        return {} if self.keeper is None else {"structured_outputs": self.keeper}

    @property
    def shortest(self) -> int:
        """The number of tokens of the shortest answer, the stop token included; 0 if a limit may
        cut an answer off."""
        if self.prepared is None or self.prepared.tables is None:
            return 0
        return self.prepared.tables.shortest


ANY_TEXT: Final = AnswerForm()
