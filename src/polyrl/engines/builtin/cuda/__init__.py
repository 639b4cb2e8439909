"""The builtin engine on a GPU."""
