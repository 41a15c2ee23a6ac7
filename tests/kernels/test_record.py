# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a call, what is not, and with what a replay calls the compiled kernel."""

import copy
import inspect
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from mla_kernels import plan_mla_decode
from mla_kernels.decode.plan import launcher
from mla_kernels.triton_common import direct, record
from mla_kernels.triton_common import launch as module
from mla_kernels.triton_common.record import Recordings, kind, rows_kind
from mla_kernels.triton_common.runtime import INTERPRET
from triton.runtime.jit import JITFunction

STREAM = 4711
# What Triton's C function takes before the kernel's own arguments: one of each kernel (3.6), or one
# of all (from 3.7 on), which takes these as a list.
HEADERS = {
    "each": (STREAM, "function", False, True, None, None, "metadata", None, None, None),
    "all": (
        *(STREAM, "function", False, True, "metadata", None, None, None, None, None),
        *("annotations", "signature"),
    ),
}
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64], "fp4_padded": False}


class Compiled:
    """Stands in for a compiled kernel; `direct` are the calls of its C function, (grid, what else
    comes before the kernel's own arguments, these)."""

    function, packed_metadata = "function", "metadata"
    form = "each"  # the fixture `form`

    def __init__(self, boxes=False, scratch=0):
        self.direct = []
        launcher = _Builtin(self.direct, len(HEADERS[self.form]), self.form == "all")
        tensordesc_indices, tensordesc_meta = {0}, [META]

        def inner(*args):
            launcher(*args, tensordesc_indices, tensordesc_meta)

        self.run = types.SimpleNamespace(
            launch=inner if boxes else launcher,
            global_scratch_size=scratch,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=True,
        )
        if self.form == "all":
            self.run.arg_annotations, self.run.kernel_signature = "annotations", "signature"

    def __getitem__(self, grid):
        return lambda *args: None


class _Builtin:
    """Not a Python function, as the C function is not."""

    def __init__(self, calls, header, listed):
        self.calls, self.header, self.listed = calls, header, listed

    def __call__(self, *args):
        before = 3 + self.header
        values = args[before] if self.listed else args[before:]
        assert len(args) == before + 1 or not self.listed
        self.calls.append((args[:3], args[3:before], tuple(values)))


class Kernel(JITFunction):
    def __init__(self, compiled):
        def kernel(x, y, n, BLOCK=64):
            pass

        self.signature = inspect.signature(kernel)
        self.compiled = compiled

    def __getitem__(self, grid):
        return lambda *args, **named: self.compiled


@pytest.fixture(autouse=True, params=HEADERS)
def form(request, monkeypatch):
    """Of Triton's C function, whichever Triton is installed."""
    monkeypatch.setattr(Compiled, "form", request.param)
    format = direct._FORM_OF_A_KERNEL if request.param == "each" else None
    monkeypatch.setattr(direct.driver, "_BASE_ARGS_FORMAT", format, raising=False)
    monkeypatch.setattr(direct, "_source", lambda: f'Parse(args, "{direct._FORM_OF_ALL}")')
    return request.param


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A device whose driver notes what it is asked to encode."""
    encoded = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda d: STREAM, raising=False)
    monkeypatch.setattr(module, "_READY", {})
    monkeypatch.setattr(direct, "_FORMS", {})

    def make(arg, meta, unused):  # as from Triton 3.9 on
        encoded.append(arg.base.data_ptr())
        return [("box", arg.base.data_ptr()), *arg.shape, *arg.strides]

    monkeypatch.setattr(direct.driver, "make_tensordesc_arg", make)
    return encoded


def box_of(x):
    shape, strides = x.shape, x.stride()
    return types.SimpleNamespace(
        base=x, shape=shape, strides=strides, padding="zero", block_shape=[64], layout=META
    )


def double(kernel, x, y):
    """A call with two launches: the whole x and a part of it that starts later."""
    rows = x.view(-1, 8)
    module.launch(kernel, (rows.shape[0],), x, y, 3)
    module.launch(kernel, (2, 2), rows[1:].flatten(), y, 3, BLOCK=32)


def test_a_replay_is_the_call_at_other_addresses(form):
    store, compiled = Recordings(), Compiled()
    kernel = Kernel(compiled)
    for i in range(3):
        x, y = torch.zeros(64), torch.zeros(3)
        replay = store.find("key")
        if replay is None:
            assert i == 0
            store.record("key", [x, y], lambda x=x, y=y: double(kernel, x, y))
            continue
        compiled.direct.clear()
        replay([x, y])
        one, two = compiled.direct
        assert one == ((8, 1, 1), HEADERS[form], (x.data_ptr(), y.data_ptr(), 3, 64))
        assert two == ((2, 2, 1), HEADERS[form], (x.data_ptr() + 32, y.data_ptr(), 3, 32))
        replay([x, y], (5, 1, 1))
        assert compiled.direct[2][0] == (5, 1, 1)


def test_a_view_that_is_gone_lends_its_id_to_nobody():
    """Python gives the id of what is gone to the next tensor: here to a view of no operand."""
    store, compiled = Recordings(), Compiled()
    kernel = Kernel(compiled)
    x, unknown = torch.zeros(64), torch.zeros(64)

    def call():
        gone = [x.view(8, 8) for _ in range(1000)]
        gone.clear()
        module.launch(kernel, (1,), unknown.view(8, 8), 2, 3)

    store.record("key", [x], call)
    assert store.find("key") is None


def test_every_replay_has_temporaries_of_its_own(monkeypatch):
    store, compiled = Recordings(), Compiled()
    kernel = Kernel(compiled)
    x = torch.zeros(64)

    def call():
        halves = torch.empty(2, 16).split([1, 1])
        module.launch(kernel, (1,), x, halves[1], 3)
        module.launch(kernel, (1,), x.new_empty(5, dtype=torch.int32), halves[0], 3)

    store.record("key", [x], call)
    made, new = [], torch.empty_strided

    def noted(*args, **options):
        made.append(new(*args, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty_strided", noted)
    store.find("key")([x])
    one, two = (values[:2] for _, _, values in compiled.direct)
    assert one == (x.data_ptr(), made[0].data_ptr() + 64)
    assert two == (made[1].data_ptr(), made[0].data_ptr())
    assert made[0].shape == (2, 16) and made[0].dtype == torch.float32
    assert made[1].shape == (5,) and made[1].dtype == torch.int32


def test_boxes_are_encoded_once_an_address(gpu):
    store, compiled = Recordings(), Compiled(boxes=True)
    kernel = Kernel(compiled)
    x, y = torch.zeros(4, 16), torch.zeros(3)

    def call():
        module.launch(kernel, (1,), box_of(x[:, 8:]), y, 3)

    store.record("key", [x, y], call)
    gpu.clear()
    others = [torch.zeros(4, 16), torch.zeros(4, 16)]
    for other in [*others, *others]:
        store.find("key")([other, y])
        at = other.data_ptr() + 32
        assert compiled.direct[-1][2] == (("box", at), 4, 8, 16, 1, y.data_ptr(), 3, 64)
    assert gpu == [other.data_ptr() + 32 for other in others]


def test_boxes_of_another_form_are_others(gpu):
    x = torch.zeros(4, 16)
    forms = [
        (box_of(x), META),
        (box_of(x[:3]), META),
        (box_of(x.view(8, 8)), META),
        (box_of(x[:, :8]), META),
        (box_of(torch.zeros(4, 32)[:, :16]), META),
        (box_of(x), META | {"block_size": [32]}),
        (box_of(x), META | {"swizzle": 1}),
        (types.SimpleNamespace(**vars(box_of(x)) | {"padding": "nan"}), META),
    ]
    found = [direct._boxes_of(*form) for form in forms]
    assert len(set(map(id, found))) == len(forms)
    assert direct._boxes_of(box_of(torch.ones(4, 16)), dict(META)) is found[0]


def test_the_boxes_of_an_argument_are_bounded(gpu, monkeypatch):
    monkeypatch.setattr(direct, "_MOST_BOXES", 2)
    boxes = direct._Boxes(box_of(torch.zeros(4, 8)), META)
    for address in range(16, 160, 16):
        assert boxes[address] == ("box", address)
        assert len(boxes) <= 2


def test_a_launch_is_of_its_own_call_while_another_thread_launches():
    """What is recorded is changed by no replay: of two at once each has its own addresses."""
    calls = []
    header, pointers = [1, 1, 1, 0, "function"], [(0, 0, 8)]
    function = lambda *args: calls.append(args)  # noqa: E731
    launch = direct.DirectLaunch(function, header, [0, 3], True, pointers, [])
    launch([100], 7, None)
    launch([200], 8, (2, 1, 1))
    assert calls[0] == (1, 1, 1, 7, "function", [108, 3])
    assert calls[1] == (2, 1, 1, 8, "function", [208, 3])
    assert (launch.header, launch.values) == ([1, 1, 1, 0, "function"], [0, 3])


class Interpreted:
    def __getitem__(self, grid):
        return lambda *args, **named: None


UNFIT = {
    "a tensor of its own": lambda k, x, y: module.launch(k, (1,), torch.zeros(4), y, 3),
    "a copy": lambda k, x, y: module.launch(k, (1,), x.view(8, 8).transpose(0, 1).flatten(), y, 3),
    "rows by index": lambda k, x, y: module.launch(k, (1,), x[[1]], y, 3),
    "work of torch": lambda k, x, y: (y.fill_(1), module.launch(k, (1,), x, y, 3)),
    "work on its own": lambda k, x, y: (torch.ones(2).neg(), module.launch(k, (1,), x, y, 3)),
    "the interpreter": lambda k, x, y: module.launch(Interpreted(), (1,), x, y, 3),
    "no launch": lambda k, x, y: None,
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_replay_would_leave_out_is_not_replayed(name):
    store, kernel, calls = Recordings(), Kernel(Compiled()), []
    x, y = torch.zeros(64), torch.zeros(3)
    for _ in range(2):
        assert store.find("key") is None
        store.record("key", [x, y], lambda: calls.append(UNFIT[name](kernel, x, y)))
    assert len(calls) == 2 and record.recording() is None


def test_one_tensor_in_two_roles_is_not_replayed():
    store, kernel = Recordings(), Kernel(Compiled())
    x = torch.zeros(64)
    store.record("key", [x, x], lambda: module.launch(kernel, (1,), x, x, 3))
    assert store.find("key") is None


def test_launches_on_two_devices_are_not_replayed(monkeypatch):
    store, kernel = Recordings(), Kernel(Compiled())
    x, y = torch.zeros(64), torch.zeros(3)

    def call():
        for device in (0, 1):
            monkeypatch.setattr(torch.cuda, "current_device", lambda d=device: d)
            module.launch(kernel, (1,), x, y, 3)

    store.record("key", [x, y], call)
    for device in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda d=device: d)
        assert store.find("key") is None


def test_a_launcher_of_another_triton_is_not_called(monkeypatch):
    x = torch.zeros(64)
    for compiled in (Compiled(scratch=8), Compiled()):
        store, kernel = Recordings(), Kernel(compiled)
        store.record("key", [x], lambda k=kernel: module.launch(k, (1,), x, 2, 3))
        assert store.find("key") is None
        monkeypatch.setattr(direct.driver, "_BASE_ARGS_FORMAT", "iiiKKpOOOOO")
        monkeypatch.setattr(direct, "_source", lambda: 'Parse(args, "iiiKKpp(iii)OOOOOOOy*O")')


def test_not_on_another_device_nor_past_a_profiler(monkeypatch):
    store, kernel = Recordings(), Kernel(Compiled())
    x = torch.zeros(64)
    store.record("key", [x], lambda: module.launch(kernel, (1,), x, 2, 3))
    assert store.find("key") is not None
    runtime = direct.knobs.runtime
    for hooks in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        hooks.add(print)
        try:
            assert store.find("key") is None
        finally:
            hooks.remove(print)
        assert store.find("key") is not None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert store.find("key") is None
    store.record("key", [x], lambda: module.launch(kernel, (1,), x, 2, 3))  # called, not kept
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert store.find("key") is not None


def test_a_recording_within_another_is_part_of_it():
    store, inner, compiled = Recordings(), Recordings(), Compiled()
    kernel = Kernel(compiled)
    x, y = torch.zeros(64), torch.zeros(3)

    def call():
        inner.record("inner", [x], lambda: module.launch(kernel, (1,), x, y, 3))

    store.record("key", [x, y], call)
    assert inner.find("inner") is None
    store.find("key")([y, x])
    assert compiled.direct[0][2] == (y.data_ptr(), x.data_ptr(), 3, 64)


def test_nothing_is_replayed_within_a_recording():
    """It would be missing in what is recorded."""
    store, kernel = Recordings(), Kernel(Compiled())
    x = torch.zeros(64)

    def call():
        module.launch(kernel, (1,), x, 2, 3)
        assert store.find("before") is None

    store.record("before", [x], lambda: module.launch(kernel, (1,), x, 2, 3))
    assert store.find("before") is not None
    store.record("key", [x], call)


def test_a_recording_is_of_its_own_thread():
    """Another one records meanwhile, and neither has or lacks a launch of the other."""
    store, inner, compiled = Recordings(), Recordings(), Compiled()
    kernel = Kernel(compiled)
    x, y = torch.zeros(64), torch.zeros(3)

    def other():
        assert record.recording() is None
        inner.record("inner", [y], lambda: module.launch(kernel, (1,), y, 2, 3))

    def call():
        module.launch(kernel, (1,), x, 2, 3)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(other).result()
        module.launch(kernel, (2,), x, 2, 3)

    store.record("key", [x], call)
    store.find("key")([x])
    inner.find("inner")([y])
    assert [grid for grid, _, _ in compiled.direct] == [(1, 1, 1), (2, 1, 1), (1, 1, 1)]


def test_an_error_leaves_nothing_behind():
    store = Recordings()

    def call():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        store.record("key", [torch.zeros(1)], call)
    assert record.recording() is None and store.find("key") is None


def test_copies_of_recordings_are_empty():
    """Their owner's tensors may be copies too, of other shapes by then."""
    store, kernel = Recordings(), Kernel(Compiled())
    x = torch.zeros(64)
    store.record("key", [x], lambda: module.launch(kernel, (1,), x, 2, 3))
    assert store.find("key") is not None
    assert copy.deepcopy(store).find("key") is None
    assert copy.copy(store).find("key") is None


def test_recordings_are_bounded():
    store, kernel = Recordings(most=2), Kernel(Compiled())
    x = torch.zeros(64)
    for key in range(5):
        store.record(key, [x], lambda: module.launch(kernel, (1,), x, 2, 3))
        assert store.find(key) is not None
        assert sum(store.find(k) is not None for k in range(5)) <= 2


def test_kinds():
    x = torch.zeros(8, 16)
    others = [
        x[:4],
        x[:, :8],
        x.T.contiguous().T,
        x.half(),
        x.to("meta"),
        torch.zeros(8 * 16 + 1)[1:].view(8, 16),
        torch.zeros(8 * 16 + 2)[2:].view(8, 16),  # 8 bytes on, not 4
        torch.nn.Parameter(x),
        torch.zeros(8, 16).requires_grad_(),  # which may not be written to
        None,
        1,
        1.0,
        True,
        512,
        512.0,
        (x, x),
    ]
    kinds = [kind(x), *map(kind, others)]
    assert len(set(kinds)) == len(kinds)
    assert kind(x) == kind(torch.ones(8, 16))
    assert rows_kind(x) == rows_kind(x[:4]) != rows_kind(x[:, :8])
    assert rows_kind(3) == kind(3)


def test_what_cannot_be_a_key_is_not_found():
    assert Recordings().find((kind([1]),)) is None


@pytest.mark.skipif(not INTERPRET, reason="device plans on a CPU need the interpreter")
def test_an_update_of_a_plan_is_replayed_on_its_own_buffers(form, monkeypatch):
    """The plan of fewer requests has its own too."""
    whole = plan_mla_decode(torch.zeros(3, dtype=torch.int32), num_heads=4, s_q=1, impl="triton")
    compiled = Compiled()
    kernel = Kernel(compiled)
    kernel.signature = inspect.signature(launcher.plan_kernel.fn)
    monkeypatch.setattr(launcher, "plan_kernel", kernel)
    for requests in (3, 2):
        some = whole.narrow(requests)
        compiled.direct.clear()
        for replays in range(3):
            seq_lens = torch.zeros(requests, dtype=torch.int32)
            some.update(seq_lens)
            assert len(compiled.direct) == replays  # the first is recorded
        buffers = seq_lens, *some.device_plan.updated
        grid, _, values = compiled.direct[-1]
        assert grid == (1, 1, 1)
        assert values[:5] == (*(x.data_ptr() for x in buffers), requests)
