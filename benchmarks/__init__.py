"""Comparisons of PolyRL with other software, and learning runs. They run from a checkout: no wheel holds them."""
