"""Rewards: the score of an answer, computed beside generation by functions that the recipe names."""
