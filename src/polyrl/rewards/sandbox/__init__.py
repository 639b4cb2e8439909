"""A sandbox for programs that a model wrote: bubblewrap, seccomp, limits, and warm interpreters that fork."""
