# SPDX-License-Identifier: Apache-2.0
"""The offline compiler: it reads machine code rightly, refuses what may not ship, and what this
package ships compiles for every arch.

Compilation runs in processes of its own: this one may have its kernels bound to the interpreter.
"""

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import mla_kernels
import psutil
import pytest
from mla_kernels.arch import AMD, ARCHS
from mla_kernels.offline import amd, sass, ttgir
from mla_kernels.offline.check import check
from mla_kernels.offline.compiler import CompileReport
from mla_kernels.offline.spec import KernelSpec

SPEC = KernelSpec("op/variant", fn=None, signature={}, tensor_core="native")
GOOD = {"registers": 100, "shared_memory": 1000, "tensor_core": {"wgmma": 4}}

# A loop from 0x40 to 0x90 with wgmma in one from 0x30 to 0xb0, a spill load in that one, a spill
# store inside, and unconditional jumps back into it: from behind the retries of an mbarrier's wait
# and from behind the kernel's end.
LISTING = """
        /*0010*/                   MOV R1, c[0x0][0x28] ;      /* 0x1 */
        /*0020*/               @P3 EXIT ;
        /*0030*/                   LDL R5, [R1+0x8] ;
        /*0040*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0050*/              @!P0 STL.64 [R1], R2 ;
        /*0060*/                   FMUL R4, R4, R5 ;
        /*0090*/               @P1 BRA 0x40 ;
        /*00a0*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*00b0*/                   BRA 0x30 ;
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR37+0xc480], R24 ;
        /*00d0*/              @!P1 BRA 0xc0 ;
        /*00e0*/                   BRA 0x60 ;
        /*00f0*/                   EXIT ;
        /*0100*/                   BRA 0x60 ;
"""


def test_hot_loop_is_the_innermost_with_tensor_core_instructions():
    instructions = sass.parse(LISTING)
    assert sass.hot_loops(instructions) == [sass.Loop(0x40, 0x90, 1, 0, 1)]
    assert sass.hot_spills(instructions) == (0, 1)
    assert sass.tensor_core_families(instructions) == {"wgmma": 1, "mma": 1}


def test_a_kernel_without_such_a_loop_is_searched_whole():
    listing = LISTING.replace("HGMMA", "FFMA").replace("HMMA", "FADD")
    assert sass.hot_spills(sass.parse(listing)) == (1, 1)


def test_a_loop_whose_predicate_stands_behind_the_opcode_is_found():
    listing = LISTING.replace("@P1 BRA 0x40", "    BRA.U !UP0, 0x40")
    assert [loop.start for loop in sass.hot_loops(sass.parse(listing))] == [0x40]


def test_a_loop_that_ends_by_an_unconditional_jump_is_found():
    listing = LISTING.replace("@P1 BRA 0x40", "    BRA 0x40")
    assert [loop.start for loop in sass.hot_loops(sass.parse(listing))] == [0x40]


def test_a_loop_that_ends_with_a_wait_is_found():
    """Of a barrier: the jump behind it has a predicate, which that behind a retry has not."""
    listing = LISTING.replace(
        "        /*0090*/               @P1 BRA 0x40 ;",
        """        /*0070*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR37] ;
        /*0080*/              @!P1 BRA 0x70 ;
        /*0090*/               @P2 BRA 0x40 ;""",
    )
    assert [loop.start for loop in sass.hot_loops(sass.parse(listing))] == [0x40]


# Of a kernel with two warpgroups: the last barrier is made only.
BARRIERS = """
    %bars = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared, #smem, mutable>
    %0 = ttg.memdesc_index %bars[%c0_i32] : !ttg.memdesc<2x1xi64, #shared, #smem, mutable> -> !t
    ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64, #shared, #smem, mutable>
    %bars_1 = ttg.local_alloc : () -> !ttg.memdesc<1x1xi64, #shared, #smem, mutable>
    %1 = ttg.memdesc_index %bars_1[%c0_i32] : !ttg.memdesc<1x1xi64, #shared, #smem, mutable> -> !t
    ttng.init_barrier %1, 128 : !ttg.memdesc<1xi64, #shared, #smem, mutable>
    %tile = ttg.local_alloc : () -> !ttg.memdesc<64x64xbf16, #shared, #smem, mutable>
    ttng.wait_barrier %0, %phase : !ttg.memdesc<1xi64, #shared, #smem, mutable>
"""


@pytest.mark.parametrize(
    ("more", "unused"),
    [
        ("", ("%bars_1",)),
        ("ttng.arrive_barrier %1, 1 : !t", ()),
        ("ttg.warp_specialize(%bars_1, %tile)", ()),
        ("ttng.wait_barrier %10, %phase : !t", ("%bars_1",)),
        (
            "    partition0(%arg0: !t) num_warps(4) {\n  %1 = arith.constant 1 : i32\n"
            "      tt.store %arg0, %1 : !t\n      ttg.warp_return\n    }\n",
            ("%bars_1",),
        ),
        ("%2 = ttg.memdesc_index %bars_1[%c0_i32] : !t\n ttng.arrive_barrier %2, 1 : !t", ()),
        ("%2 = ttg.memdesc_index %bars_1[%c0_i32] : !t", ("%bars_1",)),
    ],
)
def test_a_barrier_that_nothing_uses_is_found(more, unused):
    assert ttgir.unused_barriers(BARRIERS + more) == unused


def test_a_good_report_passes():
    assert check(CompileReport(SPEC, ARCHS[90], **GOOD)) == []


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"error": "ptxas failed"}, "does not compile: ptxas failed"),
        ({"shared_memory": 227 * 1024 + 1}, "227.0 KB of shared memory, sm_90 has 227 KB"),
        ({"hot_local_loads": 2}, "hot loop: 2 LDL, 0 STL"),
        ({"hot_local_stores": 1}, "hot loop: 0 LDL, 1 STL"),
        ({"unused_barriers": ("%bars", "%5")}, "mbarriers that nothing uses, whose places"),
        ({"tensor_core": {"mma": 8}}, "no wgmma instruction"),
        ({"warnings": ("(C7510) serialized",)}, "(C7510) serialized"),
    ],
)
def test_every_kind_of_problem_is_named(fields, problem):
    (found,) = check(CompileReport(SPEC, ARCHS[90], **(GOOD | fields)))
    assert problem in found


def test_any_tensor_core_family_will_do_where_the_spec_says_so():
    spec = KernelSpec("op/small", fn=None, signature={}, tensor_core="any")
    assert check(CompileReport(spec, ARCHS[90], tensor_core={"mma": 8})) == []
    assert check(CompileReport(spec, ARCHS[90])) == ["no tensor-core instruction"]


def test_real_kernels_with_planted_faults_are_caught():
    script = Path(__file__).parent / "offline_faults.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout.splitlines()[-1])
    assert problems["sound"] == []
    assert "spills in the hot loop" in problems["few registers"][0]
    assert "KB of shared memory, sm_86 has 99 KB" in problems["large tile"][0]
    assert "does not compile" in problems["bad code"][0]
    assert problems["no tensor core"] == problems["view"] == ["no tensor-core instruction"]
    for part in ("view of a part", "view of a slice"):  # which Triton 3.8 refuses
        assert "must be all of a tile" in problems[part][0]


def test_the_kernel_for_fp8_caches_compiles_without_views_of_parts(monkeypatch, tmp_path):
    """As with Triton 3.8. Not from a cache: what compiled with such views would be found there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    script = Path(__file__).parent / "offline_whole_views.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout.splitlines()[-1])
    assert len(problems) == 6 and not any(problems.values()), problems


def offline(*args):
    command = [sys.executable, "-m", "mla_kernels.offline", *args]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("arch", [*ARCHS, "amd"])
def test_one_specialisation_of_each_kernel_compiles(arch):
    done = offline("--quick", "--arch", str(arch))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_merge_waits_and_is_asked_for_behind_the_products(tmp_path):
    """Programmatic launch: ACQBULK waits for the kernel before, PREEXIT asks for the one behind.
    Asked for at a program's start, the merge takes time from those who still work."""
    for word in ("decode", "merge"):
        done = offline("--quick", "--arch", "90", "--match", word, "--dump", str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
    kernels = {path.name: sass.parse(path.read_text()) for path in tmp_path.glob("*.sass")}
    # Not that of ranks' choices, whose candidates other kernels than ours write.
    merges = {n: code for n, code in kernels.items() if "merge" in n and "merge_topk" not in n}
    assert len(merges) == 2
    assert [n for n, code in merges.items() if "ACQBULK" not in {i.opcode for i in code}] == []
    asking = 0
    for name, code in kernels.items():
        asks = [i.address for i in code if i.opcode == "PREEXIT"]
        products = [i.address for i in code if i.opcode in sass.OPCODE_FAMILY]
        assert not asks or max(asks) > max(products), name
        asking += bool(asks)
    assert asking >= 15


def test_an_option_that_amd_does_not_know_is_a_problem():
    with pytest.raises(ValueError, match=r"options that HIP knows, got \['warps_per_cta'\]"):
        amd.build(None, {"num_warps": 4, "maxnreg": 255, "warps_per_cta": 4}, AMD)


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "no reader"])
def test_it_ends_when_it_is_told_to_and_its_processes_with_it(how, tmp_path):
    """With work before it, of which nothing is in Triton's cache."""
    command = [sys.executable, "-m", "mla_kernels.offline", "--match", "write_kv_cache"]
    environ = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environ.pop("TRITON_INTERPRET", None)
    run = subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a terminal of its own, all of whose processes get a Ctrl-C
    )
    try:
        for _ in range(3):  # two heads, and the first line
            assert run.stdout.readline()
        started = psutil.Process(run.pid).children(recursive=True)
        assert len(started) >= 2
        if how == "Ctrl-C":
            os.killpg(run.pid, signal.SIGINT)
        elif how == "SIGTERM":
            run.terminate()
        else:
            run.stdout.close()
        expected = {"Ctrl-C": 130, "SIGTERM": -signal.SIGTERM, "no reader": 1}[how]
        assert run.wait(60) == expected
        assert psutil.wait_procs(started, 20)[1] == []
        assert b"Traceback" not in run.stderr.read()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def test_an_unknown_arch_is_named():
    done = offline("--arch", "75")
    assert done.returncode == 2
    assert "expected one of [80, 86, 89, 90, 100, 120] or amd, got '75'" in done.stderr


def test_processes_that_make_no_sense_are_named():
    for count in ("0", "-1", "two", "9999"):
        done = offline("--jobs", count, "--match", "no-such-kernel")
        assert done.returncode == 2
        assert f"expected 1 to 1024, got '{count}'" in done.stderr


def test_interpreted_kernels_are_none_to_compile(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = offline("--quick", "--arch", "90", "--match", "topk")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: expected TRITON_INTERPRET=0 or unset" in done.stderr


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    done = offline("--quick", "--match", "topk", "--dump", str(tmp_path / "file" / "out"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"--dump: [Errno 20] Not a directory: '{tmp_path}/file" in done.stderr


def test_nothing_matching_is_an_error():
    done = offline("--match", "no-such-kernel")
    assert done.returncode == 1
    assert "no specification matches" in done.stderr


@pytest.mark.parametrize("args", [(), ("--quick",)])
def test_every_kernel_is_listed_for_every_arch(args):
    """A kernel that is launched (`*_kernel` under a jit decorator) must have a specification."""
    root = Path(mla_kernels.__file__).parent
    only_sm_90 = {"hopper", "many_rows", "few_rows_fp8"}  # folders
    kernels = {
        (node.name, not only_sm_90.isdisjoint(path.parts))
        for path in root.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("jit" in ast.unparse(d) for d in node.decorator_list)
    }
    listed = {tuple(line.split()[:2]) for line in offline("--list", *args).stdout.splitlines()}
    wanted = {
        (f"sm_{sm}", name)
        for name, hopper_only in kernels
        for sm in ARCHS
        if sm == 90 or not hopper_only
        if ARCHS[sm].e4m3_convert or name not in ("few_rows_kernel", "few_rows_sparse_kernel")
    }
    # No tile for AMD takes kernels on mma.sync, and rows of a top-k are not shared there.
    not_on_amd = {"few_rows_kernel", "few_rows_sparse_kernel", "spread_topk_kernel"}
    not_on_amd |= {"clear_state_kernel"} | {name for name, hopper_only in kernels if hopper_only}
    wanted |= {("amd", name) for name, _ in kernels if name not in not_on_amd}
    assert wanted - listed == set()


def test_what_is_read_before_the_kernel_before_has_ended_is_not_of_the_l1(tmp_path):
    """It may have been read there when it was another's: programs of one row that see different
    lengths of it wait for each other for ever."""
    done = offline("--arch", "90", "--match", "topk/spread", "--dump", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    for path in tmp_path.glob("*.sass"):
        code = sass.parse(path.read_text())
        wait = min(i.address for i in code if i.opcode == "ACQBULK")
        early = [i.text for i in code if i.opcode == "LDG" and i.address < wait]
        assert len(early) >= 2 and all(".STRONG.GPU" in text for text in early), path.name
