"""Encodes numbers in protobuf's wire format, for the reader and the writer of ONNX files; imports nothing."""

from __future__ import annotations

__all__ = ["varint"]


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it: seven bits to a byte, the lowest first, the high bit on all but the last.

    >>> varint(300).hex()
    'ac02'
    """
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)
