"""Reward workers: answers of a run, scored on other machines that dial the manager's port."""
