"""Cases and checks shared by the tests of the grouped operators and of the experts.

Errors are relative, by norm, for a whole tensor and for every stripe of 16 columns: a tile that was
never written or was written twice shows in its stripe even where it drowns in the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from moe.experts import experts
from moe.kernels.common.activations import ACTIVATIONS
from moe.routing import Routing

# Relative error by norm that a dtype's rounding explains; see moe/kernels for where roundings are.
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in float64; NaN counts as infinite; 0 for two empty tensors."""
    got, want = got.detach().double(), want.detach().double()
    error = (got - want).norm() / want.norm().clamp_min(1e-30) if want.numel() else torch.zeros(())
    if want.numel() and not want.any():
        error = got.abs().max()  # an all-zero tensor must be exactly zero
    return float("inf") if not torch.isfinite(error) else float(error)


def worst_stripe(got: Tensor, want: Tensor, width: int = 16) -> float:
    """The largest relative error over stripes of `width` columns of the last axis."""
    got, want = got.detach().flatten(0, -2), want.detach().flatten(0, -2)
    stripes = range(0, want.shape[-1], width)
    errors = [relative_error(got[:, s : s + width], want[:, s : s + width]) for s in stripes]
    return max(errors, default=0.0)


def check(name: str, got: Tensor, want: Tensor, bound: float) -> None:
    """Raises AssertionError where got differs from want by more than the bound."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    error = relative_error(got, want)
    assert error <= bound, f"{name}: relative error {error:.2e} > {bound:.0e}"
    if got.ndim >= 2 and got.shape[0] > 1:  # one row has too few numbers in a stripe for a norm
        error = worst_stripe(got, want)
        assert error <= 2 * bound, (
            f"{name}: a stripe's relative error {error:.2e} > {2 * bound:.0e}"
        )


@contextlib.contextmanager
def nan_memory() -> Iterator[None]:
    """Inside: every new tensor starts filled with NaN (integers: the largest value)."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]


def random(*shape: int, dtype=torch.float32, device="cpu", scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=device).mul_(scale).to(dtype)


def offsets_of(counts: list[int], device="cpu") -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32).to(device)


def topk_routing(T: int, E: int, K: int, *, holes: bool = False, device="cpu") -> Routing:
    """Random distinct experts for each token; holes: some slots and the last expert are empty."""
    used = E - 1 if holes and E > K else E
    expert_TK = torch.rand(T, used).argsort(1)[:, :K].to(torch.int32)
    if holes:
        expert_TK[torch.rand(T, K) < 0.2] = -1
    gate_TK = torch.rand(T, K) + 0.1
    return Routing.from_topk(expert_TK.to(device), gate_TK.to(device), E)


def ragged_routing(T: int, E: int, *, device="cpu") -> Routing:
    """0 to 3 experts for each token, ids outside the range among them."""
    counts_T = torch.randint(0, 4, (T,))
    token_P = torch.repeat_interleave(torch.arange(T), counts_T)
    expert_P = torch.randint(-1, E + 1, token_P.shape)
    gate_P = torch.rand(token_P.shape) + 0.1
    return Routing.from_pairs(token_P.to(device), expert_P.to(device), gate_P.to(device), T, E)


def counted_routing(counts: list[int], device="cpu") -> Routing:
    """K = 1 and the given number of tokens for each expert, shuffled."""
    expert_T = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    expert_T = expert_T[torch.randperm(len(expert_T))]
    gate_T1 = torch.rand(len(expert_T), 1) + 0.1
    return Routing.from_topk(expert_T[:, None].to(device), gate_T1.to(device), len(counts))


def weights(
    E: int, D: int, N: int, activation: str = "swiglu", dtype=torch.float32, device="cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w1, w2, b1, b2 such that all activations are of order one."""
    H = ACTIVATIONS[activation].width * N
    return (
        random(E, H, D, dtype=dtype, device=device, scale=D**-0.5),
        random(E, D, N, dtype=dtype, device=device, scale=N**-0.5),
        random(E, H, dtype=dtype, device=device),
        random(E, D, dtype=dtype, device=device),
    )


def activate_by_hand(h: Tensor, activation: str) -> Tensor:
    if activation == "clamped_swiglu":  # as transformers' GptOssExperts has it
        gate, up = h[..., 0::2].clamp(max=7.0), h[..., 1::2].clamp(min=-7.0, max=7.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    inner = {
        "swiglu": torch.nn.functional.silu,
        "silu": torch.nn.functional.silu,
        "geglu": torch.nn.functional.gelu,
        "gelu": torch.nn.functional.gelu,
        "reglu": torch.relu,
        "relu2": lambda x: torch.relu(x) ** 2,
    }[activation]
    if ACTIVATIONS[activation].width == 2:
        return inner(h[..., 0::2]) * h[..., 1::2]
    return inner(h)


def experts_by_hand(
    x_TD: Tensor,
    w1_EHD: Tensor,
    w2_EDN: Tensor,
    routing: Routing,
    gates_S: Tensor,
    activation: str = "swiglu",
    b1_EH: Tensor | None = None,
    b2_ED: Tensor | None = None,
) -> Tensor:
    """The experts slot by slot, differentiable, from `expert_S` and nothing else of the routing."""
    K = routing.slots_per_token
    out = [torch.zeros_like(row) for row in x_TD]
    for s, e in enumerate(routing.expert_S.tolist()):
        if e < 0:
            continue
        if K is not None:
            t = s // K
        else:
            t = int((routing.slot_offsets_T1 <= s).sum()) - 1
        h = w1_EHD[e] @ x_TD[t]
        if b1_EH is not None:
            h = h + b1_EH[e]
        y = w2_EDN[e] @ activate_by_hand(h, activation)
        if b2_ED is not None:
            y = y + b2_ED[e]
        out[t] = out[t] + gates_S[s].to(y.dtype) * y
    return torch.stack(out) if out else x_TD.new_zeros(x_TD.shape)


# ------------------------------------------------------------------------------ experts on a GPU


def operands(
    routing: Routing,
    D: int,
    N: int,
    dtype=torch.bfloat16,
    activation: str = "swiglu",
    bias: bool = False,
) -> dict:
    """Leaves x, w1, w2, gates (and b1, b2) on the GPU, all of them free."""
    w1, w2, b1, b2 = weights(routing.num_experts, D, N, activation, dtype, "cuda")
    values = {"x": random(routing.num_tokens, D, dtype=dtype, device="cuda"), "w1": w1, "w2": w2}
    values["gates"] = routing.gates_S.detach().clone()
    if bias:
        values |= {"b1": b1, "b2": b2}
    return {name: t.requires_grad_() for name, t in values.items()}


def with_gates(routing: Routing, gates) -> Routing:
    """The same routing with other gates."""
    return Routing(**{**vars(routing), "gates_S": gates})


def run_experts(values: dict, routing: Routing, dout, **options) -> dict:
    """The output and every gradient by name."""
    out = experts(
        values["x"], values["w1"], values["w2"], with_gates(routing, values["gates"]),
        biases=(values.get("b1"), values.get("b2")), **options,
    )  # fmt: skip
    grads = torch.autograd.grad(out, list(values.values()), dout.to(out.dtype))
    return {"out": out.detach(), **dict(zip(values, grads))}


def compare(
    routing: Routing,
    D: int,
    N: int,
    dtype=torch.bfloat16,
    *,
    backend: str,
    bias=False,
    activation="swiglu",
    **options,
) -> None:
    """Kernels in NaN-filled memory against the reference operators in a wider dtype."""
    values = operands(routing, D, N, dtype, activation, bias)
    dout = random(routing.num_tokens, D, device="cuda").to(dtype)
    with nan_memory():
        got = run_experts(values, routing, dout, activation=activation, backend=backend, **options)
    wide_dtype = torch.float64 if dtype == torch.float32 else torch.float32
    wide = {k: t.detach().to(wide_dtype).requires_grad_() for k, t in values.items()}
    want = run_experts(wide, routing, dout, activation=activation, backend="reference")
    for name in want:
        assert got[name].dtype == (torch.float32 if name == "gates" else dtype), name
        check(name, got[name], want[name], BOUND[dtype])
    empty = routing.counts_E == 0
    assert not got["w1"][empty].any(), "an expert without rows must have exact zeros"
    assert not got["w2"][empty].any(), "an expert without rows must have exact zeros"
