# SPDX-License-Identifier: Apache-2.0
"""Run by test_offline.py: compiles the Hopper kernel for fp8 caches as Triton 3.8 must, which sees
no part of shared memory as a tile; prints each specification's problems as JSON."""

import json

from mla_kernels.triton_common import gluon_compat
from triton.experimental.gluon import language as gl

gluon_compat.PARTIAL_VIEWS = gl.constexpr(False)  # before any kernel is imported

from mla_kernels.arch import ARCHS  # noqa: E402
from mla_kernels.decode.hopper.fp8 import specs  # noqa: E402
from mla_kernels.offline.check import check  # noqa: E402
from mla_kernels.offline.compiler import compile_spec  # noqa: E402

quick = [spec for spec in specs.specialisations(ARCHS[90]) if spec.quick]
print(json.dumps({spec.name: check(compile_spec(spec, ARCHS[90])) for spec in quick}))
