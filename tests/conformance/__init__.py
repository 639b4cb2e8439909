"""What goes wrong when agents are trained, as cases that any trainer can run. The folder needs pytest alone."""
