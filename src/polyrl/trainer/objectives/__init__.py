"""Losses, advantages, corrections, KL estimators and aggregation, by name."""
