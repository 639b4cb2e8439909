"""An engine without a model, for trying a whole fleet on one machine and for tests: its knobs, its text, its batch."""

from polyrl.engines.emulated.engine import EmulatedEngine
from polyrl.engines.emulated.text import EmulatedConfig

__all__ = ["EmulatedConfig", "EmulatedEngine"]
