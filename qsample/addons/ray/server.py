"""Ray Serve: the application of `qsample serve` in replicas with separate engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qsample.addons.serve.app import make_app
from qsample.addons.serve.settings import ServeSettings
from qsample.errors import QsampleError, shown
from qsample.package.package import read_package
from qsample.runtime.engine import DEFAULT_SLOTS

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve import Application


def serve_app(
    settings: ServeSettings,
    *,
    num_replicas: int | str | None = None,
    autoscaling_config: Mapping[str, Any] | None = None,
    num_cpus: float = 1,
    num_gpus: float = 0,
    name: str = "qsample",
    **options: Any,
) -> Application:
    """An application for `ray.serve.run`: OpenAI's API, streams included, over replicas.

    Args:
        settings: the settings of each replica's server. `threads` defaults to a replica's CPUs, at
            least 1.
        num_replicas: the number of replicas. It is 1 by default, or the range of
            `autoscaling_config`; "auto" is Ray Serve's range.
        autoscaling_config: Ray Serve's settings. Its `target_ongoing_requests` defaults to the
            settings' slots, so that a replica is added when requests begin to wait.
        num_cpus, num_gpus: the CPUs and GPUs of a replica.
        name: the name of the deployment.
        options: further options of `ray.serve.deployment`. max_ongoing_requests defaults to slots
            and max_waiting together, so that a replica never answers 429 while another replica has
            room. graceful_shutdown_timeout_s, the time for a superfluous replica to finish its
            streams, defaults to the settings' drain_timeout.

    Raises ValueError if a number of replicas is given together with autoscaling_config.

    >>> serve.run(serve_app(ServeSettings(models={"tiny": "tiny-cpu"}), num_replicas=2))
    """
    if autoscaling_config is not None and num_replicas not in (None, "auto"):
        raise ValueError(
            f"num_replicas is {shown(num_replicas)} and autoscaling_config was given, which "
            "decides that; leave one of them out"
        )
    from ray import serve

    slots = (
        max(map(_default_slots, settings.models.values()))
        if settings.slots is None
        else settings.slots
    )
    if settings.threads is None:
        settings = replace(settings, threads=max(1, int(num_cpus)))
    if autoscaling_config is not None or num_replicas == "auto":
        options["autoscaling_config"] = {
            "target_ongoing_requests": slots,
            **(autoscaling_config or {}),
        }
    if num_replicas is not None:
        options["num_replicas"] = num_replicas
    options.setdefault("max_ongoing_requests", slots + settings.max_waiting)
    options.setdefault("graceful_shutdown_timeout_s", settings.drain_timeout)

    def build() -> FastAPI:
        return make_app(settings)

    @serve.deployment(
        name=name, ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus}, **options
    )
    @serve.ingress(build)
    class Server:
        """The application. Ray asks for its health."""

        def check_health(self) -> None:
            # Ray's wrapper sets `app`.
            ended = self.app.state.server.ended()  # type: ignore[attr-defined]
            if ended:
                raise QsampleError(f"the engines of {', '.join(ended)} have ended")

    application: Application = Server.bind()  # type: ignore[attr-defined]
    return application


def _default_slots(path: str) -> int:
    """The slots of an engine by default: the rows that the package was compiled for, if their
    number is fixed."""
    # The package may be only on other machines. Otherwise, the replicas report the error.
    try:
        compilation = read_package(path, verify=False).manifest.compilation
    except (OSError, QsampleError):
        return DEFAULT_SLOTS
    if compilation is None or compilation.batch_size is None:
        return DEFAULT_SLOTS
    return compilation.batch_size
