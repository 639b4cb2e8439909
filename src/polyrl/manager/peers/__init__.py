"""The peers at the other end of the port: their connections, and their sessions, which outlive these."""
