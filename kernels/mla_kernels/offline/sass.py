# SPDX-License-Identifier: Apache-2.0
"""Reading the machine code that cuobjdump prints: opcodes, tensor-core families, loops, spills."""

import re
from collections import Counter
from typing import NamedTuple

# Opcode prefixes of each tensor-core family.
FAMILIES = {
    "mma": ("HMMA", "IMMA", "DMMA", "QMMA", "OMMA"),
    "wgmma": ("HGMMA", "IGMMA", "QGMMA"),
    "tcgen05": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"),
}
OPCODE_FAMILY = {opcode: family for family, ops in FAMILIES.items() for opcode in ops}


class Instruction(NamedTuple):
    address: int
    predicated: bool
    opcode: str  # without suffixes: HMMA.16816.F32.BF16 -> HMMA
    text: str


class Loop(NamedTuple):
    start: int
    end: int
    tensor_core: int
    local_loads: int
    local_stores: int


def parse(sass: str) -> list[Instruction]:
    instructions = []
    for line in sass.splitlines():
        match = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*)(.*?);", line)
        if match:
            address, predicate, opcode, rest = match.groups()
            instructions.append(Instruction(int(address, 16), bool(predicate), opcode, rest))
    return instructions


def tensor_core_families(instructions: list[Instruction]) -> Counter[str]:
    """Tensor-core instructions by family."""
    return Counter(OPCODE_FAMILY[i.opcode] for i in instructions if i.opcode in OPCODE_FAMILY)


def hot_loops(instructions: list[Instruction]) -> list[Loop]:
    """The innermost loops that hold tensor-core instructions."""
    exits = [i.address for i in instructions if i.opcode == "EXIT" and not i.predicated]
    spans = []
    for n, i in enumerate(instructions):
        start = _target(i)
        if start is None or start >= i.address or _ends_retry(instructions, n):
            continue
        # An unconditional jump back from behind the kernel's end is a retry too.
        if _conditional(i) or not any(start <= end < i.address for end in exits):
            spans.append((start, i.address))
    loops = [loop for start, end in spans if (loop := _loop(instructions, start, end)).tensor_core]
    return [
        loop
        for loop in loops
        if not any(o != loop and loop.start <= o.start and o.end <= loop.end for o in loops)
    ]


def _target(i: Instruction) -> int | None:
    """Of a jump."""
    found = re.search(r"0x([0-9a-f]+)", i.text) if i.opcode == "BRA" else None
    return int(found.group(1), 16) if found else None


def _conditional(jump: Instruction) -> bool:
    return jump.predicated or bool(re.search(r"\bU?P\d", jump.text))


def _ends_retry(instructions: list[Instruction], n: int) -> bool:
    """Whether instruction n is the jump back behind the retries of a wait for an mbarrier, which
    stand behind the rest of the kernel."""
    if n < 2:
        return False
    wait, again, back = instructions[n - 2 : n + 1]
    return not _conditional(back) and wait.opcode == "SYNCS" and _target(again) == wait.address


def hot_spills(instructions: list[Instruction]) -> tuple[int, int]:
    """(local loads, local stores) in the hot loops; in the whole kernel if it has none."""
    loops = hot_loops(instructions)
    if not loops and instructions:
        loops = [_loop(instructions, 0, instructions[-1].address)]
    return sum(loop.local_loads for loop in loops), sum(loop.local_stores for loop in loops)


def _loop(instructions: list[Instruction], start: int, end: int) -> Loop:
    body = [i.opcode for i in instructions if start <= i.address <= end]
    tensor_core = sum(opcode in OPCODE_FAMILY for opcode in body)
    return Loop(start, end, tensor_core, body.count("LDL"), body.count("STL"))
