"""Traces of a run for people: its account, metrics and pictures, and the display in a terminal."""
