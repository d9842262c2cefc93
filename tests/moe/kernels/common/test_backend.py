"""The Triton import: backends by name, machines without Triton, and what the interpreter can do."""

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe.kernels.common import backend
from moe.kernels.common import launch as launch_module
from moe.kernels.common.backend import INTERPRET, interpreter_faults, pick_backend, tl, triton
from moe.kernels.common.ops import is_eager

ROOT = Path(__file__).resolve().parents[4]
interpreted = pytest.mark.skipif(not INTERPRET, reason="needs Triton's interpreter")


def test_auto_on_a_cpu_is_the_reference():
    assert pick_backend("auto", torch.zeros(2)) == "reference"
    assert pick_backend("reference", torch.zeros(2, dtype=torch.float64)) == "reference"


@interpreted
def test_triton_on_a_cpu_through_the_interpreter():
    assert pick_backend("triton", torch.zeros(2)) == "triton"
    assert pick_backend("triton", torch.zeros(2, dtype=torch.int32)) == "triton"


@pytest.mark.parametrize(
    ("name", "dtype", "available", "message"),
    [
        (
            "cuda",
            torch.float32,
            ("reference", "triton"),
            "backend='cuda' is unknown; allowed: auto",
        ),
        ("hopper", torch.float32, ("reference",), "backend='hopper' is not implemented"),
        ("hopper", torch.float32, ("reference", "triton"), "compute capability 9"),
        ("hopper", torch.float32, ("reference", "triton", "hopper"), "compute capability 9"),
        ("triton", torch.float64, ("reference", "triton"), "float64"),
        ("triton", torch.float32, ("reference",), "allowed: reference"),
    ],
)
def test_refused_by_name(monkeypatch, name, dtype, available, message):
    monkeypatch.setattr(backend, "HAVE_TRITON", True)
    with pytest.raises(ValueError, match=message):
        pick_backend(name, torch.zeros(2, dtype=dtype), available=available)


def test_the_argument_is_named():
    with pytest.raises(ValueError, match="kernels='fast'"):
        pick_backend("fast", torch.zeros(2), argument="kernels")


def test_a_cpu_tensor_without_the_interpreter(monkeypatch):
    monkeypatch.setattr(backend, "INTERPRET", False)
    monkeypatch.setattr(backend, "HAVE_TRITON", True)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        pick_backend("triton", torch.zeros(2))


def test_direct_calls_are_for_plain_tensors_alone():
    plain = torch.zeros(2)
    assert is_eager(plain, None, torch.nn.Parameter(plain))
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        assert not is_eager(plain)
        fake = mode.from_tensor(plain)
    assert not is_eager(fake)
    seen = []

    def record(x):
        seen.append(is_eager(x))
        return x + 1

    torch.compile(record, backend="eager")(plain)
    assert seen == [False] or seen == []


class _Kernel:
    """Stands for a Triton kernel and for what it compiles to; notes how it was started."""

    params = (
        SimpleNamespace(name="x", is_constexpr=False),
        SimpleNamespace(name="N", is_constexpr=True),
    )
    arg_names = ("x", "n", "N")
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        def start(*args, **options):
            self.calls.append(("whole", grid, args, options))
            return self

        return start

    def run(self, *args):
        self.calls.append(("kept", args))


class _OnGpu(torch.Tensor):
    is_cuda = True


def test_a_kept_kernel_is_started_with_addresses(monkeypatch):
    """Of what lies on a GPU; and not if a profiler listens: it is told by Triton's own runner."""
    monkeypatch.setattr(launch_module, "INTERPRET", False)
    monkeypatch.setattr(launch_module, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    hook = []
    runtime = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=hook))
    monkeypatch.setattr(
        launch_module, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime))
    )
    kernel, x, on_host = _Kernel(), torch.zeros(4).as_subclass(_OnGpu), torch.zeros(4)
    options = {"N": 8, "num_warps": 4}
    for tensor, n in ((x, 5), (x, 6), (on_host, 7)):
        launch_module.launch(kernel, (3,), tensor, n, **options)
    start = (3, 1, 1, 7, "function", "metadata", None, None, None)
    assert kernel.calls == [
        ("whole", (3,), (x, 5), options),
        ("kept", (*start, x.data_ptr(), 6, 8)),
        ("kept", (*start, on_host, 7, 8)),  # Triton looks whether the card can reach it
    ]
    hook.append(print)
    launch_module.launch(kernel, (3,), x, 5, **options)
    assert kernel.calls[3] == ("whole", (3, 1, 1), (x, 5, 8), {})
    hook.clear()
    launch_module.launch(kernel, (3,), x, 16, **options)  # another class: a multiple of 16
    launch_module.launch(kernel, (3,), x, 16, **{**options, "N": 9})
    launch_module.launch(kernel, (3,), torch.zeros(5)[1:], 5, **options)  # and another alignment
    assert [kind for kind, *_ in kernel.calls[4:]] == ["whole"] * 3


def test_counters_of_streams_and_of_graphs_are_apart(monkeypatch):
    """One for each stream, kept; one more for each call that a graph captures, never used again."""
    state = {"stream": 7, "capturing": False}
    for name, answer in (
        ("_cuda_isCurrentStreamCapturing", lambda: state["capturing"]),
        ("_cuda_getCurrentRawStream", lambda device: state["stream"]),
    ):
        monkeypatch.setattr(torch._C, name, answer, raising=False)
    rows = torch.zeros(3, 4, dtype=torch.int32)
    made = []

    def more(device):
        made.append(device)
        return list(rows[:, :1].unbind())

    monkeypatch.setattr(launch_module, "_more_counters", more)
    for name in ("_stream_counters", "_unused_counters"):
        monkeypatch.setattr(launch_module, name, {})
    monkeypatch.setattr(launch_module, "_graph_counters", [])
    cleared = torch.ones(1)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **_: cleared)

    def taken(**change):
        state.update(change)
        return launch_module.counter(SimpleNamespace(type="cuda", index=0)).data_ptr()

    assert taken(capturing=True) == cleared.data_ptr()  # the first call of all
    assert taken(capturing=False) == taken()
    assert taken(stream=8) != taken(stream=7)
    in_graph = taken(capturing=True)
    assert taken() == cleared.data_ptr()  # none is left
    assert len({in_graph, taken(capturing=False), taken(stream=8)}) == 3
    assert len(made) == 1


def test_works_without_triton():
    """A machine without Triton imports the package, runs the reference, refuses kernels by name."""
    code = """
import sys
import warnings
sys.modules["triton"] = None
sys.modules["triton.language"] = None
import torch
from moe import MoE, MoEConfig
from moe.kernels.common.backend import HAVE_TRITON, cdiv, next_power_of_2
from moe.kernels.routing.topk_gating import topk_gating
from moe.kernels.routing.gating_kernels import _gating_kernel
assert not HAVE_TRITON
assert cdiv(7, 2) == 4 and [next_power_of_2(n) for n in (1, 5, 8)] == [1, 8, 8]
assert topk_gating(torch.tensor([[1.0, 2.0]]), 1).expert_TK.tolist() == [[1]]
try:
    topk_gating(torch.zeros(2, 4), 1, backend="triton")
except ValueError as error:
    assert "not installed" in str(error), error
else:
    raise SystemExit("not refused")
try:
    _gating_kernel[(1,)](0)
except RuntimeError as error:
    assert "needs Triton" in str(error), error
else:
    raise SystemExit("launched")
layer = MoE(MoEConfig(hidden_size=4, expert_size=4, num_experts=4, num_experts_per_tok=2))
y, _ = layer(torch.randn(3, 4))
y.sum().backward()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


# The interpreter computes with NumPy, which has no bfloat16: github.com/triton-lang/triton/issues
# /4972, /11153. What follows tells whether the installed one may be trusted with it.


@triton.jit
def _binary_kernel(a, b, out, LESS: tl.constexpr):
    x = tl.load(a)
    y = tl.load(b)
    if LESS:
        tl.store(out, tl.where(x < y, 1.0, 0.0))
    else:
        tl.store(out, (x + y).to(tl.float32))


@interpreted
def test_the_self_test_says_what_the_interpreter_does():
    faults = interpreter_faults()
    out = torch.empty(1)
    pair = (torch.tensor([2.5]), torch.tensor([2.0]))
    _binary_kernel[(1,)](*(t.bfloat16() for t in pair), out, False)
    assert ("bfloat16 addition" in faults) == (out.item() != 4.5)
    pair = (torch.tensor([-5.0]), torch.tensor([-2.0]))
    _binary_kernel[(1,)](*(t.bfloat16() for t in pair), out, True)
    assert ("bfloat16 comparison" in faults) == (out.item() != 1.0)
    # in float32 it must be right: all other tests of kernels on a CPU rest on that
    _binary_kernel[(1,)](*pair, out, True)
    assert out.item() == 1.0
    _binary_kernel[(1,)](*pair, out, False)
    assert out.item() == -7.0
    assert not [fault for fault in faults if fault.startswith("float32")]


@pytest.mark.parametrize(
    ("names", "given", "options"),
    [
        (["x", "N", "size"], 2, {"N": 8}),  # a constant before other arguments
        (["x", "size", "N"], 1, {"N": 8}),
        (["x", "size", "N"], 2, {}),
    ],
)
def test_constants_are_keywords(names, given, options):
    params = [SimpleNamespace(name=name, is_constexpr=name == "N") for name in names]
    kernel = SimpleNamespace(params=params, arg_names=names, __name__="kernel")
    with pytest.raises(TypeError, match="kernel: all constants must be keywords"):
        launch_module._constants(kernel, given, options)
    ordered = SimpleNamespace(params=params, arg_names=["x", "size", "N"], __name__="kernel")
    assert launch_module._constants(ordered, 2, {"N": 8, "num_warps": 4}) == (8,)


def test_a2_dynamo_never_traces_into_a_cache(monkeypatch):
    """What a layer asks of its device while it is compiled is a constant to Dynamo, without the
    warning that it gives of every function wrapped by `functools.cache`."""
    properties = SimpleNamespace(name="GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    backend._properties.cache_clear()
    device = torch.device("cuda", 0)

    def ask(x):
        x = x + backend.capability(device)[0] + backend.num_sms(device)
        return x + len(backend.device_name(device))

    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            asked = torch.compile(ask, backend="eager", fullgraph=True)(torch.zeros(1))
    finally:
        backend._properties.cache_clear()
    assert asked.item() == 9 + 132 + 3
    assert not [str(warning.message) for warning in told if "lru_cache" in str(warning.message)]
