"""Help texts that can be read in a narrow terminal: what an option does stands below its name."""

import shutil
from collections.abc import Iterable

import click

__all__ = ["NarrowContext"]

NARROW = 60
"""A narrower terminal has no room for two columns."""
LEAST_WIDTH = 30
INDENT = 4


class NarrowFormatter(click.HelpFormatter):
    """As click's, but in one column where the terminal is narrow."""

    def __init__(self, width: int | None = None, max_width: int | None = None) -> None:
        columns = shutil.get_terminal_size().columns
        self.is_narrow = width is None and columns < NARROW
        super().__init__(
            width=max(columns - 1, LEAST_WIDTH) if self.is_narrow else width, max_width=max_width
        )

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        """Names and what they mean."""
        super().write_dl(rows, INDENT - col_spacing if self.is_narrow else col_max, col_spacing)


class NarrowContext(click.Context):
    """A command's context whose help fits the terminal."""

    formatter_class = NarrowFormatter
