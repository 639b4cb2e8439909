"""Training: turns scored samples into new weights. Advantages, losses, packing, the model, its optimizer, and the loop.

docs/concepts/training-step.md explains a step from start to end; docs/concepts/algorithms.md has the formulas.
"""
