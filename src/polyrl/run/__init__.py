"""A run: load a recipe, start it, watch it, stop it, resume it."""
