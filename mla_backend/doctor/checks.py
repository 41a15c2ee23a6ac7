# SPDX-License-Identifier: Apache-2.0
"""The checks, in the order in which they are shown. Each judges `Facts` and touches nothing."""

from collections.abc import Callable

from mla_backend.doctor import fp8, installation, machine, plugins
from mla_backend.doctor.facts import Facts
from mla_backend.doctor.report import Result

CHECKS: tuple[Callable[[Facts], Result], ...] = (
    installation.python,
    installation.own_package,
    installation.vllm,
    installation.torch,
    installation.torch_companions,
    installation.triton,
    installation.kernels_package,
    plugins.entry_points,
    plugins.vllm_plugins_filter,
    plugins.backend_registered,
    plugins.platform,
    plugins.engine,
    plugins.settings,
    fp8.queries,
    fp8.indexer,
    machine.devices,
    machine.memory,
    machine.shared_memory,
    machine.libnuma,
    machine.compiler,
)
