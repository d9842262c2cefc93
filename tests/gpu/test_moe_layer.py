"""The layer on a GPU: same numbers as on the CPU, no host sync, fast router logits."""

import copy

import pytest
import torch

from moe import (
    RouterStats,
    RoutingTrace,
    balance_loss,
    layer_metrics,
    router_losses,
    to_host,
    z_loss,
)
from moe.control import begin_step, update_routers
from moe.kernels.routing.router_logits import router_logits
from tests.moe.oracle import make_layer

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 64, "expert_size": 48, "num_experts": 16, "num_experts_per_tok": 4}
FIELDS = {
    "plain": {},
    "sigmoid": {
        "score": "sigmoid",
        "selection_bias": True,
        "bias": None,
        "balance": {"kind": "sequence"},
    },
    "shared": {"shared_expert_size": 40, "save": "x"},
    "rounded": {"rounding": {"to": "nearest", "tile": 16, "min_mean_tiles": 1}},
}
CONTROLLED = {
    "quantile": {
        "score": "sigmoid",
        "bias": {"kind": "quantile"},
        "balance": {"kind": "lagged"},
        "selection": {"kind": "ema", "decay": 0.9},
        "noise": {"kind": "dropout", "probability": 0.1},
        "capacity": {"factor": 1.2},
    },
    "sign": {
        "score": "sigmoid",
        "groups": 4,
        "groups_kept": 2,
        "bias": {"kind": "sign"},
        "balance": {"load": "flops"},
        "expert_widths": tuple(range(33, 49)),
    },
}


def run(layer, x, valid=None):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y, stats = layer(x, valid)
    (y.float().square().mean() + 0.1 * balance_loss(stats) + 0.01 * z_loss(stats)).backward()
    return y, stats, {"x": x.grad, **{n: p.grad.clone() for n, p in layer.named_parameters()}}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_as_float64_on_the_cpu(fields, dtype):
    """Under the routing that the GPU chose, in float64: 1e-5 for float32, 2e-2 for bfloat16."""
    layer = make_layer(torch.float32, **SIZES, **fields).cuda().to(dtype)
    x = torch.randn(3, 100, 64, device="cuda", dtype=dtype)
    valid = torch.rand(3, 100, device="cuda") > 0.2
    trace = RoutingTrace(layer)
    with trace.record():
        y, stats, found = run(layer, x, valid)
    exact = copy.deepcopy(layer).cpu().double()
    with trace.replay(exact):
        right_y, right_stats, right = run(exact, x.cpu().double(), valid.cpu())
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    pairs = {"y": (y, right_y), **{name: (found[name], right[name]) for name in found}}
    for name, (a, b) in pairs.items():
        error = (a.cpu().double() - b).norm() / b.norm()
        assert error < bound, (name, error.item())
    assert torch.equal(stats.counts_E.cpu(), right_stats.counts_E)
    assert torch.equal(stats.rows_E.cpu(), right_stats.rows_E)
    for name in ("prob_sum_E", "z_sum", "entropy_sum", "tokens", "sequence_sum"):
        a, b = getattr(stats, name).cpu().double(), getattr(right_stats, name)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_bit_equal_repeats(fields):
    layer = make_layer(torch.float32, **SIZES, **fields).cuda().bfloat16()
    x = torch.randn(2, 333, 64, device="cuda", dtype=torch.bfloat16)
    y, stats, right = run(layer, x)
    for _ in range(5):
        again, again_stats, found = run(layer, x)
        assert torch.equal(again, y)
        assert all(
            torch.equal(a, b)
            for a, b in zip(again_stats.measured().values(), stats.measured().values())
        )
        for name, gradient in found.items():
            assert torch.equal(gradient, right[name]), name


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_no_host_sync_but_one(fields):
    """Forward, backward, losses and metrics read nothing back; `to_host` does, once."""
    layer = make_layer(torch.float32, **SIZES, **fields).cuda().bfloat16()
    x = torch.randn(2, 333, 64, device="cuda", dtype=torch.bfloat16)
    valid = torch.rand(2, 333, device="cuda") > 0.2
    step_tokens = valid.sum().float()
    run(layer, x, valid)  # what is compiled and allocated at the first call may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.zero_grad()
        y, stats = layer(x, valid)
        stacked = RouterStats.stack([stats])
        loss, _ = router_losses([layer.router], stacked, step_tokens)
        (y.float().square().sum() / step_tokens + loss).backward()
        metrics = layer_metrics(RouterStats.stack([stats, stats]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert to_host(metrics)["max_violation"].device.type == "cpu"


def test_compiled_with_inductor():
    layer = make_layer(torch.float32, **SIZES, shared_expert_size=40).cuda().bfloat16()
    x = torch.randn(2, 333, 64, device="cuda", dtype=torch.bfloat16)
    y, stats, right = run(layer, x)
    compiled = torch.compile(layer, fullgraph=True)

    x = x.detach().requires_grad_()
    layer.zero_grad()
    again, again_stats = compiled(x)
    loss = again.float().square().mean() + 0.1 * balance_loss(again_stats)
    (loss + 0.01 * z_loss(again_stats)).backward()
    assert torch.equal(again_stats.counts_E, stats.counts_E)
    assert (again - y).norm() / y.norm() < 1e-2
    for name, parameter in layer.named_parameters():
        assert (parameter.grad - right[name]).norm() / right[name].norm() < 1e-2, name


def device_ms(call, repeats: int = 20) -> float:
    """Time of the kernels alone: the queue is filled while the device sleeps."""
    call()
    torch.cuda._sleep(200_000_000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


@pytest.mark.parametrize(("T", "D", "E"), [(24576, 1536, 128), (32768, 2048, 64)])
def test_speed_of_router_logits(T, D, E):
    """Split products against a float32 product of a widened x. `pytest -s` prints the times."""
    x_TD = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight_ED = torch.randn(E, D, device="cuda", requires_grad=True)
    grad_TE = torch.randn(T, E, device="cuda")
    times = {}
    for backend in ("triton", "reference"):
        forward = device_ms(lambda backend=backend: router_logits(x_TD, weight_ED, backend))
        logits_TE = router_logits(x_TD, weight_ED, backend)

        def backward(logits_TE=logits_TE):
            torch.autograd.grad(logits_TE, (x_TD, weight_ED), grad_TE, retain_graph=True)

        times[backend] = forward, device_ms(backward)
        print(f"\nT={T} D={D} E={E} {backend}: {forward:.3f} + {times[backend][1]:.3f} ms", end="")
    assert sum(times["triton"]) < 0.5 * sum(times["reference"])


@pytest.mark.parametrize("fields", CONTROLLED.values(), ids=CONTROLLED)
def test_state_of_the_router_needs_no_host_sync(fields):
    """Forward, backward and update; and the update is that of the same statistics on the CPU."""
    layer = make_layer(torch.float32, **SIZES, **fields).cuda()
    x = torch.randn(4, 100, 64, device="cuda")
    valid = torch.rand(4, 100, device="cuda") > 0.2
    applied = torch.ones((), device="cuda")
    run(layer, x, valid)  # compilation of kernels may synchronise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin_step(layer, 1)
        _, stats, _ = run(layer, x, valid)
        before = copy.deepcopy(layer)
        update_routers(layer, stats, step=1, applied=applied)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    before = before.cpu()
    host = type(stats)(*(None if field is None else field.cpu() for field in stats.detach()))
    update_routers(before, host, step=1)
    for (name, found), right in zip(layer.named_buffers(), before.buffers()):
        torch.testing.assert_close(found.cpu(), right, msg=name)
