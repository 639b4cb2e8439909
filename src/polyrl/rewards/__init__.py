"""Rewards: what an answer is worth, computed beside generation by functions that are named in the recipe."""
