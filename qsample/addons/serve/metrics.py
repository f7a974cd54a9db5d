"""A server's counters in Prometheus' text form. Names and meanings are vLLM's, with qsample's
prefix."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from qsample.addons.serve.forms import FormKeeper
from qsample.addons.serve.models import ServedModel
from qsample.errors import QsampleError
from qsample.request.text.chat import UNREAD_WARNINGS
from qsample.runtime import Request

_LATENCY_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_MODEL_LABEL: Final = "model_name"


# Each name is a time series of its own.
_MAX_IGNORED_NAMES: Final = 100
_LOG: Final = logging.getLogger("uvicorn.error")


def _why_ignored(name: str) -> str:
    """Why a part of a request is ignored."""
    if name.startswith("tools."):
        return "this server runs no tools itself"
    return UNREAD_WARNINGS.get(name, "it is not known here")


class Metrics:
    """Counters, histograms and gauges of all models."""

    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        """models: a function that returns the models that are served now."""
        registry = CollectorRegistry()
        self._registry = registry

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"qsample:{name}", meaning, [_MODEL_LABEL, *labels], registry=registry)

        def histogram(
            name: str, meaning: str, buckets: tuple[float, ...] = _LATENCY_BUCKETS_S
        ) -> Histogram:
            return Histogram(
                f"qsample:{name}", meaning, [_MODEL_LABEL], registry=registry, buckets=buckets
            )

        self._prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens that were read or found, of requests that ended."
        )
        self._cached_tokens = counter(
            "prefix_cache_hits", "Prompt tokens that a slot held already."
        )
        self._queried_tokens = counter(
            "prefix_cache_queries", "Prompt tokens that were looked for in slots."
        )
        self._drafts = counter(
            "spec_decode_num_drafts", "Steps of requests that checked guessed tokens."
        )
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Guessed tokens.")
        self._accepted_tokens = counter(
            "spec_decode_num_accepted_tokens", "Guessed tokens that were right."
        )
        self._scored_tokens = counter(
            "prompt_tokens_scored", "Prompt tokens whose log-probability was computed."
        )
        self._forms = counter(
            "structured_outputs",
            "Answers that had to follow a form, by who kept them to it: graph or host.",
            "keeper",
        )
        self._ignored = counter(
            "request_fields_ignored",
            "Requests with a field that changes nothing here, by the field.",
            "field",
        )
        self._ignored_names: set[str] = set()
        self._images = counter("prompt_images", "Images of prompts.")
        self._image_tokens = counter("prompt_image_tokens", "Prompt tokens that stand for images.")
        self._vision = histogram(
            "image_encoder_seconds", "Seconds to the features of a prompt's images."
        )
        self._ended = counter("request_success", "Requests that ended, by why.", "finished_reason")
        self._failed = counter("request_failure", "Requests that ended with an error.")
        self._exchanges = Counter(
            "qsample:http_requests",
            "HTTP requests by path, status (0 = the client left before) and error; "
            "none has an empty reason.",
            ["handler", "status", "reason"],
            registry=registry,
        )
        self._first = histogram("time_to_first_token_seconds", "Seconds to the first token.")
        self._queue = histogram("request_queue_time_seconds", "Seconds to a slot.")
        self._whole = histogram("e2e_request_latency_seconds", "Seconds to the end.")
        self._token = histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds between the tokens of a request.",
            _TOKEN_BUCKETS_S,
        )
        self._tokens = _SampledTokens()
        registry.register(_Engines(models))
        registry.register(self._tokens)

    def follow(self, model: str, request: Request) -> None:
        """Count a request's tokens as they come, and the request when it ends for any reason."""
        self._tokens.follow(model, request)
        request.add_done_callback(partial(self._count, model))

    def count_exchange(self, path: str, status: int, reason: str) -> None:
        """Count an HTTP request.

        Args:
            path: the path of the endpoint, or "other".
            status: the status of the answer; 0 if there was none.
            reason: the reason of a refusal, such as "rate_limit_exceeded"; otherwise empty.
        """
        self._exchanges.labels(path, str(status), reason).inc()

    def count_form(self, model: str, keeper: FormKeeper | None, answers: int) -> None:
        """Count the answers of a request that have to follow a form.

        Args:
            model: the served name of the package.
            keeper: who keeps them to it; None for answers of any text.
            answers: the number of answers.
        """
        if keeper is not None:
            self._forms.labels(model, keeper).inc(answers)

    def count_ignored(self, model: str, names: Iterable[str]) -> None:
        """Count the fields of a request that were ignored, and log each name once.

        Args:
            model: the served name of the package.
            names: the names. Clients choose them, so all but the first are counted as "other".
        """
        for name in names:
            if name not in self._ignored_names:
                if len(self._ignored_names) >= _MAX_IGNORED_NAMES:
                    name = "other"
                else:
                    self._ignored_names.add(name)
                    _LOG.warning("%s of requests is ignored; %s", ascii(name), _why_ignored(name))
            self._ignored.labels(model, name).inc()

    def count_images(self, model: str, tokens: Sequence[int], seconds: float) -> None:
        """Count the images of a prompt.

        Args:
            model: the served name of the package.
            tokens: the number of tokens of each image.
            seconds: the time until their features were there, waiting included.
        """
        self._images.labels(model).inc(len(tokens))
        self._image_tokens.labels(model).inc(sum(tokens))
        self._vision.labels(model).observe(seconds)

    def follow_scoring(self, model: str, request: Request) -> None:
        """Count the tokens of a request that scores a prompt and samples no token."""
        request.add_done_callback(
            # A request that only reads its prompt samples nothing; others sample the scored tokens.
            lambda ended: self._scored_tokens.labels(model).inc(
                ended.scored_tokens + ended.completion_tokens
            )
        )

    def text(self) -> bytes:
        """All metrics in Prometheus' text form."""
        return generate_latest(self._registry)

    def _count(self, model: str, request: Request) -> None:
        self._tokens.end(model, request)
        try:
            output = request.result(0)
        except QsampleError:
            self._failed.labels(model).inc()
            return
        usage = output.usage
        timing = output.timing
        if timing.first_token_seconds is not None:  # The prompt was read.
            self._prompt_tokens.labels(model).inc(usage.prompt_tokens)
            self._queried_tokens.labels(model).inc(usage.prompt_tokens)
            self._cached_tokens.labels(model).inc(usage.cached_tokens)
        self._drafts.labels(model).inc(usage.drafts.num_drafts)
        self._draft_tokens.labels(model).inc(usage.drafts.num_draft_tokens)
        self._accepted_tokens.labels(model).inc(usage.drafts.num_accepted_tokens)
        self._ended.labels(model, output.finish_reason).inc()
        self._whole.labels(model).observe(timing.total_seconds)
        if timing.queue_seconds is not None:
            self._queue.labels(model).observe(timing.queue_seconds)
        if timing.first_token_seconds is not None:
            self._first.labels(model).observe(timing.first_token_seconds)
            if usage.completion_tokens > 1:
                gaps = timing.total_seconds - timing.first_token_seconds
                self._token.labels(model).observe(gaps / (usage.completion_tokens - 1))


class _Engines(Collector):
    """The present state of the engines."""

    def __init__(self, models: Callable[[], Iterable[ServedModel]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        running = GaugeMetricFamily(
            "qsample:num_requests_running", "Requests in slots.", labels=[_MODEL_LABEL]
        )
        waiting = GaugeMetricFamily(
            "qsample:num_requests_waiting", "Requests without a slot.", labels=[_MODEL_LABEL]
        )
        slots = GaugeMetricFamily("qsample:num_slots", "Slots.", labels=[_MODEL_LABEL])
        loras = GaugeMetricFamily(
            "qsample:lora_requests_info",
            "The adapters of requests in slots and of waiting requests; its value is the time.",
            labels=[_MODEL_LABEL, "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        for model in self._models():
            stats = model.engine.stats()
            max_loras = model.interface.features.max_loras
            if max_loras > 0:
                running_adapters = ",".join(stats.running_adapters)
                waiting_adapters = ",".join(stats.waiting_adapters)
                labels = [model.name, str(max_loras), running_adapters, waiting_adapters]
                loras.add_metric(labels, time.time())
            running.add_metric([model.name], stats.running)
            waiting.add_metric([model.name], stats.waiting)
            slots.add_metric([model.name], stats.slots)
        yield from (running, waiting, slots, loras)

    def describe(self) -> list[Metric]:
        return []


class _SampledTokens(Collector):
    """The tokens of all requests so far, running requests included."""

    def __init__(self) -> None:
        # Requests end on the threads of the engines.
        self._lock = threading.Lock()
        self._ended_tokens: Counts[str] = Counts()
        self._running_requests: dict[Request, str] = {}

    def follow(self, model: str, request: Request) -> None:
        with self._lock:
            self._running_requests[request] = model

    def end(self, model: str, request: Request) -> None:
        with self._lock:
            del self._running_requests[request]
            self._ended_tokens[model] += request.completion_tokens

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            counts = self._ended_tokens.copy()
            for request, model in self._running_requests.items():
                counts[model] += request.completion_tokens
        family = CounterMetricFamily(
            "qsample:generation_tokens", "Sampled tokens.", labels=[_MODEL_LABEL]
        )
        for model, count in counts.items():
            family.add_metric([model], count)
        yield family

    def describe(self) -> list[Metric]:
        return []
