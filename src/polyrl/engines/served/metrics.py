"""Reading figures from a Prometheus page."""


def read_gauges(page: str, prefix: str) -> dict[str, float]:
    """Figures whose name starts so, without it; those of several engines of one server are added up."""
    figures: dict[str, float] = {}
    for line in page.splitlines():
        if not line.startswith(prefix):
            continue
        name = line[len(prefix) :].partition("{")[0].partition(" ")[0]
        try:
            value = float(line.rpartition(" ")[2])
        except ValueError:
            continue
        figures[name] = figures.get(name, 0.0) + value
    return figures
