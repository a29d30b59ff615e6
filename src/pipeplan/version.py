"""The version that plans record; the same as in pyproject.toml.

Reading it from the installed package's metadata would take a tenth of the command line's time.
"""

__all__ = ["VERSION"]

VERSION = "0.1.0"
