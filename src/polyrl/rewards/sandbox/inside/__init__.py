"""The programs inside the sandbox. They use the standard library alone: nothing else is mounted there."""
