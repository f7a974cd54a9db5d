# `qsample serve` in a container, with the cache in a volume; docs/serving.md has the commands.
#
#   docker build -t qsample .
#   docker run --rm -p 8000:8000 -v qsample-cache:/cache qsample [MODEL] [options of qsample serve]
#
# Without MODEL it serves the small bundled model. --build-arg EXTRAS=cpu,serve leaves out torch: the image is smaller and serves
# packages only.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
ARG EXTRAS=cpu,export,serve
# An export needs the CPU build of torch; PyPI's brings several gigabytes of CUDA libraries.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY . .
RUN python -m venv /opt/qsample && /opt/qsample/bin/pip install --no-cache-dir ".[${EXTRAS}]"

FROM python:${PYTHON}-slim
RUN useradd --uid 10001 --create-home qsample && install -d -o qsample -g qsample /cache
COPY --from=build /opt/qsample /opt/qsample
ENV PATH=/opt/qsample/bin:$PATH QSAMPLE_CACHE=/cache/qsample HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1
USER qsample
WORKDIR /home/qsample
VOLUME /cache
EXPOSE 8000
# The first start may download, export and compile a model.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# As process 1, it gets the signals. A page in a browser reaches it under localhost only, until --allowed-host NAME is added.
ENTRYPOINT ["qsample", "serve", "--host", "0.0.0.0", "--port", "8000", "--allowed-host", "localhost"]
