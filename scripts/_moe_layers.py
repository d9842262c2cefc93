"""The contenders of `bench_moe.py`: Tessera's layer, torch's, its peers, and the cuBLAS bound.

Also how all of them are timed and compared. A peer that cannot be imported raises ImportError.

Shape letters: T tokens, D model width, N expert width, E experts, K experts per token.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.experts import experts
from moe.kernels.router_logits import router_logits
from moe.kernels.topk_gating import topk_gating, topk_routing
from moe.rounding import RoundingConfig, round_tokens
from moe.routing import Routing

BF16 = torch.bfloat16

Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # x, router weight, w1, w2 -> out


# ------------------------------------------------------------------------------------------ measure


@functools.cache
def _l2() -> Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The same work as one CUDA graph: what it costs the device, whatever the host is doing.

    For a backward no autograd graph of the same leaves may be alive: its nodes that take gradients
    are of the stream that they were made on, and the capture would have to wait for that.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def median_ms(run: Callable[[], object], seconds: float = 0.4, most: int = 60) -> float:
    """Median milliseconds of a call with a cold L2 cache."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    once = max(time.perf_counter() - began, 1e-4)
    repeats = max(3, min(most, int(seconds / once)))
    for _ in range(min(3, repeats)):
        run()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in marks:
        _l2().zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks)


def busy_clock(run: Callable[[], object], ms: float) -> int | None:
    """MHz of the multiprocessors while `run`, which takes `ms`, repeats for a third of a second;
    None where nvidia-ml-py is not installed."""
    for _ in range(int(350 / ms)):
        run()
    time.sleep(0.25)
    try:
        return torch.cuda.clock_rate()
    except ModuleNotFoundError:
        return None
    finally:
        torch.cuda.synchronize()


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


# ------------------------------------------------------------------------------------------- layers


def operands(shape, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, router weight (float32), w1 interleaved, w2; activations of order one."""
    T, D, N, E, _ = shape
    torch.manual_seed(seed)
    x = torch.randn(T, D, device="cuda", dtype=BF16)
    router = torch.randn(E, D, device="cuda") * D**-0.5
    w1 = torch.empty(E, 2 * N, D, device="cuda", dtype=BF16).normal_(std=D**-0.5)
    w2 = torch.empty(E, D, N, device="cuda", dtype=BF16).normal_(std=N**-0.5)
    return x, router, w1, w2


def balanced_choice(T: int, E: int, K: int) -> Tensor:
    """Every expert gets the same number of tokens, in no order that a cache would like."""
    generator = torch.Generator().manual_seed(1)
    first = torch.arange(T) * K
    expert_TK = (first[:, None] + torch.arange(K)[None]) % E
    return torch.randperm(E, generator=generator)[expert_TK[torch.randperm(T)]].int().cuda()


class Route:
    """Logits → routing, random by the router's own choice or forced to a given one."""

    def __init__(self, shape, balanced: bool, rounding: RoundingConfig | None = None):
        T, _, _, self.E, self.K = shape
        self.forced = balanced_choice(T, self.E, self.K) if balanced else None
        self.rounding = rounding

    def choose(self, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(logits, expert_TK, gate_TK) with the kernels of this project."""
        logits = router_logits(x, router)
        gating = topk_gating(logits, self.K)
        if self.forced is None:
            return logits, gating.expert_TK, gating.gate_TK
        return logits, self.forced, gating.gate_TK

    def routing(self, x: Tensor, router: Tensor) -> Routing:
        if self.rounding is not None:
            logits = router_logits(x, router)
            return round_tokens(logits, topk_gating(logits, self.K), self.rounding)
        if self.forced is None:
            made_of = (x.detach(), router.detach(), "auto")
            gating, meta = topk_routing(router_logits(x, router), self.K, made_of=made_of)
            return Routing.from_topk(gating.expert_TK, gating.gate_TK, self.E, meta=meta)
        _, expert_TK, gate_TK = self.choose(x, router)
        return Routing.from_topk(expert_TK, gate_TK, self.E)


def ours(shape, route: Route, save: str = "h", backend: str = "auto") -> Layer:
    def layer(x, router, w1, w2):
        return experts(x, w1, w2, route.routing(x, router), save=save, backend=backend)

    return layer


def torch_grouped(shape, route: Route, compiled: bool) -> Layer:
    """torch.nn.functional.grouped_mm between an argsort and a scatter: what torchtitan does."""
    T, D, _, E, K = shape
    grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm

    def layer(x, router, w1, w2):
        gates, expert_TK = F.softmax(x.float() @ router.t(), -1).topk(K, -1)
        if route.forced is not None:
            expert_TK = route.forced
        gates = gates / gates.sum(-1, keepdim=True)
        flat = expert_TK.reshape(-1).long()
        order = flat.argsort(stable=True)
        counts = torch.zeros(E, dtype=torch.int64, device=x.device).scatter_add_(
            0, flat, torch.ones_like(flat)
        )
        offs = counts.cumsum(0).int()
        rows = x.index_select(0, order // K)
        h = grouped(rows, w1.transpose(1, 2), offs=offs)
        a = F.silu(h[:, 0::2]) * h[:, 1::2]
        y = grouped(a, w2.transpose(1, 2), offs=offs)
        y = y * gates.reshape(-1)[order, None].to(y.dtype)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(T * K, device=x.device))
        return y.index_select(0, back).view(T, K, D).sum(1)

    return torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer


def eager(shape, route: Route, halves: bool = False) -> Layer:
    """A loop over the experts in plain torch; halves: gate rows of w1 first, then up rows."""
    _, _, N, E, K = shape

    def layer(x, router, w1, w2):
        gates, expert_TK = F.softmax(x.float() @ router.t(), -1).topk(K, -1)
        if route.forced is not None:
            expert_TK = route.forced
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for e in range(E):
            token, k = torch.where(expert_TK == e)
            h = x[token] @ w1[e].t()
            gate, up = (h[:, :N], h[:, N:]) if halves else (h[:, 0::2], h[:, 1::2])
            a = F.silu(gate) * up
            out = out.index_add(0, token, (a @ w2[e].t()) * gates[token, k, None])
        return out

    return layer


def sonic(shape, route: Route) -> Layer:
    import sonicmoe.functional as S
    from sonicmoe.enums import ActivationType

    if route.forced is not None:
        raise ImportError("takes its own routing")
    K = shape[4]
    stream = torch.cuda.current_stream().cuda_stream

    def layer(x, router, w1, w2):
        out = S.moe_TC_softmax_topk_layer(
            x, router.to(x.dtype), w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None, K, stream,
            ActivationType.SWIGLU, False,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return layer


def scatter(shape, route: Route) -> Layer:
    import scattermoe

    K = shape[4]

    def layer(x, router, w1, w2):
        gates, expert_TK = F.softmax(x.float() @ router.t(), -1).topk(K, -1)
        if route.forced is not None:
            expert_TK = route.forced
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        sorted_ids, sorted_slots, ends = scattermoe.kernels.ops.flatten_sort_count(
            expert_TK.long(), w1.shape[0]
        )
        P = scattermoe.parallel_experts.parallel_linear
        h = P(x, w1.transpose(1, 2), K, sorted_ids, sorted_slots, ends, grouped_out=True)
        a = F.silu(h[:, 0::2]) * h[:, 1::2]
        return P(
            a, w2.transpose(1, 2), 1, sorted_ids, sorted_slots, ends, grouped_in=True, gates=gates
        )

    return layer


def liger(shape, route: Route) -> Layer:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    K = shape[4]

    def layer(x, router, w1, w2):
        gates, expert_TK = F.softmax(x.float() @ router.t(), -1).topk(K, -1)
        if route.forced is not None:
            expert_TK = route.forced
        gates = gates / gates.sum(-1, keepdim=True)
        return LigerFusedMoEFunction.apply(x, w1, w2, expert_TK.int(), gates)

    return layer


PEERS: dict[str, Callable] = {
    "tessera": ours,
    "tessera triton": functools.partial(ours, backend="triton"),
    "tessera save=fp8_h": functools.partial(ours, save="fp8_h"),
    "tessera save=x": functools.partial(ours, save="x"),
    "grouped_mm": functools.partial(torch_grouped, compiled=False),
    "grouped_mm compiled": functools.partial(torch_grouped, compiled=True),
    "eager loop": eager,
    "SonicMoE": sonic,
    "ScatterMoE": scatter,
    "Liger": liger,
}

GATE_ROWS_FIRST = {"Liger"}  # reads w1 as gate rows, then up rows


def exact_tiles(x, w1, w2, h, a, r: Routing) -> dict[str, Callable]:
    """For each product: outputs → (part of an output, its float32 value) for a few experts.

    The first, the largest and the last expert with rows: full products of all would not fit.
    """
    bounds = r.offsets_E1.tolist()
    counts = [end - start for start, end in itertools.pairwise(bounds)]
    used = [e for e, n in enumerate(counts) if n]
    picked = sorted({used[0], max(used, key=lambda e: counts[e]), used[-1]})
    token = r.token_R.long()
    gates = r.gates_S.detach()[r.slot_R.long()]

    def spans():
        for e in picked:
            yield e, slice(bounds[e], bounds[e + 1])

    def up(out):
        for e, s in spans():
            want = x[token[s]].float() @ w1[e].float().t()
            yield out[0][s], want
            yield out[1][s], F.silu(want[:, 0::2]) * want[:, 1::2]

    def d_h(out):
        dots = out[2]
        for e, s in spans():
            wide = h[s].float().requires_grad_()
            act = F.silu(wide[:, 0::2]) * wide[:, 1::2]
            da = x[token[s]].float() @ w2[e].float()
            (dh,) = torch.autograd.grad(act, wide, da * gates[s, None])
            yield out[0][s], dh
            yield out[1][s], act.detach() * gates[s, None]
            yield dots[r.slot_R[s].long()], (da * act.detach()).sum(1)

    return {
        "up": up,
        "down": lambda out: ((out[0][s], a[s].float() @ w2[e].float().t()) for e, s in spans()),
        "dH": d_h,
        "dX": lambda out: ((out[0][s], h[s].float() @ w1[e].float()) for e, s in spans()),
        "dW2": lambda out: (
            (out[0][e], x[token[s]].float().t() @ a[s].float()) for e, s in spans()
        ),
        "dW1": lambda out: (
            (out[0][e], h[s].float().t() @ x[token[s]].float()) for e, s in spans()
        ),
    }


def cublas_products(shape) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Operands of the layer's dense products of equal groups; dH: of dA alone."""
    T, D, N, E, K = shape
    M = T * K // E
    made = functools.partial(torch.randn, device="cuda", dtype=BF16)
    x, h, a = made(E, M, D), made(E, M, 2 * N), made(E, M, N)
    w1, w2 = made(E, 2 * N, D), made(E, D, N)
    return {
        "up": (x, w1.mT), "down": (a, w2.mT),
        "dH": (x, w2), "dW2": (x.mT, a), "dX": (h, w1), "dW1": (h.mT, x),
    }  # fmt: skip


def cublas_bound(shape) -> tuple[float, float]:
    """(forward, backward) milliseconds of these products, and nothing else."""
    products = cublas_products(shape)
    ms = {name: median_ms(lambda p=p: torch.bmm(*p), seconds=0.15) for name, p in products.items()}
    forward = ms["up"] + ms["down"]
    return forward, sum(ms.values()) - forward
