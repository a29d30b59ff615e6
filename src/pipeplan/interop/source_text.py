"""The text of a foreign file, and the numbers in it, with errors that say where."""

import csv
import gzip
import io
import re
import sys
import zlib
from pathlib import Path
from typing import Any

from pipeplan.documents.json_text import parse_json
from pipeplan.documents.limits import MAX_JSON_BYTES
from pipeplan.documents.text import excerpt
from pipeplan.documents.writing import STANDARD_STREAM
from pipeplan.errors import InputError

__all__ = ["csv_rows", "json_in", "number_in", "plain_lines", "read_text", "whole_number_in"]

BYTE_ORDER_MARK = "\ufeff"
GZIP = b"\x1f\x8b"
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
WHOLE_NUMBER = re.compile(r"[0-9]{1,12}", re.ASCII)
LONGEST_NUMBER = 400
DELIMITERS = ",;\t"
TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def read_text(path: str) -> str:
    """The text of a file, or of standard input for `-`; it has to be UTF-8."""
    name = "standard input" if path == STANDARD_STREAM else path
    try:
        if path == STANDARD_STREAM:
            data = sys.stdin.buffer.read(MAX_JSON_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(MAX_JSON_BYTES + 1)
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise InputError(f"{name}: cannot be read: {reason}") from None
    except ValueError:  # a null character in the path
        raise InputError(f"{name!r}: cannot be read: no file has such a name") from None
    data = _unpacked(data, name)
    if len(data) > MAX_JSON_BYTES:
        raise InputError(
            f"{name}: is larger than {MAX_JSON_BYTES / 1e6:g} MB, the limit for such a file"
        )
    try:
        text = data.decode().removeprefix(BYTE_ORDER_MARK)
    except UnicodeDecodeError as problem:
        raise InputError(
            f"{name}: is not UTF-8 text (byte {problem.start}); convert it first"
        ) from None
    if not text.strip():
        raise InputError(f"{name}: is empty")
    return text


def _unpacked(data: bytes, name: str) -> bytes:
    """The bytes, unpacked if they are packed by gzip, as traces of torch often are."""
    if not data.startswith(GZIP):
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return file.read(MAX_JSON_BYTES + 1)
    except (OSError, EOFError, zlib.error):
        raise InputError(f"{name}: is packed by gzip, but damaged") from None


def json_in(text: str) -> Any:
    """The content of a JSON text as plain objects."""
    try:
        return parse_json(text.encode())
    except UnicodeError:
        raise InputError("holds half a character, which no file of ours can hold") from None


def number_in(text: str, where: str) -> float:
    """The finite number that a text holds; `where` begins the message if it holds none."""
    cell = text.strip()
    if len(cell) > LONGEST_NUMBER or not NUMBER.fullmatch(cell):
        raise InputError(f"{where}: {excerpt(cell)} is not a number")
    number = float(cell)
    if number in (float("inf"), float("-inf")):
        raise InputError(f"{where}: {excerpt(cell)} is too large a number")
    if number == 0 and re.search("[1-9]", cell.lower().partition("e")[0]):
        raise InputError(f"{where}: {excerpt(cell)} is too small a number")
    return number


def whole_number_in(text: str, where: str) -> int:
    """The whole number, 0 or more, that a text holds."""
    cell = text.strip()
    if not WHOLE_NUMBER.fullmatch(cell):
        raise InputError(f"{where}: {excerpt(cell)} is not a whole number of at most 12 digits")
    return int(cell)


def csv_rows(text: str) -> list[tuple[int, list[str]]]:
    """The rows of a CSV file with their line numbers, cells stripped, empty lines left out.

    Cells are divided by commas, semicolons or tabs: whichever the first line has most of.
    """
    first = next(line for line in text.splitlines() if line.strip())
    delimiter = max(DELIMITERS, key=first.count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
    rows = []
    try:
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if any(stripped):
                rows.append((reader.line_num, stripped))
    except csv.Error as problem:
        raise InputError(f"line {reader.line_num}: is not CSV: {problem}") from None
    return rows


def plain_lines(text: str) -> list[tuple[int, str]]:
    """The lines that hold something, stripped, with their numbers; without colours of terminals."""
    lines = enumerate(TERMINAL_CODES.sub("", text).splitlines(), 1)
    return [(number, line.strip()) for number, line in lines if line.strip()]
