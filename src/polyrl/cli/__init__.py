"""The command line. `main` is the front; every command is a module of its own, imported only when it is chosen."""
