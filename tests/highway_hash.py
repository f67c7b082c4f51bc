"""HighwayHash with 64 bits: the checksum that a NATS server stores for a stream's description."""

from collections.abc import Sequence
from struct import pack, unpack

_MASK = 2**64 - 1
_LOW = 2**32 - 1
_PACKET = 32
_FIRST = (0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3)
_SECOND = (0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377)

# For each byte of the mixed lanes, its index in two consecutive lanes.
_MIXED = ((3, 12, 2, 5, 14, 1, 15, 0), (11, 4, 10, 13, 9, 6, 8, 7))


def highway_hash(data: bytes, key: bytes) -> bytes:
    """Return the hash of data with a key of 32 bytes."""
    state = _State(key)
    whole = len(data) // _PACKET * _PACKET
    for first in range(0, whole, _PACKET):
        state.take(data[first : first + _PACKET])
    if len(data) > whole:
        state.take_rest(data[whole:])
    return state.finished()


class _State:
    def __init__(self, key: bytes) -> None:
        lanes = unpack("<4Q", key)
        self.mul0, self.mul1 = list(_FIRST), list(_SECOND)
        self.v0 = [mul ^ lane for mul, lane in zip(_FIRST, lanes, strict=True)]
        self.v1 = [mul ^ _swapped(lane) for mul, lane in zip(_SECOND, lanes, strict=True)]

    def take(self, packet: bytes) -> None:
        self._update(unpack("<4Q", packet))

    def take_rest(self, data: bytes) -> None:
        length = len(data)
        for lane in range(4):
            self.v0[lane] = (self.v0[lane] + (length << 32) + length) & _MASK
            low, high = self.v1[lane] & _LOW, self.v1[lane] >> 32
            self.v1[lane] = _rotated(high, length) << 32 | _rotated(low, length)
        packet = bytearray(_PACKET)
        words = length & ~3
        packet[:words] = data[:words]
        if length & 16:
            packet[28:] = data[-4:]
        elif rest := data[words:]:
            packet[16:19] = rest[0], rest[len(rest) >> 1], rest[-1]
        self.take(bytes(packet))

    def finished(self) -> bytes:
        for _ in range(4):
            self._update([_swapped(self.v0[lane]) for lane in (2, 3, 0, 1)])
        return pack("<Q", (self.v0[0] + self.v1[0] + self.mul0[0] + self.mul1[0]) & _MASK)

    def _update(self, lanes: Sequence[int]) -> None:
        for at, lane in enumerate(lanes):
            self.v1[at] = (self.v1[at] + self.mul0[at] + lane) & _MASK
            self.mul0[at] ^= (self.v1[at] & _LOW) * (self.v0[at] >> 32)
            self.v0[at] = (self.v0[at] + self.mul1[at]) & _MASK
            self.mul1[at] ^= (self.v0[at] & _LOW) * (self.v1[at] >> 32)
        _mix(self.v1, self.v0)
        _mix(self.v0, self.v1)


def _mix(source: list[int], target: list[int]) -> None:
    for at in (0, 2):
        both = pack("<2Q", *source[at : at + 2])
        for offset, order in enumerate(_MIXED):
            (mixed,) = unpack("<Q", bytes(both[index] for index in order))
            target[at + offset] = (target[at + offset] + mixed) & _MASK


def _swapped(lane: int) -> int:
    return (lane >> 32) | (lane << 32) & _MASK


def _rotated(half: int, by: int) -> int:
    return ((half << by) | (half >> (32 - by))) & _LOW
