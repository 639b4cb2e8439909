"""The documentation site: `make docs` builds it from docs/, and from the code itself where a page lists what it has."""
