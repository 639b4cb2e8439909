"""Notices that a worker's machine goes: where they come from, what they say, and watching for them."""
