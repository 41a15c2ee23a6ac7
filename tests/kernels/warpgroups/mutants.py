# SPDX-License-Identifier: Apache-2.0
"""Modelled SMs on which a warpgroup leaves out something that it needs."""

import sys

from tests.kernels.warpgroups.sm import SM


def without(name, warpgroup, sm=SM):
    """An SM on which a warpgroup does not wait for a barrier or, of "stores", for what TMA writes;
    or has no fence at all or, of "fence in f", none in a function f; or, of "product in f", leaves
    one under way behind it."""

    class Broken(sm):
        def left_out(self, *names):
            return self.me.name == warpgroup and name in names

        def wait(self, bar, parity):
            if not self.left_out(bar.name.split("[")[0]):
                super().wait(bar, parity)

        def fence(self):
            if not self.left_out("fence", f"fence in {sys._getframe(1).f_code.co_name}"):
                super().fence()

        def multiply_wait(self, pending, deps):
            left = self.left_out(f"product in {sys._getframe(1).f_code.co_name}")
            return super().multiply_wait(pending + left, deps)

        def tma_store_wait(self, pending):
            if not self.left_out("stores"):
                super().tma_store_wait(pending)

    return Broken
