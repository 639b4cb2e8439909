# A worker: docker build -f deploy/docker/worker.Dockerfile -t polyrl-worker .
# With vLLM in place of the builtin engine, whose torch stays as it is:
#   docker build -f deploy/docker/worker.Dockerfile --build-arg BASE=vllm/vllm-openai:v0.32.0 --build-arg EXTRAS=serve -t polyrl-worker-vllm .
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}
ARG EXTRAS=serve,train
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/polyrl
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python3 -m pip install --no-cache-dir ".[${EXTRAS}]" \
    && (id -u 1000 >/dev/null 2>&1 || useradd --create-home --uid 1000 polyrl)
USER 1000
WORKDIR /tmp
ENTRYPOINT ["tini", "--", "polyrl"]
CMD ["worker", "--help"]
