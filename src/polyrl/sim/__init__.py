"""The simulator: a driver of the same scheduler that runs live, with a virtual clock and modelled machines."""
