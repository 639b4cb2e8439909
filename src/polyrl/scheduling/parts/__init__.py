"""The functions that change the state, one module for each concern."""
