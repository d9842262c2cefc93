"""Models on a GPU: the same numbers as on the CPU, documents apart, no reading back, one graph."""

from __future__ import annotations

import pytest
import torch

from models import Documents
from models.attention import packed_attention
from models.build import build_model
from models.cross_entropy import cross_entropy_ref, cross_entropy_triton
from models.execution import apply_checkpointing, compile_blocks
from models.generate import Sampling, generate
from models.loss import linear_cross_entropy
from tests.models.tiny import CASES, FAMILIES, next_tokens, tiny_config, tokens

pytestmark = pytest.mark.gpu

LENGTHS = [37, 91, 128, 1, 127, 64, 64]  # four rows of 128 tokens


def config(case: str, **changes):
    """Head widths that flash attention takes."""
    width = {"head_dim": 16} if case == "qwen3_moe" else {}
    return tiny_config(case, **width, **changes)


def error(mine: torch.Tensor, exact: torch.Tensor) -> float:
    mine, exact = mine.detach().double().cpu(), exact.detach().double().cpu()
    return ((mine - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_packed_attention(kv_heads: int, dtype: torch.dtype) -> None:
    shapes = [(4, 128, heads, 64) for heads in (8, kv_heads, kv_heads)]
    exact = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mine = [x.detach().to("cuda", dtype).requires_grad_() for x in exact]
    documents = Documents.from_lengths(LENGTHS)
    weights = torch.randn(shapes[0], dtype=torch.float64)
    results = []
    for inputs in (exact, mine):
        device = inputs[0].device
        moved = documents.to(device)
        y = packed_attention(*inputs, moved.cu_seqlens_N1, moved.lengths_N)
        (y * weights.to(y)).sum().backward()
        results.append([y, *(x.grad for x in inputs)])
    allowed = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    for reference, got in zip(*results, strict=True):
        assert got.dtype == dtype
        assert error(got, reference) < allowed


@pytest.mark.parametrize("case", CASES)
def test_model_equals_the_cpu(case: str) -> None:
    """fp32 on both; then bf16 against fp32."""
    config = tiny_config(case, max_position_embeddings=256)
    tokens_BL = tokens(config, 4, 128)
    documents = Documents.from_lengths(LENGTHS)
    results = {}
    for name, device, dtype in (
        ("cpu", "cpu", torch.float32),
        ("cuda", "cuda", torch.float32),
        ("bf16", "cuda", torch.bfloat16),
    ):
        model = build_model(config, device=device, dtype=dtype, seed=1)
        out = model(
            tokens_BL.to(device),
            labels_BL=next_tokens(tokens_BL).to(device),
            documents=documents.to(device),
        )
        (out.loss_sum + out.router.z_sum.sum()).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results[name] = (out.loss_sum, gradients, out.router)
    loss, gradients, router = results["cpu"]
    assert abs(results["cuda"][0].cpu() / loss - 1) < 1e-5
    assert torch.equal(results["cuda"][2].counts_E.cpu(), router.counts_E)
    for name, gradient in gradients.items():
        assert error(results["cuda"][1][name], gradient) < 1e-4, name
    assert abs(results["bf16"][0].cpu() / loss - 1) < 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_isolated(family: str) -> None:
    model = build_model(config(family), device="cuda", dtype=torch.bfloat16)
    documents = Documents.from_lengths([40, 88], device="cuda")
    tokens_BL = tokens(model.config, 1, 128).cuda()
    changed_BL = tokens_BL.clone()
    changed_BL[0, :40] = tokens(model.config, 1, 40, seed=9)[0].cuda()
    with torch.no_grad():
        first = model(tokens_BL, documents=documents, logits=True).logits
        second = model(changed_BL, documents=documents, logits=True).logits
        alone = model(tokens_BL[:, 40:], logits=True).logits
    assert error(second[:, 40:], first[:, 40:]) < 1e-3  # bit-equal but for shared expert tiles
    assert error(second[:, :40], first[:, :40]) > 0.1
    assert error(alone, first[:, 40:]) < 3e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("count", "width", "words"), [(1000, 64, 5000), (513, 256, 50304)])
def test_loss(count: int, width: int, words: int, dtype: torch.dtype) -> None:
    x_TD = torch.randn(count, width, device="cuda", dtype=dtype).requires_grad_()
    weight_VD = (torch.randn(words, width, device="cuda", dtype=dtype) * 0.1).requires_grad_()
    labels_T = torch.randint(words, (count,), device="cuda")
    labels_T[::3] = -100
    exact = [t.detach().double().requires_grad_() for t in (x_TD, weight_VD)]
    reference = torch.nn.functional.cross_entropy(
        exact[0] @ exact[1].t(), labels_T, reduction="sum"
    )
    reference.backward()
    for backend in ("triton", "reference"):
        x_TD.grad = weight_VD.grad = None
        loss = linear_cross_entropy(x_TD, weight_VD, labels_T, chunk=256, backend=backend)
        loss.backward()
        # logits in fp32 whatever the inputs: only they are rounded
        assert abs(loss.double() / reference - 1) < 1e-5
        allowed = 1e-3 if dtype == torch.float32 else 1e-2
        assert error(x_TD.grad, exact[0].grad) < allowed
        assert error(weight_VD.grad, exact[1].grad) < allowed


@pytest.mark.parametrize("words", [1, 100, 4096, 50257])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32, None])
def test_cross_entropy_kernel(words: int, grad_dtype: torch.dtype | None) -> None:
    logits_PV = torch.randn(70, words, device="cuda") * 5
    labels_P = torch.randint(words, (70,), device="cuda")
    labels_P[::7] = -100
    losses_P, grad_PV = cross_entropy_triton(logits_PV, labels_P, grad_dtype)
    expected, grad = cross_entropy_ref(logits_PV.double(), labels_P, grad_dtype)
    torch.testing.assert_close(losses_P, expected.float(), rtol=1e-5, atol=1e-5)
    if grad_dtype is not None:
        torch.testing.assert_close(grad_PV, grad, rtol=1e-2, atol=1e-5)
        assert (grad_PV[::7] == 0).all()


def batch(of):
    tokens_BL = tokens(of, 4, 128).cuda()
    documents = Documents.from_lengths(LENGTHS, device="cuda")
    valid_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
    positions_BL = documents.positions().view(4, 128).cuda()
    return {
        "tokens_BL": tokens_BL,
        "labels_BL": next_tokens(tokens_BL),
        "positions_BL": positions_BL,
        "documents": documents,
        "valid_BL": valid_BL,
    }


@pytest.mark.parametrize("case", FAMILIES)
def test_a_step_reads_nothing_back(case: str) -> None:
    model = build_model(config(case), device="cuda", dtype=torch.bfloat16)
    inputs = batch(model.config)

    def step() -> None:
        out = model(**inputs)
        (out.loss_sum / 400 + out.router.z_sum.sum()).backward()

    step()  # compilation of kernels may synchronise
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_bit(mode: str) -> None:
    model = build_model(config("qwen3_moe"), device="cuda", dtype=torch.bfloat16)
    inputs = batch(model.config)
    results = []
    for now in ("none", mode):
        apply_checkpointing(model, now)
        model.zero_grad()
        out = model(**inputs)
        out.loss_sum.backward()
        results.append([out.loss_sum, *(p.grad for p in model.parameters())])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_compiled_blocks_keep_one_graph() -> None:
    small = config("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[], initializer_range=0.1)
    exact = build_model(small, device="cuda")
    plain, model = (build_model(small, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch._dynamo.reset()
    compile_blocks(model)
    graphs = []
    for lengths in (LENGTHS, [128] * 4, [64] * 8, [1] * 28 + [100, 128, 128, 128]):
        inputs = batch(small) | {"documents": Documents.from_lengths(lengths, device="cuda")}
        inputs["positions_BL"] = None
        results = []
        for one in (exact, plain, model):
            one.zero_grad()
            out = one(**inputs)
            out.loss_sum.backward()
            results.append((out.loss_sum, one.layers[1].moe.w1.grad, one.embed.weight.grad))
        for reference, eager, compiled in zip(*results, strict=True):
            assert error(compiled, reference) < 1.5 * error(eager, reference) + 1e-3
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1 and graphs[0] > 0, graphs


def test_generation() -> None:
    model = build_model(tiny_config("glm4_moe"), device="cuda", dtype=torch.bfloat16)
    prompts = [[5, 6, 7], [9]]
    texts = [
        list(generate(model, prompts, Sampling(0.9, top_p=0.9, seed=s), max_new_tokens=20))
        for s in (1, 1)
    ]
    assert texts[0] == texts[1] and len(texts[0]) > 1
