"""Which row ids were seen, at 21 to 43 bytes an id whatever their length."""

from __future__ import annotations

import struct
from array import array
from hashlib import blake2b

_PAIR = struct.Struct("<QQ")


class IdSet:
    """A set of 128-bit digests in one flat array (open addressing): millions of ids without a Python object each."""

    def __init__(self) -> None:
        self._capacity = 1024
        self._slots = array("Q", bytes(16 * self._capacity))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, identifier: str) -> bool:
        """Remember `identifier`; False if it was there already."""
        digest = blake2b(identifier.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        first, second = _PAIR.unpack(digest)
        first |= 1  # zero marks a free slot
        if not self._insert(self._slots, self._capacity, first, second):
            return False
        self._count += 1
        if self._count * 4 > self._capacity * 3:
            self._grow()
        return True

    @staticmethod
    def _insert(slots: array[int], capacity: int, first: int, second: int) -> bool:
        mask = capacity - 1
        position = (second ^ (first >> 32)) & mask
        while True:
            held = slots[2 * position]
            if held == 0:
                slots[2 * position] = first
                slots[2 * position + 1] = second
                return True
            if held == first and slots[2 * position + 1] == second:
                return False
            position = (position + 1) & mask

    def _grow(self) -> None:
        capacity = self._capacity * 2
        slots = array("Q", bytes(16 * capacity))
        for position in range(self._capacity):
            if self._slots[2 * position]:
                self._insert(slots, capacity, self._slots[2 * position], self._slots[2 * position + 1])
        self._slots, self._capacity = slots, capacity
