"""Ray Serve: `qsample serve`'s application in replicas, each with engines of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qsample.errors import QsampleError
from qsample.serve.app import make_app
from qsample.serve.settings import ServeSettings

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
        settings: those of a server; where they name no threads, a replica has as many as CPUs, at least one.
        num_replicas: how many; None = 1, or as many as `autoscaling_config` says.
        autoscaling_config: Ray Serve's; `target_ongoing_requests` is the settings' slots where it has none, so that a
            replica is added when requests begin to wait.
        num_cpus, num_gpus: of a replica.
        options: of `ray.serve.deployment`. max_ongoing_requests is slots and max_waiting together where it is not
            given, so that a replica never answers 429 while another one has room.

    >>> serve.run(serve_app(ServeSettings(models={"tiny": "tiny-cpu"}), num_replicas=2))
    """
    from ray import serve

    slots = settings.slots or 8
    if settings.threads is None:
        settings = replace(settings, threads=max(1, int(num_cpus)))
    if autoscaling_config is not None:
        autoscaling_config = {"target_ongoing_requests": slots, **autoscaling_config}
        options["autoscaling_config"] = autoscaling_config
    elif num_replicas is not None:
        options["num_replicas"] = num_replicas
    options.setdefault("max_ongoing_requests", slots + settings.max_waiting)

    def build() -> FastAPI:
        return make_app(settings)

    @serve.deployment(name=name, ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus}, **options)
    @serve.ingress(build)
    class Server:
        """The application; Ray asks for its health."""

        def check_health(self) -> None:
            ended = self.app.state.server.ended()  # type: ignore[attr-defined]  # of Ray's wrapper
            if ended:
                raise QsampleError(f"the engines of {', '.join(ended)} have ended")

    application: Application = Server.bind()  # type: ignore[attr-defined]
    return application
