"""qsample on a Ray cluster: batches with Ray Data, a server with Ray Serve.

It needs the extra `ray`.

Ray distributes, retries and scales; each of its processes runs an `Engine`.
"""

from qsample.addons.ray.processor import QsampleProcessorConfig, build_processor
from qsample.addons.ray.server import serve_app

__all__ = ["QsampleProcessorConfig", "build_processor", "serve_app"]
