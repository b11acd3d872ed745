"""What an Arrow stream says about itself: whether its buffers are compressed, before any is opened.

A compressed buffer of a few kilobytes may become gigabytes. The messages of the format are flatbuffers: tables whose
fields are found by offsets. Three of them are followed here, to the field that names a compression.
"""

from __future__ import annotations

import struct

_CONTINUED = 0xFFFFFFFF
_RECORDS, _DICTIONARY = 3, 2  # kinds of messages, in the union of Message.fbs
_MOST_MESSAGES = 100_000


def check_plain(body: bytes) -> None:
    """Refuse a stream (or a file, which holds a stream) with compressed buffers or broken messages.

    Raises:
        ValueError: Saying which.
    """
    place = 8 if body.startswith(b"ARROW1") else 0
    try:
        for _ in range(_MOST_MESSAGES):
            if place + 8 > len(body):
                return
            (first,) = struct.unpack_from("<I", body, place)
            place += 4
            size = first
            if first == _CONTINUED:
                (size,) = struct.unpack_from("<I", body, place)
                place += 4
            if size == 0:
                return
            if place + size > len(body):
                raise ValueError("a message is cut short")
            place += size + _check_message(body[place : place + size])
    except (struct.error, IndexError):
        raise ValueError("a message cannot be read") from None
    raise ValueError("it has too many messages")


def _check_message(message: bytes) -> int:
    """The length of the message's body, padded as it stands in the stream."""
    table = _u32(message, 0)
    kind = _field(message, table, 1)
    length = _field(message, table, 3)
    header = _field(message, table, 2)
    if kind and header and message[kind] in (_RECORDS, _DICTIONARY):
        records = header + _u32(message, header)
        if message[kind] == _DICTIONARY:
            data = _field(message, records, 1)
            records = data + _u32(message, data) if data else 0
        if records and _field(message, records, 3):
            raise ValueError("its buffers are compressed; send them as they are")
    size = struct.unpack_from("<q", message, length)[0] if length else 0
    if size < 0:
        raise ValueError("a message has a negative length")
    return size


def _field(message: bytes, table: int, number: int) -> int:
    """Where a field of a table is, 0 if it is not there."""
    fields = table - struct.unpack_from("<i", message, table)[0]
    if fields < 0:
        raise ValueError("a message cannot be read")
    (size,) = struct.unpack_from("<H", message, fields)
    if 4 + 2 * number >= size:
        return 0
    (offset,) = struct.unpack_from("<H", message, fields + 4 + 2 * number)
    return table + offset if offset else 0


def _u32(message: bytes, place: int) -> int:
    return struct.unpack_from("<I", message, place)[0]
