"""The experts as one function: values, gradients, dtypes, memory, compilation, errors.

The reference runs in float64 against a loop over slots; a few cases run the kernels end to end in
Triton's interpreter. The operators have tests of their own under tests/moe/kernels.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe.config import MoEConfig
from moe.experts import experts
from moe.kernels.common import tuning
from moe.kernels.common.activations import ACTIVATIONS
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET, as_on_gpu
from moe.kernels.common.tuning import Config
from moe.kernels.tiers import pick_for_activation, pick_products
from moe.layer import MoE
from moe.routing import Routing
from tests.moe.kernels.grouped_cases import (
    BOUND,
    check,
    counted_routing,
    experts_by_hand,
    nan_memory,
    ragged_routing,
    random,
    topk_routing,
    weights,
)

needs_interpreter = pytest.mark.skipif(
    not (HAVE_TRITON and INTERPRET), reason="needs Triton's interpreter"
)
F64 = torch.float64
SMALL = {
    "up": Config(32, 64, 32, group=2, split=2),
    "rows": Config(32, 64, 32, group=2, split=2),
    "down_backward": Config(32, 64, 32, group=2, split=2),
    "outer": Config(32, 64, 32, split=2),
}


def _with_gates(routing: Routing, gates) -> Routing:
    return Routing(**{**vars(routing), "gates_S": gates})


def _operands(
    routing: Routing, D: int, N: int, dtype=F64, activation: str = "swiglu", bias: bool = False
) -> dict:
    w1, w2, b1, b2 = weights(routing.num_experts, D, N, activation, dtype)
    gate_dtype = F64 if dtype == F64 else torch.float32
    values = {"x": random(routing.num_tokens, D, dtype=dtype), "w1": w1, "w2": w2}
    values["gates"] = routing.gates_S.detach().clone().to(gate_dtype)
    if bias:
        values |= {"b1": b1, "b2": b2}
    return {name: t.requires_grad_() for name, t in values.items()}


def _run(values: dict, routing: Routing, dout, function=experts, **options) -> dict:
    """The output and every gradient by name."""
    args = (values["x"], values["w1"], values["w2"])
    biases = values.get("b1"), values.get("b2")
    if function is experts_by_hand:
        named = dict(zip(("b1_EH", "b2_ED"), biases))
        out = experts_by_hand(*args, routing, values["gates"], **named, **options)
    else:
        out = function(*args, _with_gates(routing, values["gates"]), biases=biases, **options)
    grads = torch.autograd.grad(out, list(values.values()), dout, allow_unused=True)
    return {"out": out.detach(), **dict(zip(values, grads))}


def _compare(routing: Routing, D: int, N: int, *, bias=True, activation="swiglu", **options):
    """Against the loop, in float64 for the reference and float32 for the kernels."""
    dtype = torch.float32 if options.get("backend") == "triton" else F64
    values = _operands(routing, D, N, dtype, activation, bias)
    dout = random(routing.num_tokens, D, dtype=dtype)
    with tuning.forced(**SMALL), nan_memory():
        got = _run(values, routing, dout, activation=activation, **options)
    wide = {k: t.detach().double().requires_grad_() for k, t in values.items()}
    want = _run(wide, routing, dout.double(), experts_by_hand, activation=activation)
    for name, exact in want.items():
        exact = torch.zeros_like(wide[name]) if exact is None else exact  # no slot has an expert
        assert got[name].dtype == (values["x"] if name == "out" else values[name]).dtype
        check(name, got[name], exact, BOUND[dtype])
    return got


# ------------------------------------------------------------------------------ values, gradients


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("save", ["h", "x"])
@pytest.mark.parametrize("bias", [False, True])
def test_reference_equals_a_loop(activation: str, save: str, bias: bool):
    routing = topk_routing(11, 5, 3, holes=True)
    _compare(routing, 6, 4, activation=activation, save=save, bias=bias)


@pytest.mark.parametrize("kind", ["ragged", "one expert", "16 experts, one token", "counts"])
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_routings(kind: str, backend: str):
    routing = {
        "ragged": lambda: ragged_routing(15, 4),
        "one expert": lambda: counted_routing([0, 9, 0]),
        "16 experts, one token": lambda: topk_routing(1, 16, 8),
        "counts": lambda: counted_routing([5, 0, 9, 3, 0, 2]),
    }[kind]()
    got = _compare(routing, 12, 8, backend=backend)
    empty = routing.counts_E == 0
    for name in ("w1", "w2", "b1", "b2"):
        assert not got[name][empty].any(), f"{name} of an expert without rows must be exactly zero"


@needs_interpreter
@pytest.mark.parametrize("options", [{"save": "x"}, {"activation": "relu2"}], ids=str)
def test_kernels_end_to_end(options: dict):
    _compare(topk_routing(33, 4, 2, holes=True), 40, 24, backend="triton", **options)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_h_in_float8_moves_only_gradients_and_those_little(backend: str):
    routing = topk_routing(48, 4, 2)
    values = _operands(routing, 64, 32, torch.float16)
    dout = random(48, 64, dtype=torch.float16)
    with tuning.forced(**SMALL), nan_memory():
        exact, got = (
            _run(values, routing, dout, save=save, backend=backend) for save in ("h", "fp8_h")
        )
    wide = {k: t.detach().double().requires_grad_() for k, t in values.items()}
    want = _run(wide, routing, dout.double(), experts_by_hand, activation="swiglu")
    assert torch.equal(got["out"], exact["out"])
    for name in values:
        error = (got[name].double() - want[name]).norm() / want[name].norm()
        assert 3e-3 < error < 5e-2, (name, error.item())


def test_finite_differences():
    routing = topk_routing(4, 3, 2)
    values = _operands(routing, 3, 2, bias=True)

    def f(x, w1, w2, gates, b1, b2):
        return experts(x, w1, w2, _with_gates(routing, gates), biases=(b1, b2))

    assert torch.autograd.gradcheck(f, tuple(values.values()))


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
@pytest.mark.parametrize("kind", ["no tokens", "no tokens, unused slots", "no experts"])
def test_nothing_to_do(backend: str, kind: str):
    """Empty outputs of the right shape and dtype; gradients are zero, not None."""
    T = 5 if kind == "no experts" else 0
    routing = Routing.from_topk(torch.full((T, 2), -1), torch.ones(T, 2), 3)
    if kind == "no tokens, unused slots":
        none = torch.full((4,), -1)
        routing = Routing.from_pairs(torch.zeros(4, dtype=torch.int64), none, torch.ones(4), 0, 3)
    values = _operands(routing, 8, 4, torch.float32, bias=True)
    with tuning.forced(**SMALL), nan_memory():
        got = _run(values, routing, torch.ones(T, 8), backend=backend)
    assert got["out"].shape == (T, 8)
    assert got["out"].dtype == torch.float32
    for name, t in got.items():
        assert t is not None and not t.any(), name


def test_tokens_without_experts_get_zero():
    routing = Routing.from_topk(torch.tensor([[0, 1], [-1, -1], [2, -1]]), torch.ones(3, 2), 3)
    values = _operands(routing, 6, 4, bias=True)
    got = _run(values, routing, torch.ones(3, 6, dtype=F64))
    assert not got["out"][1].any()
    assert not got["x"][1].any()
    assert got["gates"].view(3, 2)[1:, 1].tolist() == [0, 0]


def test_repeats_have_the_same_bits():
    routing = topk_routing(40, 5, 3)
    values = _operands(routing, 16, 8, torch.float32, bias=True)
    dout = torch.randn(40, 16)
    first = _run(values, routing, dout)
    for _ in range(3):
        again = _run(values, routing, dout)
        assert all(torch.equal(first[name], again[name]) for name in first)


# ------------------------------------------------------------------------- frozen inputs, memory


class _Names(TorchDispatchMode):
    """Names of the project's operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tessera":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def _subsets(names):
    sizes = range(len(names) + 1)
    return list(itertools.chain.from_iterable(itertools.combinations(names, n) for n in sizes))


@pytest.mark.parametrize("free", _subsets(("x", "w1", "w2", "gates")), ids="+".join)
def test_frozen_subsets(free: tuple[str, ...]):
    """None for the frozen ones, the others bit for bit as before, and no work for nothing."""
    routing = topk_routing(12, 4, 2)
    values = _operands(routing, 6, 4)
    dout = random(12, 6, dtype=F64)
    want = _run(values, routing, dout)
    frozen = {k: t.detach().requires_grad_(k in free) for k, t in values.items()}
    out = experts(frozen["x"], frozen["w1"], frozen["w2"], _with_gates(routing, frozen["gates"]))
    if not free:
        assert not out.requires_grad
        return
    with _Names() as ran:
        out.backward(dout)
    for name, t in frozen.items():
        assert (t.grad is None) == (name not in free)
        if name in free:
            if free == ("w2",):  # A' alone takes torch's own activation, which rounds otherwise
                check(name, t.grad, want[name], 1e-14)
            else:
                assert torch.equal(t.grad, want[name]), name
    work = sorted(n for n in ran.names)
    expected = ["down_backward"] * bool(free)
    expected += ["weight_gradient"] * (("w1" in free) + ("w2" in free))
    expected += ["input_gradient", "combine"] * ("x" in free)
    assert work == sorted(expected)


@pytest.mark.parametrize("free", ["b1", "b2"])
def test_only_a_bias(free: str):
    routing = topk_routing(12, 4, 2)
    values = _operands(routing, 6, 4, bias=True)
    dout = random(12, 6, dtype=F64)
    want = _run(values, routing, dout)
    frozen = {k: t.detach().requires_grad_(k == free) for k, t in values.items()}
    out = experts(
        frozen["x"], frozen["w1"], frozen["w2"], routing, biases=(frozen["b1"], frozen["b2"])
    )
    with _Names() as ran:
        out.backward(dout)
    assert torch.equal(frozen[free].grad, want[free])
    expected = {"b1": ["bias_gradient", "down_backward"], "b2": ["bias_gradient"]}
    assert sorted(ran.names) == expected[free]


@pytest.mark.parametrize("save", ["h", "fp8_h", "x"])
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_kept_for_backward(save: str, backend: str):
    """X, H, gates, weights and int32 indices: 2TD + 4TKN bytes of 16-bit activations.

    In float8 H is half of that and four bytes a row more.
    """
    T, D, N, E, K = 24, 16, 8, 4, 2
    routing = topk_routing(T, E, K)
    values = _operands(routing, D, N, torch.float16)
    kept = {}

    def pack(t):
        kept[t.data_ptr()] = t
        return t

    with tuning.forced(**SMALL), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _run_forward = experts(
            values["x"], values["w1"], values["w2"], _with_gates(routing, values["gates"]),
            save=save, backend=backend,
        )  # fmt: skip
    own = {values[k].data_ptr() for k in ("w1", "w2", "gates")}
    floating = [t for p, t in kept.items() if t.is_floating_point() and p not in own]
    size = sum(t.numel() * t.element_size() for t in floating)
    h_bytes = {"h": 4 * T * K * N, "fp8_h": 2 * T * K * N + 4 * T * K, "x": 0}[save]
    assert size == 2 * T * D + h_bytes
    others = [t for t in kept.values() if not t.is_floating_point()]
    assert {t.dtype for t in others} == {torch.int32}
    assert _run_forward.requires_grad


def test_without_gradients_nothing_is_kept():
    routing = topk_routing(8, 3, 2)
    values = _operands(routing, 6, 4)
    with torch.no_grad(), _Names() as ran:
        out = experts(values["x"], values["w1"], values["w2"], routing)
    assert not out.requires_grad
    assert ran.names == ["up_forward", "down_forward", "combine"]


@pytest.mark.parametrize("main_dtype", [torch.float32, F64])
def test_main_gradients(main_dtype: torch.dtype):
    routing = topk_routing(20, 4, 2, holes=True)
    values = _operands(routing, 6, 4, torch.float32)
    dout = torch.randn(20, 6)
    want = _run(values, routing, dout)
    mains = tuple(torch.ones_like(values[k], dtype=main_dtype).detach() for k in ("w1", "w2"))
    for _ in range(2):
        out = experts(values["x"], values["w1"], values["w2"], routing, main_grads=mains)
        out.backward(dout)
    for name, main in zip(("w1", "w2"), mains):
        assert values[name].grad is None
        check(name, main - 1, 2 * want[name].to(main_dtype), 1e-5)
    with pytest.raises(ValueError, match="main_grads of w1"):
        experts(values["x"], values["w1"], values["w2"], routing, main_grads=(mains[1], None))


def test_backward_twice():
    routing = topk_routing(6, 3, 2)
    values = _operands(routing, 6, 4)
    x = values["x"]
    out = experts(x, values["w1"], values["w2"], routing)
    loss = out.square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(first, second)


# ------------------------------------------------------------------- dtypes, strides, compilation


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("trained", ["float32", "same"])
def test_autocast_gives_the_dtype_of_a_linear_layer(dtype: torch.dtype, trained: str):
    routing = topk_routing(9, 3, 2)
    weight_dtype = torch.float32 if trained == "float32" else dtype
    values = _operands(routing, 8, 4, weight_dtype, bias=True)
    linear = torch.nn.Linear(8, 8, dtype=weight_dtype)
    with torch.autocast("cpu", dtype=dtype):
        got = _run(values, routing, torch.ones(9, 8, dtype=dtype))
        assert got["out"].dtype == linear(values["x"]).dtype == dtype
    for name, t in values.items():
        assert got[name].dtype == t.dtype, name
    wide = {k: t.detach().double().requires_grad_() for k, t in values.items()}
    want = _run(wide, routing, torch.ones(9, 8, dtype=F64), experts_by_hand)
    for name in want:
        check(name, got[name], want[name], 2e-2)


def test_float64_is_left_alone_by_autocast():
    routing = topk_routing(5, 3, 2)
    values = _operands(routing, 8, 4, F64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert experts(values["x"], values["w1"], values["w2"], routing).dtype == F64


@pytest.mark.parametrize("kind", ["transposed x", "flat weight", "transposed weight", "sum"])
def test_operands_of_any_stride(kind: str):
    routing = topk_routing(10, 3, 2)
    values = _operands(routing, 6, 4)
    dout = random(10, 6, dtype=F64)
    views = {k: t.detach() for k, t in values.items()}
    if kind == "transposed x":
        views["x"] = views["x"].T.contiguous().T
        dout = dout.T.contiguous().T
    elif kind == "flat weight":
        flat = torch.empty(views["w1"].numel() + 1, dtype=F64)
        views["w1"] = flat[1:].view_as(views["w1"]).copy_(views["w1"])
    elif kind == "transposed weight":
        views["w2"] = views["w2"].mT.contiguous().mT
    else:
        dout = torch.ones((), dtype=F64).expand(10, 6)
    views = {k: t.requires_grad_() for k, t in views.items()}
    got, want = _run(views, routing, dout), _run(values, routing, dout.contiguous())
    for name in want:
        torch.testing.assert_close(got[name], want[name], msg=name)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=needs_interpreter)])
def test_one_compiled_graph(backend: str):
    expert_TK = torch.rand(9, 4).argsort(1)[:, :2].int()
    routing = Routing.from_topk(expert_TK, torch.rand(9, 2), 4)
    values = _operands(routing, 12, 8, torch.float32)
    dout = torch.randn(9, 12)

    def layer(x, w1, w2, gates):
        made = Routing.from_topk(expert_TK, gates.view(9, 2), 4, backend="reference")
        return experts(x, w1, w2, made, backend=backend) * 2

    with tuning.forced(**SMALL):
        want = _run(values, routing, 2 * dout, backend=backend)
        out = torch.compile(layer, fullgraph=True, backend="aot_eager")(*values.values())
        grads = torch.autograd.grad(out, list(values.values()), dout)
    torch.testing.assert_close(out, 2 * want["out"])
    for name, got in zip(values, grads):
        torch.testing.assert_close(got, want[name], msg=name)


def test_operators_and_their_fakes_agree():
    """Schema, shapes and dtypes as the compiler sees them, by torch's own checker."""
    routing = topk_routing(7, 3, 2)
    ops = torch.ops.tessera
    x, h, a = torch.randn(7, 6), torch.randn(14, 8), torch.randn(14, 4)
    w1, w2, b1, b2 = weights(3, 6, 4)
    offsets, token, slot, row = (
        routing.offsets_E1, routing.token_R, routing.slot_R, routing.row_S,
    )  # fmt: skip
    gates = routing.gates_S
    tail = ([], 0, "reference")
    for op, args in (
        (ops.up_forward, (x, w1, b1, token, offsets, "swiglu", True, *tail)),
        (ops.up_forward, (x, w1, None, token, offsets, "swiglu", False, *tail)),
        (ops.down_forward, (a, w2, b2, offsets, *tail)),
        (ops.combine, (torch.randn(14, 6), gates, row, 7, 2, None, "reference")),
        (
            ops.down_backward,
            (x, w2, b2, h, gates, token, slot, row, offsets, "swiglu", True, True, True, *tail),
        ),
        (ops.input_gradient, (h, w1, offsets, *tail)),
        (ops.weight_gradient, (h, x, None, token, offsets, "reference")),
        (
            ops.weight_gradient_add,
            (torch.zeros(3, 8, 6), h, x, None, token, offsets, "reference"),
        ),
        (ops.bias_gradient, (x, token, gates, slot, offsets, "reference")),
    ):
        torch.library.opcheck(op.default, args, test_utils=("test_schema", "test_faketensor"))
    for op, args in (  # what checks the schema does arithmetic that float8 has not
        (ops.to_float8, (h, "reference")),
        (ops.from_float8, (h.to(torch.float8_e4m3fn), gates, torch.float32, "reference")),
    ):
        torch.library.opcheck(op.default, args, test_utils="test_faketensor")


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "swish"}, "activation='swish' is unknown; allowed: swiglu"),
        ({"save": "y"}, "save='y' is unknown; allowed: h, fp8_h, x"),
        ({"save": "fp8_h"}, "save='fp8_h' cannot be: torch.float32 rows"),
        ({"backend": "cuda"}, "backend='cuda' is unknown"),
        ({"x": torch.zeros(4, 7)}, "x has width 7"),
        ({"x": torch.zeros(5, 6)}, "x_TD has 5 tokens, the routing was made for 4"),
        ({"w1": torch.zeros(3, 8, 5)}, r"w1 has shape \(3, 8, 5\)"),
        ({"w1": torch.zeros(3, 4, 6)}, "activation='swiglu' it must be"),
        ({"w2": torch.zeros(6, 4)}, "3 dimensions"),
        ({"w1": torch.zeros(3, 8, 6, dtype=F64)}, "w1 is torch.float64 and x is torch.float32"),
        ({"biases": (torch.zeros(3, 6), None)}, r"b1 has shape \(3, 6\)"),
        ({"biases": (None, torch.zeros(2, 6))}, r"b2 has shape \(2, 6\)"),
        ({"w1": torch.zeros(2, 8, 6), "w2": torch.zeros(2, 6, 4)}, "routing has 3 experts"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_errors_name_what_is_wrong(change: dict, message: str):
    routing = topk_routing(4, 3, 2)
    w1, w2, *_ = weights(3, 6, 4)
    args = {"x": torch.zeros(4, 6), "w1": w1, "w2": w2} | change
    tensors = [args.pop(k) for k in ("x", "w1", "w2")]
    with pytest.raises(ValueError, match=message):
        experts(*tensors, routing, **args)


@needs_interpreter
def test_float64_is_refused_by_the_kernels():
    routing = topk_routing(4, 3, 2)
    values = _operands(routing, 6, 4, F64)
    with pytest.raises(ValueError, match="float64"):
        experts(values["x"], values["w1"], values["w2"], routing, backend="triton")


def test_an_activation_that_the_kernels_do_not_know_is_computed_by_the_reference(monkeypatch):
    """As in docs/extending.md; `as_on_gpu` goes the way of a GPU."""
    monkeypatch.setitem(ACTIVATIONS, "mine", ACTIVATIONS["swiglu"])
    x, w2 = torch.empty(256, 64, dtype=torch.bfloat16), torch.empty(2, 64, 32, dtype=torch.bfloat16)
    with as_on_gpu():
        assert pick_products("auto", x, w2, "swiglu", 256) != "reference"
        assert pick_products("auto", x, w2, "mine", 256) == "reference"
        assert pick_for_activation("auto", x, "mine", ("reference", "triton")) == "reference"
    with pytest.raises(ValueError, match="backend='bogus' is unknown"):
        pick_products("bogus", x, w2, "mine", 256)


@needs_interpreter
def test_kernels_asked_for_by_name_refuse_an_activation_that_they_do_not_know(monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "mine", ACTIVATIONS["swiglu"])
    for widths in (None, (2, 4, 4, 4)):
        config = MoEConfig(
            8, 4, 4, 2, activation="mine", kernels="triton", expert_widths=widths
        )  # fmt: skip
        with pytest.raises(ValueError, match="backend='triton' does not know activation='mine'"):
            MoE(config)(torch.randn(4, 8))
