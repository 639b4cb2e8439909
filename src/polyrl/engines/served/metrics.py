"""Reading figures from a Prometheus page."""

import math


def read_gauges(page: str, prefix: str) -> dict[str, list[float]]:
    """Figures whose name starts so, without it: one of each engine of a server. What is no number is left out."""
    figures: dict[str, list[float]] = {}
    for line in page.splitlines():
        if not line.startswith(prefix):
            continue
        name = line[len(prefix) :].partition("{")[0].partition(" ")[0]
        try:
            value = float(line.rpartition(" ")[2])
        except ValueError:
            continue
        if math.isfinite(value):
            figures.setdefault(name, []).append(value)
    return figures
