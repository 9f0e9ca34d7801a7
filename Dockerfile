# syntax=docker/dockerfile:1
# Legato as an image, for one machine or as a node of a Ray cluster (docs/guide/clusters.md):
#   docker build --target cpu -t legato:0.1.0-cpu .
#   docker build --target cuda -t legato:0.1.0-cuda .
#   docker run --rm --init --network host --shm-size 2g legato:0.1.0-cpu
ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON} AS base
# A compiler for kernels, which are made for the machine that they run on; pgrep and pkill to drain a node; wget for the
# probes of KubeRay. Debian keeps one version of each for a release, so that a pinned one is gone with the next fix.
# A volume that is mounted at the cache is the user's own, as the folder is that it covers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 --shell /bin/bash ray \
    && install --directory --owner ray --group ray /home/ray/.cache
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# torch first and alone, as the Makefile does, and in a layer of its own, which most changes leave alone.
FROM base AS torch-cpu
ARG TORCH=2.13.0
RUN pip install --index-url https://download.pytorch.org/whl/cpu "torch==${TORCH}"

# With CUDA's libraries, from PyPI. The driver comes from the host, by NVIDIA's container toolkit.
FROM base AS torch-cuda
ARG TORCH=2.13.0
RUN pip install "torch==${TORCH}"
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility TRITON_CACHE_DIR=/home/ray/.cache/triton

FROM torch-cuda AS cuda
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install "$(echo /wheels/legato-*.whl)[gpu,trace]" && pip check
USER 1000
WORKDIR /home/ray
EXPOSE 8000
HEALTHCHECK --start-period=300s --interval=10s --timeout=5s --retries=3 \
    CMD ["wget", "--quiet", "--tries=1", "--output-document=/dev/null", "http://127.0.0.1:8000/health"]
CMD ["python", "-m", "cluster", "serve", "/usr/local/lib/python3.11/site-packages/ray_configs/gpu_1p1d.yaml"]

# The last stage is what is built without --target.
FROM torch-cpu AS cpu
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install "$(echo /wheels/legato-*.whl)[trace]" && pip check
USER 1000
WORKDIR /home/ray
EXPOSE 8000
HEALTHCHECK --start-period=300s --interval=10s --timeout=5s --retries=3 \
    CMD ["wget", "--quiet", "--tries=1", "--output-document=/dev/null", "http://127.0.0.1:8000/health"]
CMD ["python", "-m", "cluster", "serve", "/usr/local/lib/python3.11/site-packages/ray_configs/quickstart.yaml"]
