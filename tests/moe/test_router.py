"""The router: worked gates, refused configurations, and float32 through everything."""

import copy
import io

import pytest
import torch

from moe import MoE, MoEConfig, Router
from moe.kernels.routing.topk_gating import topk_gating
from moe.scores import gates_at, probabilities
from tests.moe.oracle import FORMS, logits_layer, make_layer

Z = [2.0, 1.0, 1.0, -1.0]


def gating(logits, **fields):
    """What the layer's router does with given logits."""
    fields.setdefault("num_experts_per_tok", 2)
    logits_TE = torch.as_tensor(logits, dtype=torch.float32).reshape(-1, len(logits))
    layer = logits_layer(num_experts=logits_TE.shape[1], **fields)
    return layer.router(logits_TE).gating


# ------------------------------------------------------------------------------ worked examples


@pytest.mark.parametrize(
    ("fields", "gates"),
    [
        ({"norm": "none"}, [0.5601, 0.2060]),
        ({"norm": "topk_sum"}, [0.7311, 0.2689]),
        ({"norm": "softmax_topk"}, [0.7311, 0.2689]),
        ({"score": "sigmoid"}, [0.5464, 0.4536]),
        ({"score": "sigmoid", "route_scale": 2.5}, [1.3661, 1.1339]),
        ({"score": "sqrtsoftplus"}, [0.5600, 0.4400]),
        ({"score": "identity", "norm": "none"}, [2.0, 1.0]),
    ],
)
def test_gates(fields, gates):
    chosen = gating(Z, **fields)
    assert chosen.expert_TK.tolist() == [[0, 1]]  # experts 1 and 2 tie: the lower index
    torch.testing.assert_close(chosen.gate_TK, torch.tensor([gates]), rtol=0, atol=5e-5)


def test_ties_take_the_lower_index():
    assert gating([3.0, 2, 3, 2, 1, 1]).expert_TK.tolist() == [[0, 2]]
    one = gating([3.0, 2, 3, 2, 1, 1], num_experts_per_tok=1, norm="none")
    assert one.expert_TK.tolist() == [[0]]
    assert gating([1.0] * 5, num_experts_per_tok=3).expert_TK.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("logits", "experts", "gates"),
    [
        ([float("nan"), 1, 0, -1], [1, 2], [0.7311, 0.2689]),
        ([float("inf"), float("inf"), 0], [0, 1], [0.5, 0.5]),
        ([float("-inf")] * 4, [0, 1], [0.0, 0.0]),
        ([float("-inf"), float("-inf"), 3, float("-inf")], [2, 0], [1.0, 0.0]),
    ],
)
def test_nonfinite_logits(logits, experts, gates):
    chosen = topk_gating(torch.tensor([logits]), 2)
    assert chosen.expert_TK.tolist() == [experts]
    torch.testing.assert_close(chosen.gate_TK, torch.tensor([gates]), rtol=0, atol=5e-5)
    assert int(chosen.nonfinite) == 1


def test_nonfinite_token_reaches_the_statistics_and_no_other_token():
    x_TD = torch.randn(3, 6)
    layer = make_layer(torch.float32)
    clean, stats = layer(x_TD)
    assert int(stats.nonfinite) == 0
    x_TD[0] = float("nan")
    y, stats = layer(x_TD)
    assert int(stats.nonfinite) == 1
    torch.testing.assert_close(y[1:], clean[1:])


def test_group_limited_selection():
    keys = [0.9, 0.1, 0.8, 0.75, 0.7, 0.6, 0.05, 0.02]
    fields = {"score": "identity", "norm": "none", "groups": 4, "groups_kept": 2}
    assert gating(keys, group_top=2, **fields).expert_TK.tolist() == [[2, 3]]
    assert gating(keys, group_top=1, **fields).expert_TK.tolist() == [[0, 2]]
    # all keys negative: an expert masked with 0 instead of -inf would win
    negative = [key - 1 for key in keys]
    assert gating(negative, group_top=2, **fields).expert_TK.tolist() == [[2, 3]]
    plain = {"score": "identity", "norm": "none"}
    assert torch.equal(
        gating(keys, **plain).gate_TK, gating(keys, groups=4, groups_kept=4, **plain).gate_TK
    )


def test_bias_chooses_but_does_not_weigh():
    """A bias of (0, 0, 5, 5) chooses experts 2 and 3; gates and output know nothing of it."""
    layer = logits_layer(
        num_experts=4,
        num_experts_per_tok=2,
        score="sigmoid",
        selection_bias=True,
        bias=None,
    )
    x = torch.tensor([[1.0, 0, 0, 0]], requires_grad=True)
    assert layer.router(x).gating.expert_TK.tolist() == [[0, 1]]
    layer.router.selection_bias.copy_(torch.tensor([0.0, 0, 5, 5]))
    chosen = layer.router(x).gating
    assert chosen.expert_TK.tolist() == [[2, 3]]
    assert chosen.gate_TK.tolist() == [[0.5, 0.5]]  # sigmoid(0) each
    y, _ = layer(x)
    layer.router.selection_bias[2:] += 1
    moved, _ = layer(x)
    assert torch.equal(y, moved)
    assert not layer.router.selection_bias.requires_grad
    assert "router.selection_bias" not in dict(layer.named_parameters())
    assert "router.selection_bias" in layer.state_dict()


# ------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 8}, "num_experts_per_tok=8 .* num_experts=7; allowed: 1 to 7"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0"),
        (
            {"num_experts_per_tok": 1, "norm": "topk_sum"},
            "num_experts_per_tok=1 with norm='topk_sum'",
        ),
        (
            {"num_experts_per_tok": 1, "norm": "softmax_topk"},
            "num_experts_per_tok=1 with norm='soft",
        ),
        ({"score": "softmaxx"}, "score='softmaxx' is unknown; allowed: softmax, sigmoid"),
        ({"norm": "sum"}, "norm='sum' is unknown; allowed: topk_sum"),
        ({"score": "identity"}, "norm='topk_sum' divides by the sum"),
        ({"route_scale": 0.0}, "route_scale=0.0"),
        ({"route_scale": float("nan")}, "route_scale=nan"),
        ({"groups": 3}, "groups=3 must .* divide num_experts=7"),
        ({"num_experts": 8, "groups": 4, "groups_kept": 5}, "groups_kept=5 .* groups=4"),
        (
            {"num_experts": 8, "groups": 4, "groups_kept": 1, "num_experts_per_tok": 3},
            "groups_kept=1 groups of 2 experts hold 2 experts, fewer than num_experts_per_tok=3",
        ),
        (
            {"num_experts": 8, "groups": 4, "groups_kept": 2, "group_top": 3},
            "group_top=3 must be between 1 and the 2 experts",
        ),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"expert_size": -1}, "expert_size=-1"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"shared_expert_size": -4}, "shared_expert_size=-4"),
        ({"activation": "swigul"}, "activation='swigul' .* did you mean 'swiglu'"),
        ({"kernels": "cuda"}, "kernels='cuda' is unknown; allowed: auto"),
        ({"save": "a"}, "save='a' is unknown; allowed: h, fp8_h, x"),
        ({"init_std": -1.0}, "init_std=-1.0"),
        ({"router_init_std": float("inf")}, "router_init_std=inf"),
    ],
)
def test_impossible_configurations_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        make_layer(**fields)


def test_initial_standard_deviations():
    layer = MoE(MoEConfig(64, 32, 64, 2, init_std=0.1, router_init_std=0.01))
    assert layer.router.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert layer.w1.std().item() == pytest.approx(0.1, rel=0.1)
    assert layer.w2.std().item() == pytest.approx(0.1, rel=0.1)
    assert MoE(MoEConfig(64, 32, 64, 2, init_std=0.1)).router.weight.std() > 0.05
    shared = MoE(MoEConfig(64, 32, 4, 2, init_std=0.1, shared_expert_size=64)).shared
    assert shared.down_proj.weight.std().item() == pytest.approx(0.1, rel=0.1)


# ------------------------------------------------------------------------------ always float32


def assert_float32(layer: MoE) -> None:
    assert layer.router.weight.dtype == torch.float32
    assert layer.router.selection_bias.dtype == torch.float32


def biased() -> MoE:
    layer = make_layer(torch.float32, score="sigmoid", selection_bias=True, bias=None)
    layer.router.selection_bias.uniform_()
    return layer


CASTS = {
    "to": lambda m: m.to(torch.bfloat16),
    "bfloat16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "to_like": lambda m: m.to(torch.empty(0, dtype=torch.bfloat16)),
    "device_and_dtype": lambda m: m.to("cpu", torch.float16),
    "inside_a_parent": lambda m: torch.nn.Sequential(m).to(torch.bfloat16)[0],
    "twice": lambda m: m.bfloat16().half().bfloat16(),
    "deepcopy": lambda m: copy.deepcopy(m.bfloat16()),
    "pickle": lambda m: torch.load(_saved(m.bfloat16()), weights_only=False),
}


def _saved(thing) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("cast", CASTS)
def test_casts_leave_weight_and_bias_alone(cast):
    layer = biased()
    weight, bias = layer.router.weight.clone(), layer.router.selection_bias.clone()
    layer = CASTS[cast](layer)
    assert layer.w1.dtype in (torch.bfloat16, torch.float16)
    assert_float32(layer)
    assert torch.equal(layer.router.weight, weight)  # not rounded on the way either
    assert torch.equal(layer.router.selection_bias, bias)


def test_default_dtype_does_not_reach_the_router():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = biased()
        meta = MoE(layer.config, device="meta").to_empty(device="cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert_float32(layer)
    assert_float32(meta)


@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_bfloat16_checkpoint(assign):
    layer = biased().bfloat16()
    state = {name: tensor.bfloat16() for name, tensor in biased().state_dict().items()}
    layer.load_state_dict(state, assign=assign)
    assert_float32(layer)
    assert torch.equal(layer.router.weight, state["router.weight"].float())
    assert state["router.weight"].dtype == torch.bfloat16  # the caller's dict is not touched


def test_bias_keeps_small_steps_after_a_cast():
    """0.001 added to 0.5 a hundred times is lost in bf16, whose step there is 0.002 to 0.004."""
    layer = biased().bfloat16()
    layer.router.selection_bias.fill_(0.5)
    for _ in range(100):
        layer.router.selection_bias += 0.001
    torch.testing.assert_close(layer.router.selection_bias, torch.full((7,), 0.6))


def test_move_between_dtypes_above_float32():
    layer = biased()
    weight = layer.router.weight.clone()
    assert layer.double().router.weight.dtype == torch.float64  # for exactness tests
    assert layer.bfloat16().router.weight.dtype == torch.float64
    assert torch.equal(layer.float().router.weight, weight)
    assert_float32(layer)


def test_a_cast_behind_the_modules_back_is_an_error():
    layer = biased()
    layer.router.weight.data = layer.router.weight.data.bfloat16()
    with pytest.raises(ValueError, match=r"router\.weight is torch\.bfloat16, allowed: float32"):
        layer(torch.randn(2, 6))


def test_logits_are_float32_under_bfloat16_and_autocast():
    layer = biased().bfloat16()
    x_TD = torch.randn(50, 6).bfloat16()
    right = x_TD.double() @ layer.router.weight.double().t()
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits_TE = layer.router.logits(x_TD)
            _, stats = layer(x_TD)
        assert logits_TE.dtype == torch.float32
        torch.testing.assert_close(logits_TE.double(), right, rtol=0, atol=1e-6)
        assert stats.prob_sum_E.dtype == torch.float32
        assert layer.router(x_TD).gating.gate_TK.dtype == torch.float32


def test_logits_closer_than_bfloat16_are_told_apart():
    """1.0010 and 1.0020 are both 1.0 in bf16; the larger must win."""
    layer = logits_layer(num_experts=2, num_experts_per_tok=1, norm="none").bfloat16()
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[1.0010, 0], [1.0020, 0]]))
    x_TD = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.router(x_TD).gating.expert_TK.tolist() == [[1]]


@pytest.mark.parametrize("autocast", [False, True])
def test_gradient_of_the_logits(autocast):
    router = Router(MoEConfig(6, 4, 7, 2, init_std=0.5))
    x_TD = torch.randn(30, 6).bfloat16().requires_grad_()
    grad_TE = torch.randn(30, 7)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        router.logits(x_TD).backward(grad_TE)
    right_x = grad_TE.double() @ router.weight.double()
    right_weight = grad_TE.double().t() @ x_TD.double()
    assert x_TD.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x_TD.grad.double(), right_x, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(router.weight.grad.double(), right_weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_frozen_side_gets_no_gradient(frozen):
    router = Router(MoEConfig(6, 4, 7, 2))
    x_TD = torch.randn(5, 6, requires_grad=frozen != "x")
    router.weight.requires_grad_(frozen != "weight")
    router.logits(x_TD).sum().backward()
    assert (x_TD.grad is None) == (frozen == "x")
    assert (router.weight.grad is None) == (frozen == "weight")


def test_logits_keep_no_float32_copy_of_x():
    router = Router(MoEConfig(6, 4, 7, 2))
    x_TD = torch.randn(5, 6).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        router.logits(x_TD)
    assert x_TD.data_ptr() in [t.data_ptr() for t in kept]
    assert not [t for t in kept if t.shape == x_TD.shape and t.dtype == torch.float32]


# ------------------------------------------------------------------------------ gates of a choice


@pytest.mark.parametrize(("score", "norm"), FORMS)
def test_gates_at_and_probabilities_agree_with_the_gating(score, norm):
    logits_TE = torch.randn(40, 9, dtype=torch.float64, requires_grad=True)
    valid_T = torch.rand(40) > 0.3
    right = topk_gating(logits_TE, 3, score=score, norm=norm, scale=1.5, valid_T=valid_T)
    gate_TK = gates_at(logits_TE, right.expert_TK, score, norm, 1.5)
    torch.testing.assert_close(gate_TK, right.gate_TK)
    prob_TE = probabilities(logits_TE, score, valid_T)
    torch.testing.assert_close(prob_TE.sum(dim=0), right.prob_sum_E)
    torch.testing.assert_close(prob_TE.sum(dim=1), valid_T.double())

    weight_TK, weight_E = torch.randn(40, 3).double(), torch.randn(9).double()
    found = torch.autograd.grad((gate_TK * weight_TK).sum() + prob_TE.sum(0) @ weight_E, logits_TE)
    value = (right.gate_TK * weight_TK).sum() + right.prob_sum_E @ weight_E
    torch.testing.assert_close(found, torch.autograd.grad(value, logits_TE))


def test_probabilities_of_nonfinite_rows():
    inf, nan = float("inf"), float("nan")
    logits_TE = torch.tensor(
        [[nan, nan], [-inf, -inf], [inf, 0.0], [0.0, -inf]], requires_grad=True
    )
    prob_TE = probabilities(logits_TE, "softmax")
    assert prob_TE.tolist() == [[0, 0], [0, 0], [1, 0], [1, 0]]
    prob_TE.sum().backward()
    assert logits_TE.grad.isfinite().all()
