"""The application for Ray Serve: what its deployment is given, and its health. Ray itself is replaced."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from qsample.addons.ray import server
from qsample.addons.ray.server import serve_app
from qsample.addons.serve.settings import ServeSettings
from qsample.errors import QsampleError
from qsample.runtime.engine import DEFAULT_SLOTS
from tests.helpers.fake_package import compilation

SETTINGS = ServeSettings(models={"a": "nowhere"}, slots=4, max_waiting=10, drain_timeout=7.5)


class Deployed(SimpleNamespace):
    """The options of a deployment, the function that makes its application, and its class."""


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Deployed()

    def deployment(**options: Any) -> Any:
        made.options = options

        def decorate(cls: type) -> Any:
            made.cls = cls
            return SimpleNamespace(bind=lambda: made)

        return decorate

    def ingress(build: Any) -> Any:
        made.build = build
        return lambda cls: cls

    ray = ModuleType("ray")
    ray.serve = ModuleType("ray.serve")  # type: ignore[attr-defined]
    vars(ray.serve).update(deployment=deployment, ingress=ingress)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", ray.serve)
    monkeypatch.setattr(server, "make_app", lambda settings: settings)


def deployed(settings: ServeSettings = SETTINGS, **options: Any) -> Any:
    return serve_app(settings, **options)


def test_the_options_by_default() -> None:
    assert deployed().options == {
        "name": "qsample",
        "ray_actor_options": {"num_cpus": 1, "num_gpus": 0},
        "max_ongoing_requests": 14,  # slots and max_waiting
        "graceful_shutdown_timeout_s": 7.5,
    }


def test_every_option_reaches_the_deployment() -> None:
    given = {
        "num_replicas": 3,
        "max_ongoing_requests": 5,
        "graceful_shutdown_timeout_s": 1.0,
        "user_config": {},
    }
    found = deployed(num_cpus=2, num_gpus=0.5, name="mine", **given).options
    resources = {"num_cpus": 2, "num_gpus": 0.5}
    assert found == {"name": "mine", "ray_actor_options": resources, **given}


@pytest.mark.parametrize(
    ("options", "scaling"),
    [
        ({"num_replicas": "auto"}, {"target_ongoing_requests": 4}),
        ({"autoscaling_config": {"max_replicas": 9}}, {"target_ongoing_requests": 4, "max_replicas": 9}),
        ({"autoscaling_config": {"target_ongoing_requests": 2}}, {"target_ongoing_requests": 2}),
        ({"autoscaling_config": {}}, {"target_ongoing_requests": 4}),
        ({"num_replicas": "auto", "autoscaling_config": {"max_replicas": 9}},
         {"target_ongoing_requests": 4, "max_replicas": 9}),
    ],
)  # fmt: skip
def test_replicas_are_added_when_requests_begin_to_wait(
    options: dict[str, Any], scaling: dict[str, Any]
) -> None:
    found = deployed(**options).options
    assert found["autoscaling_config"] == scaling
    assert found.get("num_replicas") == options.get("num_replicas")


def test_replicas_are_counted_or_scaled() -> None:
    with pytest.raises(ValueError, match="num_replicas is 2 and autoscaling_config was given"):
        deployed(num_replicas=2, autoscaling_config={})
    assert "autoscaling_config" not in deployed(num_replicas=2).options


@pytest.mark.parametrize(
    ("given", "cpus", "threads"), [(None, 4, 4), (None, 0.5, 1), (None, 2.9, 2), (3, 4, 3)]
)
def test_a_replica_has_as_many_threads_as_cpus(
    given: int | None, cpus: float, threads: int
) -> None:
    settings = ServeSettings(models={"a": "nowhere"}, threads=given)
    assert deployed(settings, num_cpus=cpus).build().threads == threads


def test_slots_by_default_are_those_of_the_largest_package(fake: Any, tmp_path: Path) -> None:
    two = str(fake(compilation=compilation(batch_size=2)).path)
    nine = str(fake(compilation=compilation(batch_size=9)).path)
    one_of_any = str(fake(compilation=compilation(batch_size=None)).path)
    portable = str(fake().path)
    cases = [
        ((two,), 2),
        ((two, nine), 9),
        ((nine, two), 9),
        ((one_of_any,), DEFAULT_SLOTS),
        ((portable,), DEFAULT_SLOTS),
        ((str(tmp_path / "on another machine"),), DEFAULT_SLOTS),
    ]
    for paths, slots in cases:
        models = {str(index): path for index, path in enumerate(paths)}
        settings = ServeSettings(models=models, max_waiting=0)
        assert deployed(settings).options["max_ongoing_requests"] == slots


def test_files_are_not_hashed_for_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def read(path: str, **options: Any) -> Any:
        asked.append((path, options))
        raise QsampleError("unreadable")

    monkeypatch.setattr(server, "read_package", read)
    deployed(ServeSettings(models={"a": "nowhere"}))
    assert asked == [("nowhere", {"verify": False})]


def test_a_replica_whose_engines_have_ended_is_not_healthy() -> None:
    ended: list[str] = []
    inner = SimpleNamespace(ended=lambda: ended)
    replica = deployed().cls()
    replica.app = SimpleNamespace(state=SimpleNamespace(server=inner))
    replica.check_health()
    ended += ["a", "b"]
    with pytest.raises(QsampleError, match="the engines of a, b have ended"):
        replica.check_health()
