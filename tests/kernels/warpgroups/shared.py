# SPDX-License-Identifier: Apache-2.0
"""Shared memory of a modelled program. Each tile of a ring is a place; parts of a tile are all of
it."""

from tests.kernels.warpgroups.order import Barrier, Place
from tests.kernels.warpgroups.values import Value, known


class Shared:
    """A shared-memory descriptor."""

    def __init__(self, sm, shape, tiles=None, key=(), itemsize=2):
        self.sm = sm
        self.shape = list(shape)
        self.tiles = {"name": "?"} if tiles is None else tiles  # of the allocation, by key
        self.key = key
        self.itemsize = itemsize

    def index(self, i):
        i = int(i)
        assert 0 <= i < self.shape[0], f"{self.tiles['name']}: {i} of {self.shape[0]}"
        return Shared(self.sm, self.shape[1:], self.tiles, self.key or (i,), self.itemsize)

    def view(self, shape, itemsize=None):
        return Shared(self.sm, shape, self.tiles, self.key, itemsize or self.itemsize)

    def slice(self, start, length, dim=0):
        shape = list(self.shape)
        assert 0 <= start and start + length <= shape[dim]
        shape[dim] = length
        return self.view(shape)

    def permute(self, order):
        return self.view([self.shape[i] for i in order])

    @property
    def name(self):
        return self.tiles["name"] + "".join(f"[{i}]" for i in self.key)

    @property
    def place(self):
        return self.tiles.setdefault(self.key, Place(self.name))

    @property
    def barrier(self):
        return self.tiles[self.key]

    def init(self, count):
        self.tiles[self.key] = Barrier(self.name, int(count))

    def load(self, layout=None):
        self.sm.access(self.place)
        return Value(self.place.value)

    def store(self, value):
        self.sm.access(self.place, writes=True)
        self.place.value = known(value)
