"""A host: runs environments' code, plays episodes, and serves the policy to them on its loopback."""
