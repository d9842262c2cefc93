"""The whole layer: values, gradients, padding, dtypes, recomputation, compilation."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moe import MoE, RouterStats, RoutingTrace, balance_loss, z_loss
from moe.rules.rounding import Rounding
from tests.moe.oracle import (
    FORMS,
    check_gradients,
    expert_by_hand,
    make_layer,
    moe_by_hand,
)

ROUNDING = Rounding(to="nearest", tile=4, min_mean_tiles=1)
ACTIVATIONS = ["swiglu", "geglu", "reglu", "clamped_swiglu", "relu2", "gelu", "silu"]


def assert_same_stats(a: RouterStats, b: RouterStats) -> None:
    assert a.measured().keys() == b.measured().keys()
    for name, right in b.measured().items():
        found = getattr(a, name)
        assert torch.equal(found, right), (name, found, right)


def gradients(layer, loss) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in layer.named_parameters()}


# ------------------------------------------------------------------------------ values


@pytest.mark.parametrize(("score", "norm"), FORMS)
def test_matches_the_layer_by_hand(score, norm):
    layer = make_layer(
        score=score, norm=norm, num_experts_per_tok=3, route_scale=1.7, shared_expert_size=4,
        selection_bias=True,
    )  # fmt: skip
    layer.router.selection_bias.uniform_(-0.3, 0.3)
    x = torch.randn(2, 11, 6, dtype=torch.float64)
    y, stats = layer(x)
    torch.testing.assert_close(y, moe_by_hand(layer, x), rtol=1e-10, atol=1e-10)
    assert stats.counts_E.sum() == 22 * 3
    assert stats.tokens == 22


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("save", ["h", "x"])
def test_activations(activation, save):
    layer = make_layer(activation=activation, save=save)
    x = torch.randn(9, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], moe_by_hand(layer, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_shared_expert_has_the_activation_of_the_others(activation):
    """A shared expert with an expert's weights adds what a gate of 1 would."""
    layer = make_layer(activation=activation, shared_expert_size=5)
    gated = layer.shared.gate_proj is not None
    with torch.no_grad():
        if gated:
            layer.shared.gate_proj.weight.copy_(layer.w1[3, 0::2])
        layer.shared.up_proj.weight.copy_(layer.w1[3, 1::2] if gated else layer.w1[3])
        layer.shared.down_proj.weight.copy_(layer.w2[3])
        x_D = torch.randn(6, dtype=torch.float64)
        torch.testing.assert_close(layer.shared(x_D), expert_by_hand(layer, 3, x_D))


@pytest.mark.parametrize(("E", "K"), [(1, 1), (2, 1), (3, 3), (60, 8)])
@pytest.mark.parametrize("T", [1, 77])
def test_sizes(E, K, T):
    norm = "none" if K == 1 else "topk_sum"
    layer = make_layer(num_experts=E, num_experts_per_tok=K, norm=norm)
    x = torch.randn(T, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], moe_by_hand(layer, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6), (2, 1, 3, 2, 6)])
def test_leading_axes(shape):
    layer = make_layer(shared_expert_size=3)
    x = torch.randn(shape, dtype=torch.float64)
    y, stats = layer(x)
    assert y.shape == shape
    torch.testing.assert_close(y.view(-1, 6), layer(x.view(-1, 6))[0])
    assert stats.tokens == x.numel() // 6


def test_inputs_that_are_not_contiguous():
    layer = make_layer()
    x = torch.randn(6, 4, 3, dtype=torch.float64).permute(2, 1, 0)
    assert torch.equal(layer(x)[0], layer(x.contiguous())[0])


@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6), (0, 3, 6)])
def test_no_tokens(shape):
    layer = make_layer(torch.float32, shared_expert_size=3, balance={"kind": "sequence"})
    x = torch.randn(shape, requires_grad=True)
    y, stats = layer(x)
    assert y.shape == shape
    assert stats.tokens == stats.counts_E.sum() == 0
    (y.sum() + balance_loss(stats) + z_loss(stats)).backward()
    assert x.grad.shape == shape
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_bit_equal_repeats():
    layer = make_layer(torch.float32, shared_expert_size=3)
    x = torch.randn(50, 6)
    first = layer(x)
    wanted = gradients(layer, first[0].square().sum())
    for _ in range(3):
        again = layer(x)
        assert torch.equal(again[0], first[0])
        assert_same_stats(again[1], first[1])
        for name, gradient in gradients(layer, again[0].square().sum()).items():
            assert torch.equal(gradient, wanted[name]), name


@pytest.mark.parametrize(
    ("x", "valid", "message"),
    [
        (torch.zeros(3, 5), None, r"x has shape \(3, 5\); its last axis must be hidden_size=6"),
        (
            torch.zeros(3, 6),
            torch.ones(2, dtype=torch.bool),
            r"bool of shape \(3,\), got .* \(2,\)",
        ),
        (
            torch.zeros(3, 6),
            torch.ones(3),
            r"valid must be bool of shape \(3,\), got torch.float32",
        ),
    ],
)
def test_wrong_inputs(x, valid, message):
    with pytest.raises(ValueError, match=message):
        make_layer(torch.float32)(x, valid)


def test_what_a_layer_is_made_of():
    with pytest.raises(
        TypeError, match=r"takes a MoEConfig, not 512: MoE\(MoEConfig\(hidden_size=…, "
    ):
        MoE(512, 256)


# ------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize(("score", "norm"), FORMS)
@pytest.mark.parametrize("k", [1, 2, 7])
def test_gradients_by_finite_differences(score, norm, k):
    """Gradients of output, balance and z loss together, with the choice of experts held."""
    if k == 1 and norm != "none":
        with pytest.raises(ValueError, match="num_experts_per_tok=1 with norm"):
            make_layer(score=score, norm=norm, num_experts_per_tok=1)
        return
    layer = make_layer(score=score, norm=norm, num_experts_per_tok=k, shared_expert_size=3)
    x = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 6, dtype=torch.float64)
    trace = RoutingTrace(layer)
    with trace.record():
        layer(x)

    def value():
        with trace.replay():
            y, stats = layer(x)
        return (y * weight).sum() + 3 * balance_loss(stats) + 0.1 * z_loss(stats)

    tensors = {"x": x, **dict(layer.named_parameters())}
    check_gradients(value, tensors, directions=2)
    # and the gradients without a replay, which only tests need, are the same
    y, stats = layer(x)
    plain = (y * weight).sum() + 3 * balance_loss(stats) + 0.1 * z_loss(stats)
    found = torch.autograd.grad(plain, list(tensors.values()))
    for name, a, b in zip(tensors, found, torch.autograd.grad(value(), list(tensors.values()))):
        torch.testing.assert_close(a, b, msg=name)


def test_one_expert_per_token_trains_the_router():
    """Without renormalisation the gate of a single expert is its score, and the loss moves it."""
    layer = make_layer(num_experts_per_tok=1, norm="none")
    y, _ = layer(torch.randn(20, 6, dtype=torch.float64))
    y.square().sum().backward()
    assert layer.router.weight.grad.abs().max() > 1e-3


def test_both_softmax_orders_have_their_own_gradient():
    """Softmax over all experts, then top-K, moves the logits of experts that were not chosen."""
    x = torch.randn(1, 6, dtype=torch.float64)
    touched = {}
    for norm in ("none", "softmax_topk"):
        torch.manual_seed(1)
        layer = make_layer(norm=norm)
        layer(x)[0].sum().backward()
        touched[norm] = int((layer.router.weight.grad.abs().sum(dim=1) > 0).sum())
    assert touched == {"none": 7, "softmax_topk": 2}


@pytest.mark.parametrize("frozen", ["router.weight", "w1", "w2", "x"])
def test_frozen_parts(frozen):
    layer = make_layer()
    x = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    tensors = {"x": x, **dict(layer.named_parameters())}

    def grads():
        for tensor in tensors.values():
            tensor.grad = None
        layer(x)[0].square().sum().backward()
        return {name: tensor.grad for name, tensor in tensors.items()}

    right = grads()
    tensors[frozen].requires_grad_(False)
    for name, gradient in grads().items():
        if name == frozen:
            assert gradient is None
        else:
            assert torch.equal(gradient, right[name]), name


# ------------------------------------------------------------------------------ padding


@pytest.mark.parametrize("content", [0.0, 3.0, float("nan"), float("inf")])
def test_padding_changes_nothing(content):
    """Outputs, statistics and every gradient, whatever the padding holds."""
    layer = make_layer(shared_expert_size=3, balance={"kind": "sequence"})
    rows = torch.randn(2, 4, 6, dtype=torch.float64)
    padded = torch.full((2, 7, 6), content, dtype=torch.float64)
    padded[:, :4] = rows
    valid = torch.zeros(2, 7, dtype=torch.bool)
    valid[:, :4] = True

    def run(x, mask):
        x = x.clone().requires_grad_()
        y, stats = layer(x, mask)
        loss = y.square().sum() + balance_loss(stats) + z_loss(stats) + stats.sequence_sum
        return y, stats, gradients(layer, loss), x.grad

    y, stats, right, x_grad = run(rows, None)
    padded_y, padded_stats, found, padded_grad = run(padded, valid)
    torch.testing.assert_close(padded_y[:, :4], y)
    assert torch.equal(padded_y[:, 4:], torch.zeros(2, 3, 6, dtype=torch.float64))
    assert torch.equal(padded_grad[:, 4:], torch.zeros(2, 3, 6, dtype=torch.float64))
    torch.testing.assert_close(padded_grad[:, :4], x_grad)
    for name, b in stats.measured().items():
        a = getattr(padded_stats, name)
        torch.testing.assert_close(a, b, msg=name)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, right[name], msg=name)


def test_all_valid_is_the_same_as_no_mask():
    layer = make_layer(torch.float32)
    x = torch.randn(9, 6)
    y, stats = layer(x, torch.ones(9, dtype=torch.bool))
    assert torch.equal(y, layer(x)[0])
    assert_same_stats(stats, layer(x)[1])


def test_accumulated_gradient_does_not_depend_on_the_split():
    """Sums over tokens in 1, 2, 4 and 8 micro-batches of unequal numbers of valid tokens."""
    layer = make_layer()
    x = torch.randn(8, 5, 6, dtype=torch.float64)
    valid = torch.arange(5) < torch.tensor([5, 1, 3, 5, 2, 4, 5, 1])[:, None]
    tokens = int(valid.sum())
    results = []
    for pieces in (1, 2, 4, 8):
        layer.zero_grad()
        for part, mask in zip(x.chunk(pieces), valid.chunk(pieces)):
            y, stats = layer(part, mask)
            ((y.square().sum() + 0.01 * stats.z_sum) / tokens).backward()
        results.append({name: p.grad.clone() for name, p in layer.named_parameters()})
    for other in results[1:]:
        for name, gradient in other.items():
            torch.testing.assert_close(gradient, results[0][name], msg=name)


# ------------------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_layers(dtype):
    layer = make_layer(torch.float32, shared_expert_size=4)
    x = torch.randn(40, 6).to(dtype).float()
    right = layer(x)[0].detach()
    layer.to(dtype)
    y, stats = layer(x.to(dtype))
    assert y.dtype == dtype
    error = (y.float() - right).norm() / right.norm()
    assert error < 2e-2
    y.float().square().sum().backward()
    assert layer.router.weight.grad.dtype == torch.float32
    assert layer.w1.grad.dtype == dtype
    assert stats.z_sum.dtype == torch.float32


def test_output_dtype_under_autocast_is_that_of_a_linear_layer():
    layer = make_layer(torch.float32, shared_expert_size=4)
    linear = torch.nn.Linear(6, 6)
    x = torch.randn(9, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x)[0].dtype == linear(x).dtype == torch.bfloat16
        assert layer(x.bfloat16())[0].dtype == linear(x.bfloat16()).dtype == torch.bfloat16
    assert layer(x)[0].dtype == torch.float32


# ------------------------------------------------------------------------------ state


def test_no_forward_changes_the_layer():
    """Training, evaluation, no_grad and recomputation: parameters and buffers stay bit for bit."""
    layer = make_layer(torch.float32, score="sigmoid", selection_bias=True, bias=None)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = torch.randn(30, 6, requires_grad=True)
    layer(x)
    checkpoint(lambda x: layer(x)[0], x, use_reentrant=False).sum().backward()
    layer.eval()
    with torch.no_grad():
        layer(x)
    after = layer.state_dict()
    assert set(after) == set(before)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]), name


def test_rounding_is_for_training_alone():
    layer = make_layer(torch.float32, rounding=ROUNDING)
    plain = make_layer(torch.float32)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(40, 6)
    y, stats = layer(x)
    assert (stats.rows_E % 4 == 0).all()
    right, plain_stats = plain(x)
    assert torch.equal(stats.counts_E, plain_stats.counts_E)  # the load before rounding
    assert not torch.equal(stats.rows_E, stats.counts_E)
    assert not torch.allclose(y, right)
    assert torch.equal(layer.eval()(x)[0], right)
    assert_same_stats(layer(x)[1], plain_stats)


def test_rounded_gradients_by_finite_differences():
    layer = make_layer(rounding=ROUNDING)
    x = torch.randn(40, 6, dtype=torch.float64, requires_grad=True)
    trace = RoutingTrace(layer, gate_dtype=torch.float64)
    with trace.record():
        layer(x)

    def value():
        with trace.replay():
            y, stats = layer(x)
        return y.square().sum() + balance_loss(stats)

    tensors = {"x": x, **dict(layer.named_parameters())}
    check_gradients(value, tensors)
    y, stats = layer(x)
    found = torch.autograd.grad(y.square().sum() + balance_loss(stats), list(tensors.values()))
    for name, a, b in zip(tensors, found, torch.autograd.grad(value(), list(tensors.values()))):
        torch.testing.assert_close(a, b, msg=name)


class Counter(torch.nn.Module):
    """A block that hands on the layer's statistics, and counts how often the layer runs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.runs = []

    def forward(self, x):
        y, stats = self.layer(x)
        self.runs.append((y.detach(), stats.detach()))
        return x + y, stats


def test_recomputation_routes_alike_and_counts_once():
    block = Counter(make_layer(torch.float32))
    x = torch.randn(40, 6, requires_grad=True)

    def step(run):
        block.zero_grad()
        x.grad = None
        total = None
        for _ in range(2):  # two micro-batches
            y, stats = run(x)
            (y.square().sum() + balance_loss(stats) + z_loss(stats)).backward()
            total = stats.detach() if total is None else total.plus(stats.detach())
        return total, x.grad.clone(), block.layer.router.weight.grad.clone()

    plain = step(block)
    assert len(block.runs) == 2
    block.runs.clear()
    with set_checkpoint_early_stop(False):  # let the block finish, so that it can be compared
        again = step(lambda x: checkpoint(block, x, use_reentrant=False))
    assert len(block.runs) == 4  # each forward ran twice
    for first, second in zip(block.runs[0::2], block.runs[1::2]):
        assert torch.equal(first[0], second[0])
        assert_same_stats(first[1], second[1])
    assert_same_stats(again[0], plain[0])
    assert int(again[0].tokens) == 80  # and what was counted was counted once
    assert torch.equal(again[1], plain[1])
    assert torch.equal(again[2], plain[2])


# ------------------------------------------------------------------------------ compilation

# fields, and whether some tokens are padding
COMPILED = {
    "plain": ({}, False),
    "sigmoid": (
        {
            "score": "sigmoid",
            "selection_bias": True,
            "bias": None,
            "balance": {"kind": "sequence"},
        },
        True,
    ),
    "rounded": ({"rounding": ROUNDING}, False),
    "controlled": (
        {
            "score": "sigmoid",
            "bias": {"kind": "quantile"},
            "selection": {"kind": "ema", "decay": 0.5},
            "capacity": {"factor": 1.2},
        },
        True,
    ),
    "not_rounded_for_lack_of_tokens": (
        {"rounding": Rounding(to="nearest")},
        True,
    ),
}


@pytest.mark.parametrize(("fields", "masked"), COMPILED.values(), ids=COMPILED)
@pytest.mark.filterwarnings("ignore:token rounding is off")
def test_compiles_without_a_graph_break(fields, masked):
    layer = make_layer(torch.float32, shared_expert_size=3, **fields)
    x = torch.randn(2, 8, 6, requires_grad=True)
    valid = torch.rand(2, 8) > 0.3 if masked else None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def run(call):
        x.grad = None
        y, stats = call(x, valid)
        found = gradients(layer, y.square().sum() + balance_loss(stats) + z_loss(stats))
        return y, stats, found, x.grad

    y, stats, right, x_grad = run(layer)
    compiled_y, compiled_stats, found, compiled_grad = run(compiled)
    assert isinstance(compiled_stats, RouterStats)
    torch.testing.assert_close(compiled_y, y)
    torch.testing.assert_close(compiled_grad, x_grad)
    assert compiled_stats.measured().keys() == stats.measured().keys()
    for name, right_stat in stats.measured().items():
        torch.testing.assert_close(getattr(compiled_stats, name), right_stat, msg=name)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, right[name], msg=name)
