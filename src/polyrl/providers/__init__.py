"""Where workers come from: processes here, a command, Slurm jobs, Ray actors, Kubernetes Jobs, or your own class."""
