"""What is counted of requests, whatever became of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qsample.addons.serve.metrics import Metrics
from qsample.runtime import RequestOutput
from qsample.runtime.request import RequestTiming, Usage
from qsample.runtime.sequence import DraftStats

DRAFTS = DraftStats(num_steps=9, num_drafts=4, num_draft_tokens=20, num_accepted_tokens=15)


class Ended:
    """A request that has ended already."""

    def __init__(self, timing: RequestTiming, tokens: list[int]) -> None:
        self.completion_tokens = len(tokens)
        self._output = RequestOutput(
            tokens, "", "cancelled", None, 0, Usage(100, len(tokens), 60, DRAFTS), timing, {}
        )

    def result(self, timeout: float) -> RequestOutput:
        return self._output

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        function(self)


@pytest.mark.parametrize(
    ("timing", "tokens", "read"),
    [
        (RequestTiming(0.1, 0.2, 1.0), [5, 6], True),
        (RequestTiming(None, None, 1.0), [], False),  # it waited
        (RequestTiming(0.1, None, 1.0), [], False),  # while its prompt was read
    ],
)
def test_prompts_that_were_not_read_do_not_count(
    timing: RequestTiming, tokens: list[int], read: bool
) -> None:
    metrics = Metrics(lambda: ())
    metrics.follow("tiny", Ended(timing, tokens))  # type: ignore[arg-type]
    text = metrics.text().decode()
    for name, value in (
        ("prompt_tokens", 100),
        ("prefix_cache_queries", 100),
        ("prefix_cache_hits", 60),
    ):
        assert (f'qsample:{name}_total{{model_name="tiny"}} {value:.1f}\n' in text) == read
    assert f'qsample:generation_tokens_total{{model_name="tiny"}} {len(tokens):.1f}\n' in text
    for name, value in (("num_drafts", 4), ("num_draft_tokens", 20), ("num_accepted_tokens", 15)):
        assert f'qsample:spec_decode_{name}_total{{model_name="tiny"}} {value:.1f}\n' in text
    assert (
        'qsample:request_success_total{finished_reason="cancelled",model_name="tiny"} 1.0\n' in text
    )
