"""DLLs that Wine lacks for Windows builds of numpy and of Rust extensions, made beside ``python.exe``.

* ``ucrtbase.dll``: numpy calls ``crealf``, ``cimagf`` and similar functions when it is imported. Wine 8 and 10 have
  stubs that end the process. Stubs of functions that take a few bytes of code are replaced in a copy of Wine's DLL.
* ``propsys.dll``: ``platform.platform()`` calls ``VariantToString``, a stub in Wine 8. In the copy the function fails,
  as on a system without WMI.
* ``bcryptprimitives.dll``: every Rust extension imports ``ProcessPrng`` from it. Wine 8 has no such DLL; one with a
  forwarded export is written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

NAMES = ("ucrtbase", "propsys", "bcryptprimitives")
"""DLLs that Wine must take from the folder of the program."""

# Specified: x64 calling convention. A complex float is passed in rcx, a complex double by address in rcx; results are
# returned in xmm0.
_CODE: Mapping[str, Mapping[str, str]] = {
    "ucrtbase.dll": {
        "crealf": "660f6ec1c3",  # movd xmm0, ecx; ret
        "cimagf": "48c1e920660f6ec1c3",  # shr rcx, 32; movd xmm0, ecx; ret
        "creall": "f20f1001c3",  # movsd xmm0, [rcx]; ret
        "cimag": "f20f104108c3",  # movsd xmm0, [rcx + 8]; ret
        "cimagl": "f20f104108c3",
        # movups xmm0, [rcx]; mulpd xmm0, xmm0; haddpd xmm0, xmm0; sqrtsd xmm0, xmm0; ret
        "cabs": "0f1001660f59c0660f7cc0f20f51c0c3",
        "cabsl": "0f1001660f59c0660f7cc0f20f51c0c3",
        "cabsf": "66480f6ec10f59c0f20f7cc0f30f51c0c3",  # movq xmm0, rcx; mulps; haddps; sqrtss; ret
    },
    "propsys.dll": {"VariantToString": "b801400080c3"},  # mov eax, E_NOTIMPL; ret
}
_BUILT_IN = b"Wine builtin DLL"
"""Mark of Wine's DLLs. A marked DLL is not taken from the folder of a program."""


def fill_gaps(wine_dlls: Path, target: Path) -> None:
    """Write the DLLs into a folder.

    Args:
        wine_dlls: Folder of Wine's 64-bit DLLs.
        target: Folder of the program.

    Raises:
        OSError: a file cannot be read or written.
    """
    for name, codes in _CODE.items():
        data = (wine_dlls / name).read_bytes()
        filled = bytearray(data)
        for function, start in _exported_functions(data):
            if function in codes and _is_stub(data[start : start + 19]):
                code = bytes.fromhex(codes[function])
                filled[start : start + len(code)] = code
        if filled != data:
            (target / name).write_bytes(filled.replace(_BUILT_IN, b"patched copy".ljust(len(_BUILT_IN))))
    if not (wine_dlls / "bcryptprimitives.dll").exists():
        forwarding = _forwarding_dll("bcryptprimitives.dll", "ProcessPrng", "advapi32.SystemFunction036")
        (target / "bcryptprimitives.dll").write_bytes(forwarding)


def _is_stub(code: bytes) -> bool:
    """Return True for sub rsp, 40; lea rcx, [rip + …]; lea rdx, [rip + …]; call: it reports a missing function."""
    return (code[:7], code[11:14], code[18:]) == (b"\x48\x83\xec\x28\x48\x8d\x0d", b"\x48\x8d\x15", b"\xe8")


def _exported_functions(data: bytes) -> Iterator[tuple[str, int]]:
    """Yield name and offset in the file of each function that a PE32+ DLL exports, without forwarded functions."""
    (header,) = struct.unpack_from("<I", data, 0x3C)
    section_count, optional_bytes = struct.unpack_from("<H12xH", data, header + 6)
    optional = header + 24
    sections = [
        struct.unpack_from("<IIII", data, optional + optional_bytes + 40 * index + 8) for index in range(section_count)
    ]

    def offset(address: int) -> int:
        found: int = next(
            address - start + raw
            for size, start, raw_size, raw in sections
            if 0 <= address - start < max(size, raw_size)
        )
        return found

    def word(address: int) -> int:
        value: int = struct.unpack_from("<I", data, address)[0]
        return value

    first, size = struct.unpack_from("<II", data, optional + 112)  # the first data directory
    name_count, functions, names, ordinals = struct.unpack_from("<IIII", data, offset(first) + 24)
    for index in range(name_count):
        name_start = offset(word(offset(names) + 4 * index))
        (ordinal,) = struct.unpack_from("<H", data, offset(ordinals) + 2 * index)
        function = word(offset(functions) + 4 * ordinal)
        if not first <= function < first + size:
            yield bytes(data[name_start : data.index(b"\0", name_start)]).decode(), offset(function)


def _forwarding_dll(name: str, function: str, forwarded: str) -> bytes:
    """Return a PE32+ DLL without code, with one export that is a function of another DLL (``dll.function``)."""
    start = 0x1000
    strings = (name, function, forwarded)
    # Directory of 40 bytes; one address of a function, one of a name, one ordinal; the strings.
    places = [start + 50 + sum(len(text) + 1 for text in strings[:index]) for index in range(len(strings))]
    table = struct.pack("<IIHHIIIIIII", 0, 0, 0, 0, places[0], 1, 1, 1, start + 40, start + 44, start + 48)
    table += struct.pack("<IIH", places[2], places[1], 0)
    table += b"".join(text.encode() + b"\0" for text in strings)
    raw = table.ljust(0x200, b"\0")
    dos = b"MZ".ljust(0x3C, b"\0") + struct.pack("<I", 0x40)
    coff = b"PE\0\0" + struct.pack("<HHIIIHH", 0x8664, 1, 0, 0, 0, 240, 0x2022)
    optional = struct.pack("<HBBIIIII", 0x20B, 14, 0, 0, len(raw), 0, 0, start)
    optional += struct.pack(
        "<QIIHHHHHHIIIIHH", 0x180000000, 0x1000, 0x200, 6, 0, 0, 0, 6, 0, 0, 0x2000, 0x200, 0, 2, 0x100
    )
    optional += struct.pack("<QQQQII", 0x100000, 0x1000, 0x100000, 0x1000, 0, 16)
    optional += struct.pack("<II", start, len(table)) + bytes(8 * 15)
    section = b".edata\0\0" + struct.pack("<IIIIIIHHI", len(table), start, len(raw), 0x200, 0, 0, 0, 0, 0x40000040)
    return (dos + coff + optional + section).ljust(0x200, b"\0") + raw
