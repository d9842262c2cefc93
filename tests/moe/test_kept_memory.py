"""What a layer keeps for its backward: H, one int32 index, ids and gates; not the router's logits.

Measured on the kernels, by the tensors that autograd saves. What is not kept is computed again, so
the gradients must be those of a layer that keeps the logits.
"""

from __future__ import annotations

import pytest
import torch

from moe import MoE, balance_loss, z_loss
from moe.experts import experts
from moe.kernels.common.backend import HAVE_TRITON, INTERPRET
from moe.kernels.common.gating import NORMS, SCORES
from moe.kernels.routing.router_logits import router_logits
from moe.kernels.routing.routing_metadata import routing_metadata, slots_of_rows
from moe.kernels.routing.topk_gating import gates_suffice, topk_gating, topk_routing
from tests.moe.oracle import layer_config

pytestmark = pytest.mark.skipif(
    not (HAVE_TRITON and (INTERPRET or torch.cuda.is_available())), reason="needs Triton's kernels"
)
DEVICE = "cpu" if INTERPRET else "cuda"

T, D, N, E, K = 96, 16, 6, 16, 2


def kept_storages(run, *beside):
    """The result of `run` and what it saved, once each and without `beside`: storage → tensor."""
    known = {t.untyped_storage().data_ptr() for t in beside}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in known:
            saved[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    return out, list(saved.values())


@pytest.fixture
def make(monkeypatch):
    """Layers whose router runs on kernels. Their experts run on plain torch, which the interpreter
    is too slow for otherwise; what is kept does not depend on it."""

    def plain_experts(*args, backend, **options):
        return experts(*args, backend="reference", **options)

    def layer(**fields) -> MoE:
        sizes = {"hidden_size": D, "expert_size": N, "num_experts": E, "num_experts_per_tok": K}
        config = layer_config(**sizes, kernels="triton", init_std=0.3, **fields)
        return MoE(config, device=DEVICE)

    if INTERPRET:
        monkeypatch.setattr("moe.layer.experts", plain_experts)
    return layer


@pytest.mark.parametrize("with_losses", [False, True])
@pytest.mark.parametrize("save", ["h", "x"])
def test_layer_keeps_h_and_three_small_arrays(save, with_losses, make):
    layer = make(save=save)
    x = torch.randn(T, D, device=DEVICE, requires_grad=True)

    def run():
        y, stats = layer(x)
        loss = y.square().sum()  # keeps y itself
        if with_losses:
            loss = loss + balance_loss(stats) + z_loss(stats)
        return y, loss

    (y, loss), saved = kept_storages(run, x, *layer.parameters())
    saved = [t for t in saved if t.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()]
    kept = sum(t.untyped_storage().nbytes() for t in saved)
    h = 4 * T * K * 2 * N if save == "h" else 0
    slots = 3 * 4 * T * K  # expert and gate of each slot, and its row
    tokens = 4 * T  # logsumexp
    rest = 4 * (8 * E + 3 * (E + T * K // 8) + 64)  # per expert, per row tile, scalars
    assert h + slots <= kept <= h + slots + tokens + rest
    assert kept < h + slots + 4 * T * E  # the bound above would show the logits
    assert not any(t.numel() >= T * E for t in saved if t.numel() != T * K * 2 * N)
    loss.backward()
    assert layer.router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("fields", [
    {"score": "sigmoid", "selection_bias": True, "route_scale": 2.5, "bias": None},
    {"norm": "softmax_topk"}, {"norm": "none"}, {"noise": {"kind": "jitter", "size": 0.1}},
    {"score": "sqrtsoftplus", "groups": 4, "groups_kept": 2},
    {"score": {"kind": "amplitude"}}, {"balance": {"kind": "sequence"}},
    {"noise": {"kind": "dropout", "probability": 0.2}},
    {"start_experts": 11}, {"start_experts": 11, "families": True},
], ids=str)  # fmt: skip
def test_gradients_are_those_of_a_layer_that_keeps_the_logits(fields, make, monkeypatch):
    layer = make(**fields)
    if "families" in fields:
        layer.router.family_E.copy_(torch.arange(E) // 3)
    valid = torch.rand(T, device=DEVICE) > 0.2
    x = torch.randn(T, D, device=DEVICE)

    def gradients():
        torch.manual_seed(1)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y, stats = layer(leaf, valid)
        (y.square().sum() + 3 * balance_loss(stats) + 2 * z_loss(stats)).backward()
        return [leaf.grad, *(p.grad.clone() for p in layer.parameters())]

    found = gradients()
    monkeypatch.setattr("moe.router.Router.made_of", lambda self, x_TD: None)
    for got, want in zip(found, gradients(), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("route", [topk_gating, topk_routing])
@pytest.mark.parametrize("wanted", ["gates", "all"])
def test_logits_computed_again(score, norm, route, wanted):
    x = torch.randn(33, D, device=DEVICE, requires_grad=True)
    x.data[3, 0] = float("nan")  # a row of NaN logits
    x.data[7] = 0.0  # ties
    w = torch.randn(E, D, device=DEVICE, requires_grad=True)
    form = {"score": score, "norm": norm, "scale": 1.7, "backend": "triton"}
    weigh = torch.randn(33, K, device=DEVICE)

    def gradients(made_of):
        logits = router_logits(x, w, "triton")
        logits.retain_grad()
        out = route(logits, K, made_of=made_of, **form)
        gating = out if route is topk_gating else out[0]
        loss = (gating.gate_TK * weigh).sum()
        if wanted == "all":
            loss = loss + gating.lse_T.square().sum() + gating.prob_sum_E.square().sum()
        loss.backward()
        return logits.grad

    (first, saved) = kept_storages(lambda: gradients((x.detach(), w.detach(), "triton")), x, w)
    assert not any(t.shape == (33, E) for t in saved)
    want = gradients(None)
    assert torch.equal(first, want)
    if wanted == "gates" and gates_suffice(score, norm):  # told from gates: against the formula
        logits = (x.detach().double() @ w.detach().double().T).requires_grad_()
        gating = topk_gating(logits, K, **{**form, "backend": "reference"})
        (gating.gate_TK * weigh).sum().backward()
        torch.testing.assert_close(first.double(), logits.grad, rtol=1e-5, atol=1e-6)


def test_gates_of_infinite_logits_have_no_gradient():
    z = torch.randn(4, E, device=DEVICE)
    z[0, 3] = float("inf")
    z[1, 5:7] = float("inf")
    z[2, : E - 2] = -float("inf")
    z.requires_grad_()
    topk_gating(z, K, scale=2.0, backend="triton").gate_TK.square().sum().backward()
    want = z.detach().clone().requires_grad_()
    topk_gating(want, K, scale=2.0, backend="reference").gate_TK.square().sum().backward()
    torch.testing.assert_close(z.grad, want.grad)
    assert not z.grad[:2].any()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("empty", [0.0, 0.3, 1.0])
def test_slots_of_rows_inverts(backend, empty):
    expert = torch.randint(0, 7, (77, 3), device=DEVICE)
    expert = torch.where(torch.rand(expert.shape, device=DEVICE) < empty, -1, expert)
    meta = routing_metadata(expert, 7, slots_per_token=3, backend="reference")
    slot_R, token_R = slots_of_rows(meta.row_S, meta.offsets_E1, 3, backend=backend)
    assert torch.equal(slot_R, meta.slot_R)
    assert torch.equal(token_R, meta.token_R)


def test_compiled_layer_keeps_no_logits_either(make):
    layer = make()
    x = torch.randn(T, D, device=DEVICE, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def run(call):
        y, stats = call(x)
        return y, balance_loss(stats) + z_loss(stats)

    run(compiled)
    (y, aux), saved = kept_storages(lambda: run(compiled), x, *layer.parameters())
    assert saved
    assert not any(t.shape == (T, E) for t in saved)
    (y.square().sum() + aux).backward()
    found = [x.grad, *(p.grad for p in layer.parameters())]
    x.grad = None
    layer.zero_grad()
    y, aux = run(layer)
    (y.square().sum() + aux).backward()
    for got, want in zip(found, [x.grad, *(p.grad for p in layer.parameters())], strict=True):
        torch.testing.assert_close(got, want)


def test_tokens_that_did_not_make_the_logits_are_refused():
    x_TD, weight_ED = torch.randn(T, D, device=DEVICE), torch.randn(E, D, device=DEVICE)
    logits_TE = router_logits(x_TD, weight_ED.requires_grad_(), "triton")
    with pytest.raises(ValueError, match=r"made_of holds x \(95, 16\).*logits_TE \(96, 16\)"):
        topk_gating(logits_TE, K, backend="triton", made_of=(x_TD[1:], weight_ED, "triton"))
