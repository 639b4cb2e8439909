"""Published figures, played again: in the simulator, with real processes at a scaled clock, or on a GPU.

    names -> a section of figures -> cases -> playing (a simulation, or emulation's processes) -> checks -> a page

A section asks for cases and compares what comes back; it does not know where they are played.
"""
