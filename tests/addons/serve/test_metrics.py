"""What is counted of requests, whatever became of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from qsample.addons.serve.metrics import Metrics
from qsample.runtime import RequestOutput
from qsample.runtime.request import EngineStats, RequestTiming, Usage
from qsample.runtime.sequence import DraftStats, PrefixStats

DRAFTS = DraftStats(num_steps=9, num_drafts=4, num_draft_tokens=20, num_accepted_tokens=15)


class Ended:
    """A request that has ended already."""

    def __init__(self, timing: RequestTiming, tokens: list[int]) -> None:
        self.completion_tokens = len(tokens)
        self.scored_tokens = 4
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


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample but the times of creation, by its line without the prefix."""
    lines = [line for line in metrics.text().decode().splitlines() if line[0] != "#"]
    named = [
        line.removeprefix("qsample:").rsplit(" ", 1) for line in lines if "_created" not in line
    ]
    return {name: float(value) for name, value in named}


def test_the_present_state_of_each_engine() -> None:
    def served(name: str, max_loras: int, stats: EngineStats) -> Any:
        engine = SimpleNamespace(stats=lambda: stats)
        interface = SimpleNamespace(features=SimpleNamespace(max_loras=max_loras))
        return SimpleNamespace(name=name, interface=interface, engine=engine)

    plain = EngineStats(8, 256, 3, 5, (), (), PrefixStats())
    adapted = EngineStats(4, 7, 2, 1, ("x", "y"), ("z", "w"), PrefixStats())
    models = [served("a", 0, plain), served("b", 1, adapted)]
    found = samples(Metrics(lambda: models))
    adapters = 'max_lora="1",model_name="b",running_lora_adapters="x,y",waiting_lora_adapters="z,w"'
    assert found.pop(f"lora_requests_info{{{adapters}}}") > 1e9
    assert found == {
        f'num_{name}{{model_name="{model}"}}': value
        for name, values in (("requests_running", (3, 2)), ("requests_waiting", (5, 1)), ("slots", (8, 4)))
        for model, value in zip("ab", values, strict=True)
    }  # fmt: skip


def test_all_counters_of_one_request() -> None:
    metrics = Metrics(lambda: ())
    metrics.follow("m", Ended(RequestTiming(0.02, 0.3, 1.5), [5, 6, 7]))  # type: ignore[arg-type]
    metrics.follow_scoring("m", Ended(RequestTiming(0.0, 0.0, 0.0), [5]))  # type: ignore[arg-type]
    metrics.count_form("m", "graph", 2)
    metrics.count_form("m", None, 9)
    metrics.count_images("m", [64, 100], 0.4)
    found = samples(metrics)
    seconds = {
        "image_encoder_seconds": 0.4, "time_to_first_token_seconds": 0.3, "request_queue_time_seconds": 0.02,
        "e2e_request_latency_seconds": 1.5, "request_time_per_output_token_seconds": (1.5 - 0.3) / 2,
    }  # fmt: skip
    long = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
    short = (0.001, 0.0025, *long[:9])
    for name, value in seconds.items():
        for limit in short if "per_output" in name else long:
            line = f'{name}_bucket{{le="{float(limit)}",model_name="m"}}'
            assert found.pop(line) == (value <= limit), line
    assert {name: value for name, value in found.items() if "+Inf" not in name} == {
        'structured_outputs_total{keeper="graph",model_name="m"}': 2,
        'request_success_total{finished_reason="cancelled",model_name="m"}': 1,
        **{f'{name}_total{{model_name="m"}}': value for name, value in {
            "prompt_tokens": 100, "prefix_cache_queries": 100, "prefix_cache_hits": 60, "prompt_tokens_scored": 5,
            "spec_decode_num_drafts": 4, "spec_decode_num_draft_tokens": 20, "spec_decode_num_accepted_tokens": 15,
            "generation_tokens": 3, "prompt_images": 2, "prompt_image_tokens": 164,
        }.items()},
        **{f'{name}_count{{model_name="m"}}': 1 for name in seconds},
        **{f'{name}_sum{{model_name="m"}}': pytest.approx(value) for name, value in seconds.items()},
    }  # fmt: skip
