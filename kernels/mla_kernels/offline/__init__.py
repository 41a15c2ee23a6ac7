# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton and Gluon kernels for any GPU without having one, and check what came out.

Each kernel package lists what it ships in a module `specs.py` with one function,
`specialisations(arch: Arch) -> list[KernelSpec]`. From the shell:

    python -m mla_kernels.offline --arch 90 --match decode

Nothing is imported here: without Triton the command must still say what it lacks.
"""
