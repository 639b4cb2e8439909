# The trainer: docker build -f deploy/docker/trainer.Dockerfile -t polyrl-trainer .
# It runs workers with the builtin engine too. bubblewrap is for the reward `code`, gcc for Triton's kernels.
FROM python:3.12-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap gcc libc6-dev tini \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/polyrl
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python3 -m pip install --no-cache-dir '.[data,serve,track,train]' \
    && useradd --create-home --uid 1000 polyrl \
    && install --directory --owner polyrl /runs
USER 1000
WORKDIR /home/polyrl
EXPOSE 5000 5100
ENTRYPOINT ["tini", "--"]
CMD ["polyrl", "doctor"]
