"""Formatting of sizes, counts, shapes and foreign text for messages and reports."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence

MOST_DB = 200.0
"""Chosen: equal outputs have an infinite ratio, which JSON cannot represent; rounding of float64 is at about 300."""

_UNPRINTABLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Specified: Unicode categories of characters that move the cursor, change the writing direction, end a line or
cannot be encoded: control and format characters, lone surrogates, line separators."""
_CONTROLS = frozenset({"Cc", "Cs"})
"""Unprintable categories that terminals interpret or streams cannot encode."""
LONGEST_TEXT = 200
"""Maximum number of characters of a foreign text in a message. Chosen: two lines of a terminal."""
_LONGEST_MESSAGE = 2000
"""Maximum number of characters of a message. Chosen: longer than every regular message."""
_LONG_TEXT = re.compile(
    rf"(?P<open>['\"])?(?P<text>(?(open)(?:(?!(?P=open)).){{{LONGEST_TEXT + 1},}}|\S{{{LONGEST_TEXT + 1},}}))"
    r"(?(open)(?P=open))"
)
"""A long text, either quoted or without spaces."""


def command_line(words: Sequence[str]) -> str:
    """Return the words of a command as they are typed in the shell of this system."""
    if os.name == "nt":
        import subprocess

        return subprocess.list2cmdline(words)
    return shlex.join(words)


def first_words(texts: Sequence[object], count: int, noun: str = "more") -> str:
    """List the first texts, and the number of remaining texts.

    >>> first_words(["Add", "Mul", "Exp"], 2), first_words(["Add", "Mul"], 2)
    ('Add, Mul and 1 more', 'Add, Mul')
    """
    left_out = len(texts) - count
    return ", ".join(map(str, texts[:count])) + (f" and {left_out} {noun}" if left_out > 0 else "")


_CLEARLY_SMALLER = 1.15
"""Chosen: a smaller factor, rounded to one digit, hides whether a file became smaller."""


def size_words(size_bytes: int) -> str:
    """Format a size in the largest unit with a value of at least one.

    >>> size_words(999), size_words(90_868_376)
    ('999 B', '90.9 MB')
    """
    size = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if round(size, 1) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def size_change_words(before: int, after: int) -> str:
    """Describe the change of a size: as a factor, or in percent if the file is not clearly smaller.

    >>> size_change_words(91_000_000, 30_200_000), size_change_words(339_500, 343_500), size_change_words(1000, 995)
    ('÷ 3.0', '1.2 % larger', '0.5 % smaller')
    """
    if before >= _CLEARLY_SMALLER * after > 0:
        return f"÷ {before / after:.1f}"
    change = 100 * (after - before) / before if before else 0.0
    if not change:
        return "of equal size"
    return f"{max(abs(change), 0.1):.1f} % {'larger' if change > 0 else 'smaller'}"


def count_words(count: int) -> str:
    """Format a number of parameters.

    >>> count_words(950), count_words(22_713_216), count_words(7_240_000_000)
    ('950', '22.7 M', '7.24 B')
    """
    for scale, unit, digits in ((1e9, "B", 2), (1e6, "M", 1), (1e3, "k", 1)):
        if count >= scale:
            return f"{count / scale:.{digits}f} {unit}"
    return str(count)


_SINGULAR_VERBS = {"are": "is", "were": "was", "have": "has"}


def count_noun(count: int, noun: str, verb: str = "") -> str:
    """Format a count with its noun, and optionally a verb that agrees in number.

    >>> count_noun(1, "node"), count_noun(2, "node")
    ('1 node', '2 nodes')
    >>> count_noun(1, "weight", "are"), count_noun(2, "weight", "are")
    ('1 weight is', '2 weights are')
    """
    counted = f"{count} {noun}{'' if count == 1 else 's'}"
    return f"{counted} {_SINGULAR_VERBS[verb] if count == 1 else verb}" if verb else counted


def time_words(milliseconds: float) -> str:
    """Format a time in milliseconds, without the unit.

    >>> time_words(1.23456), time_words(123.456)
    ('1.235', '123.5')
    """
    return f"{milliseconds:.3f}" if milliseconds < 100 else f"{milliseconds:.1f}"


def decibel_words(sqnr_db: float) -> str:
    """Format an SQNR in decibels for a table column.

    >>> decibel_words(36.25), decibel_words(MOST_DB)
    ('36.2', 'equal')
    """
    return "equal" if sqnr_db >= MOST_DB else f"{sqnr_db:.1f}"


def sqnr_words(sqnr_db: float) -> str:
    """Format an SQNR with its unit.

    >>> sqnr_words(36.25), sqnr_words(MOST_DB)
    ('36.2 dB', 'equal')
    """
    words = decibel_words(sqnr_db)
    return words if sqnr_db >= MOST_DB else f"{words} dB"


def rough_words(number: float) -> str:
    """Format a positive number of low accuracy with two significant digits.

    >>> rough_words(0.0864), rough_words(92.098), rough_words(1234.0)
    ('0.086', '92', '1200')
    """
    digits = 1 - math.floor(math.log10(number)) if number > 0 else 0
    return f"{round(number, digits):.{max(digits, 0)}f}"


def percent_words(share: float) -> str:
    """Format a share in percent; only a share of exactly 1 is written as 100 %.

    >>> percent_words(1.0), percent_words(0.99999)
    ('100 %', '99.99 %')
    """
    return "100 %" if share == 1 else f"{math.floor(share * 10_000) / 100:.2f} %"


def shape_words(dtype: str, shape: Sequence[int | str | None]) -> str:
    """Return a tensor type; a size that is not known is a question mark.

    >>> shape_words("int64", [1, "sequence", None])
    'int64[1, sequence, ?]'
    """
    return f"{dtype}[{', '.join('?' if size is None else str(size) for size in shape)}]"


_originals: dict[str, str] = {}
"""Path of a copy in the cache → the user's path that messages and reports have instead."""


def show_paths_as(paths: Mapping[str, str]) -> None:
    """Write the user's paths instead of those of copies from now on, in messages, reports and JSON.

    Args:
        paths: Path of a copy → path of the original. A folder comes after its files.
    """
    _originals.update(paths)


def _with_originals(text: str) -> str:
    for copy, original in _originals.items():
        text = text.replace(copy, original)
    return text


def printable(text: str) -> str:
    r"""Escape a foreign text to one line without characters that a terminal or a page interprets.

    Control characters (escape sequences, newlines), direction marks and other format characters, and lone surrogates
    are escaped in Python syntax.

    >>> printable("a\x1b[31m\n\u202eb")
    'a\\x1b[31m\\n\\u202eb'
    """
    text = _with_originals(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_escape_unprintable, text))


def _escape_unprintable(character: str) -> str:
    if unicodedata.category(character) not in _UNPRINTABLE:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def terminal_text(text: str) -> str:
    r"""Escape characters that a terminal interprets in a text of several lines; newlines and tabs are kept.

    Format characters of scripts, such as the joiners of emoji and of Persian, are kept as well.

    >>> terminal_text("a\tb\n\x1b[31m\r\x9b")
    'a\tb\n\\x1b[31m\\r\\x9b'
    """
    return "".join(
        _escape_unprintable(char) if unicodedata.category(char) in _CONTROLS and char not in "\n\t" else char
        for char in text
    )


def json_printable(text: str) -> str:
    r"""Escape unprintable characters in the strings of JSON text, without changing their values.

    >>> json_printable('"\u202e"')
    '"\\u202e"'
    """
    for copy, original in _originals.items():
        text = text.replace(json.dumps(copy)[1:-1], json.dumps(original, ensure_ascii=False)[1:-1])
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(character if character == "\n" else _escape_unprintable_in_json(character) for character in text)


def _escape_unprintable_in_json(character: str) -> str:
    if unicodedata.category(character) not in _UNPRINTABLE:
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def message_words(text: str) -> str:
    """Format a message as printable text on one line; very long texts are cut and their length is stated.

    >>> message_words("node '" + "x" * 5000 + "' is unknown")[-50:]
    "xxxxxxxxxxxxxxxxxxx… (5000 characters)' is unknown"
    """
    return _shorten_text(_LONG_TEXT.sub(_shorten_match, printable(text)), _LONGEST_MESSAGE)


def _shorten_match(match: re.Match[str]) -> str:
    quote = match["open"] or ""
    return f"{quote}{_shorten_text(match['text'], LONGEST_TEXT)}{quote}"


def _shorten_text(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
