"""The decisions: values in, a decision and its reason out. No rule changes the state."""
