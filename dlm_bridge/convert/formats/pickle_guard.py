"""A look at a pickle's opcodes before it is loaded: what would make the loader itself ask for absurd memory.

The C unpickler keeps its memo in an array, so that one opcode of five bytes can make it clear 32 GB, and it makes room
for a byte array before it looks for the bytes. Both are seen here without a step of Python for each opcode.
"""

from __future__ import annotations

import re

_FIXED = re.compile(
    rb"(?:[()012NQRabdelostu}\]\x81\x85-\x89\x8f-\x94\x97\x98]"  # no argument
    rb"|[Khq\x80\x82].|[M\x83]..|[Jj\x84]....|[G\x95]........"  # 1, 2, 4 and 8 bytes
    rb"|[FILPSVg][^\n]*\n|[ci][^\n]*\n[^\n]*\n"  # lines
    rb"|r..[\x00-\x0f]\x00|p\d{1,6}\n)*+",  # memo places below a million, which need no second look
    re.DOTALL,
)
_COUNTED = {  # opcode -> bytes of the length that follows it
    b"\x8c": 1, b"X": 4, b"\x8d": 8, b"C": 1, b"B": 4, b"\x8e": 8, b"U": 1, b"T": 4, b"\x96": 8,
    b"\x8a": 1, b"\x8b": 4,
}  # fmt: skip


def check_pickle(data: bytes) -> None:
    """Raise ValueError where the pickle names a memo place or a length that its own size cannot explain, or where an
    opcode is not known."""
    place = 0
    while True:
        match = _FIXED.match(data, place)
        assert match is not None
        place = match.end()
        code = data[place : place + 1]
        if code == b".":
            return
        if code in _COUNTED:
            start = place + 1 + _COUNTED[code]
            length = int.from_bytes(data[place + 1 : start], "little")
            if start + length > len(data):
                raise ValueError(f"byte {place} of the pickle asks for {length} bytes, more than there are")
            place = start + length
        elif code == b"r" and int.from_bytes(data[place + 1 : place + 5], "little") <= len(data) - 5:
            place += 5
        elif code in (b"r", b"p"):
            raise ValueError(f"byte {place} of the pickle asks for a memo larger than the pickle")
        elif code:
            raise ValueError(f"byte {place} of the pickle is no opcode that is known")
        else:
            raise ValueError("the pickle is cut off")
