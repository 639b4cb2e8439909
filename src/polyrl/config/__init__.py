"""Configuration: one typed tree, one TOML file, `section.key=value` overrides, and one clear line for every mistake.

The structs themselves live with the code that reads them; this package turns text into structs and back.
"""

from polyrl.config.dump import dump_toml
from polyrl.config.load import apply_overrides, build, load_toml

__all__ = ["apply_overrides", "build", "dump_toml", "load_toml"]
