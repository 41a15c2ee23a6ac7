# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of decode/triton."""

import pytest
from mla_kernels.decode.triton import launcher


@pytest.fixture
def count_launches(monkeypatch):
    """`count_launches("launch_many_rows")`: a list as long as that function of
    decode/triton/launcher.py was called."""

    def count(name):
        original, calls = getattr(launcher, name), []

        def launch(*args, **options):
            calls.append(name)
            return original(*args, **options)

        monkeypatch.setattr(launcher, name, launch)
        return calls

    return count
