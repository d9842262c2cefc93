"""What benchmarks stand beside: torch's own MoE layer, SonicMoE, transformers.

Also Tessera's layer in the same form, and the cuBLAS bound. A peer that cannot be imported raises
ImportError.

Shape letters: T tokens, D model width, N expert width, E experts, K experts per token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.experts import experts
from moe.kernels.routing.router_logits import router_logits
from moe.kernels.routing.topk_gating import topk_gating, topk_routing
from moe.routing import Routing
from moe.rules.rounding import Rounding, round_tokens
from scripts.bench.harness import DEVICE, median_ms

BF16 = torch.bfloat16

Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # x, router weight, w1, w2 -> out


def operands(shape, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, router weight (float32), w1 interleaved, w2; activations of order one."""
    T, D, N, E, _ = shape
    torch.manual_seed(seed)
    x = torch.randn(T, D, device=DEVICE, dtype=BF16)
    router = torch.randn(E, D, device=DEVICE) * D**-0.5
    w1 = torch.empty(E, 2 * N, D, device=DEVICE, dtype=BF16).normal_(std=D**-0.5)
    w2 = torch.empty(E, D, N, device=DEVICE, dtype=BF16).normal_(std=N**-0.5)
    return x, router, w1, w2


def balanced_choice(T: int, E: int, K: int) -> Tensor:
    """Every expert gets the same number of tokens, in no order that a cache would like."""
    generator = torch.Generator().manual_seed(1)
    first = torch.arange(T) * K
    expert_TK = (first[:, None] + torch.arange(K)[None]) % E
    return torch.randperm(E, generator=generator)[expert_TK[torch.randperm(T)]].int().to(DEVICE)


class Route:
    """Logits → routing, random by the router's own choice or forced to a given one."""

    def __init__(self, shape, balanced: bool, rounding: Rounding | None = None):
        T, _, _, self.E, self.K = shape
        self.forced = balanced_choice(T, self.E, self.K) if balanced else None
        self.rounding = rounding

    def in_torch(self, x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
        """(gate_TK, expert_TK) in plain torch."""
        gate_TK, expert_TK = F.softmax(x.float() @ router.t(), -1).topk(self.K, -1)
        gate_TK = gate_TK / gate_TK.sum(-1, keepdim=True)
        return gate_TK, expert_TK if self.forced is None else self.forced

    def routing(self, x: Tensor, router: Tensor) -> Routing:
        if self.rounding is not None:
            logits = router_logits(x, router)
            return round_tokens(logits, topk_gating(logits, self.K), self.rounding)
        if self.forced is None:
            made_of = (x.detach(), router.detach(), "auto")
            gating, meta = topk_routing(router_logits(x, router), self.K, made_of=made_of)
            return Routing.from_topk(gating.expert_TK, gating.gate_TK, self.E, meta=meta)
        gating = topk_gating(router_logits(x, router), self.K)
        return Routing.from_topk(self.forced, gating.gate_TK, self.E)


def ours(shape, route: Route, save: str = "h", backend: str = "auto") -> Layer:
    def layer(x, router, w1, w2):
        return experts(x, w1, w2, route.routing(x, router), save=save, backend=backend)

    return layer


def torch_grouped(shape, route: Route) -> Layer:
    """torch.nn.functional.grouped_mm between an argsort and a scatter: what torchtitan does."""
    T, D, _, E, K = shape
    grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm

    def layer(x, router, w1, w2):
        gates, expert_TK = route.in_torch(x, router)
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

    return layer


def eager(shape, route: Route) -> Layer:
    """A loop over the experts in plain torch."""
    E = shape[3]

    def layer(x, router, w1, w2):
        gates, expert_TK = route.in_torch(x, router)
        gates = gates.to(x.dtype)
        out = torch.zeros_like(x)
        for e in range(E):
            token, k = torch.where(expert_TK == e)
            h = x[token] @ w1[e].t()
            a = F.silu(h[:, 0::2]) * h[:, 1::2]
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


PEERS: dict[str, Callable] = {
    "tessera": ours,
    "tessera triton": functools.partial(ours, backend="triton"),
    "tessera save=fp8_h": functools.partial(ours, save="fp8_h"),
    "tessera save=x": functools.partial(ours, save="x"),
    "grouped_mm": torch_grouped,
    "eager loop": eager,
    "SonicMoE": sonic,
}


def cublas_products(shape) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Operands of the layer's dense products of equal groups; dH: of dA alone."""
    T, D, N, E, K = shape
    M = T * K // E
    made = functools.partial(torch.randn, device=DEVICE, dtype=BF16)
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


# ---- whole models --------------------------------------------------------------------------------


def transformers_step(
    architecture: dict, steps: list, rows: int, device: torch.device
) -> tuple[str, Callable[[int], None]]:
    """(version, training step by its number) of a model in transformers, not compiled.

    Args:
        architecture: the fields of its config.json.
        steps: micro-batches of each step, used in turn.
        rows: of its own micro-batches.
    """
    import transformers

    given = dict(architecture)
    hf = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            hf, dtype=BF16, attn_implementation="sdpa"
        )
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("grouped_mm")
    model.train()
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=fused)
    tokens: list[list[Tensor]] = [
        [part for batch in batches for part in batch.tokens_BL.to(device).split(rows)]
        for batches in steps
    ]

    def step(number: int) -> None:
        for tokens_BL in tokens[number % len(tokens)]:
            loss = model(input_ids=tokens_BL, labels=tokens_BL, use_cache=False).loss
            (loss / len(tokens[0])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return transformers.__version__, step
