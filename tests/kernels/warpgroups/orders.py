# SPDX-License-Identifier: Apache-2.0
"""Orders in which a modelled SM may run its warpgroups, and copies land."""


def at_random(r):
    return lambda able, flying: r.choice([*able, *flying])


def late(name):
    """One warpgroup goes on only when nothing else can, or the copies land then."""

    def of(r):
        def choose(able, flying):
            first = [w for w in able if w.name != name]
            if name != "copies":
                first += flying
            return r.choice(first or able or flying)

        return choose

    return of


ORDERS = [at_random, late("WG0"), late("WG1"), late("WG2"), late("copies")]
