"""From scored samples to new weights: advantages, losses, packing, the model and its optimizer, one step at a time.

docs/concepts/training-step.md tells it in order; docs/concepts/algorithms.md has the formulas.
"""
