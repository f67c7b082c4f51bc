"""The subject to which a delivered message is acknowledged, which tells where it is stored."""

# Domain and account stand before the rest, and more may follow it.
_FIELDS_OF_NEWER_FORM = 11


def sequence_and_time(reply: str) -> tuple[int, int]:
    """Read a message's stream sequence, and when it was written, in nanoseconds since 1970.

    ``$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<consumer sequence>.<time>.<pending>``;
    the newer form has the domain and the account after ``ACK``.
    """
    fields = reply.split(".")
    first = 5 if len(fields) < _FIELDS_OF_NEWER_FORM else 7
    return int(fields[first]), int(fields[first + 2])
