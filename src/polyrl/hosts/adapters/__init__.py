"""Public packages of environments, each behind the host's own contract."""
