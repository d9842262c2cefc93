"""Initial weights, parameter kinds, recomputation and compilation."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from models import Documents
from models.build import build_model, draw, init_weights, parameter_kinds
from models.execution import apply_checkpointing, compile_blocks
from models.first_weights import FirstWeights
from models.generate import generate
from models.transformer import Decoder
from moe.config import RouterConfig
from tests.models.tiny import CASES, next_tokens, tiny_config, tokens


def step(model: Decoder, documents: Documents | None = None, rows: int = 2, length: int = 16):
    """Loss, gradients and statistics of one forward and backward pass."""
    tokens_BL = tokens(model.config, rows, length)
    model.zero_grad()
    out = model(tokens_BL, labels_BL=next_tokens(tokens_BL), documents=documents)
    (out.loss_sum + out.router.z_sum.sum() + out.router.prob_sum_E.square().sum()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return out.loss_sum.detach(), gradients, out.router


# ------------------------------------------------------------------------------------- weights


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    config = tiny_config("glm4_moe")
    model, same, other = (build_model(config, seed=seed) for seed in (1, 1, 2))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        if parameter_kinds(model)[name] not in ("norm", "bias"):
            assert not torch.equal(parameter, other.get_parameter(name)), name
    # one expert, or one matrix, can be drawn alone: what a sharded process does
    w1 = model.layers[2].moe.w1
    for expert in (0, 5):
        assert torch.equal(
            w1[expert],
            draw(config.initializer_range, "layers.2.moe.w1", w1[0].shape, 1, expert),
        )
    # a deeper model starts with the same first layers
    deeper = build_model(tiny_config("glm4_moe", num_hidden_layers=4), seed=1)
    assert torch.equal(deeper.layers[1].attn.q.weight, model.layers[1].attn.q.weight)


@pytest.mark.parametrize("case", CASES)
def test_initial_weights_have_the_configs_spread(case: str) -> None:
    config = tiny_config(case, hidden_size=128, initializer_range=0.02)
    model = build_model(config, first=FirstWeights(embedding=0.02))
    for name, kind in parameter_kinds(model).items():
        parameter = model.get_parameter(name)
        if kind == "norm":
            assert (parameter == 1).all(), name
        elif kind == "bias":
            assert (parameter == 0).all(), name
        else:
            count = parameter.numel()
            assert abs(parameter.std() / 0.02 - 1) < max(0.1, 3 / count**0.5), name
            assert abs(parameter.mean()) < max(0.002, 0.06 / count**0.5), name
    for name, buffer in model.named_buffers():
        assert (buffer == 0).all(), name


def test_first_weights_are_drawn_as_they_are_said() -> None:
    first = FirstWeights(router=0.5, branches="by_depth")
    config = tiny_config(
        "qwen3_moe", hidden_size=128, initializer_range=0.02, num_hidden_layers=8,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = build_model(config, first=first)
    block = model.layers[0]
    for weight, std in (
        (model.embed.weight, 1.0),
        (model.head.weight, 0.02),
        (block.moe.router.weight, 0.5),
        (block.moe.w1, 0.02),
        (block.moe.w2, 0.02 / 4),
        (block.attn.o.weight, 0.02 / 4),
        (block.attn.q.weight, 0.02),
    ):
        assert abs(weight.std() / std - 1) < 0.1
    tied = build_model(config.model_copy(update={"tie_word_embeddings": True}))
    assert abs(tied.embed.weight.std() / 0.02 - 1) < 0.1


def test_no_two_matrices_start_equal() -> None:
    model = build_model(tiny_config("mixtral"))
    first = Counter(round(p.flatten()[0].item(), 9) for p in model.parameters() if p.dim() > 1)
    assert set(first.values()) == {1}


def test_meta_model_takes_no_memory_and_counts() -> None:
    config = tiny_config("qwen3_moe", hidden_size=4096, vocab_size=10**7, num_hidden_layers=4)
    model = build_model(config, device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) > 10**10


def test_dtype_leaves_the_router_wide() -> None:
    model = build_model(tiny_config("glm4_moe"), dtype=torch.bfloat16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.dtype == (torch.float32 if "router" in name else torch.bfloat16), name
    out = model(tokens(model.config, 1, 8), labels_BL=torch.full((1, 8), 3))
    assert out.loss_sum.dtype == out.router.prob_sum_E.dtype == torch.float32


def test_autocast_keeps_the_stream_narrow_and_the_loss_wide() -> None:
    model = build_model(tiny_config("qwen3_moe"))
    seen = []
    model.norm.register_forward_hook(lambda _, __, y: seen.append(y.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients, _ = step(model)
    assert seen == [torch.bfloat16] and loss.dtype == torch.float32
    assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
    exact, reference, _ = step(model)
    assert abs(loss / exact - 1) < 0.05
    assert gradients.keys() == reference.keys()


def test_tied_weights_are_one_parameter() -> None:
    model = build_model(tiny_config("qwen3_moe_sparse_step"))
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
    init_weights(model, seed=4)
    assert model.head.weight is model.embed.weight


# ------------------------------------------------------------------------------------- kinds


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_has_the_right_kind(case: str) -> None:
    config = tiny_config(case)
    model = build_model(config)
    kinds = parameter_kinds(model)
    assert kinds.keys() == dict(model.named_parameters()).keys()
    by_module: dict[str, str] = {}
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            if name == "bias":
                by_module[full] = "bias"
            elif type(module).__name__ == "RMSNorm":
                by_module[full] = "norm"
            elif isinstance(module, nn.Embedding):
                by_module[full] = "embedding"
            elif type(module).__name__ in ("Head", "Router", "MoE"):
                by_module[full] = {"Head": "head", "Router": "router", "MoE": "expert"}[
                    type(module).__name__
                ]
            else:
                by_module[full] = "attention" if ".attn." in full else "mlp"
    if config.tie_word_embeddings:
        del by_module["head.weight"]
    assert kinds == by_module
    expected = {"embedding", "norm", "attention"}
    expected |= {"router", "expert"} if config.moe_layers else {"mlp"}
    assert expected <= set(kinds.values())


def test_unknown_parameter_is_refused() -> None:
    model = build_model(tiny_config("olmoe"))
    model.temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="temperature is of no known kind"):
        parameter_kinds(model)


# ------------------------------------------------------------------------------------- execution


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe"])
def test_recomputation_changes_no_bit(case: str, mode: str) -> None:
    model = build_model(tiny_config(case))
    documents = Documents.from_lengths([5, 11, 16])
    loss, gradients, stats = step(model, documents)
    apply_checkpointing(model, mode)
    again, others, counted = step(model, documents)
    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name
    assert torch.equal(stats.counts_E, counted.counts_E)
    assert torch.equal(stats.tokens, counted.tokens)


def test_recomputation_keeps_less() -> None:
    model = build_model(tiny_config("qwen3_moe", num_hidden_layers=4))
    kept = {}
    own = {p.data_ptr() for p in model.parameters()}
    for mode in ("none", "selective", "full"):
        apply_checkpointing(model, mode)
        storages: dict[int, int] = {}

        def pack(tensor, storages=storages):
            if tensor.data_ptr() not in own:
                storages[tensor.data_ptr()] = tensor.numel() * tensor.itemsize
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            tokens_BL = tokens(model.config, 2, 32)
            out = model(tokens_BL, labels_BL=next_tokens(tokens_BL))
        kept[mode] = sum(storages.values())
        del out
    assert kept["full"] < 0.35 * kept["none"]
    assert kept["full"] < kept["selective"] < 0.9 * kept["none"]


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'some' is unknown; allowed: none, full, selective"):
        apply_checkpointing(build_model(tiny_config("olmoe")), "some")


@pytest.mark.parametrize(
    ("mode", "backend"),
    [
        ("selective", "eager"),
        pytest.param("none", "aot_eager", marks=pytest.mark.slow),
        pytest.param("selective", "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_do_not_recompile_for_documents(mode: str, backend: str) -> None:
    """Any number of documents runs the same code; names and numbers stay."""
    config = tiny_config("mixtral", num_hidden_layers=1, num_experts=4)
    plain, model = build_model(config), build_model(config)
    apply_checkpointing(model, mode)
    names = list(model.state_dict())
    torch._dynamo.reset()
    compile_blocks(model, backend=backend)
    assert list(model.state_dict()) == names
    packings = [[5, 11, 16], [16, 16], [1] * 7 + [9, 16], [3, 13, 8, 8]]
    compiled_after_first = None
    for lengths in packings:
        documents = Documents.from_lengths(lengths)
        loss, gradients, stats = step(model, documents)
        expected, reference, counted = step(plain, documents)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, reference[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(stats.counts_E, counted.counts_E)
        total = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if compiled_after_first is None:
            compiled_after_first = total
        assert total == compiled_after_first > 0, lengths
    # nor does text compile anything, although it grows with every token
    new = list(generate(model, [[5, 6]], max_new_tokens=5))
    assert new == list(generate(plain, [[5, 6]], max_new_tokens=5))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled_after_first
    torch._dynamo.reset()


def test_every_change_of_the_routing_may_be_compiled() -> None:
    """Training, the counting pass and evaluation, for each; past the limit PyTorch goes on slowly
    without a word of ours."""
    router = RouterConfig(
        top_k={"kind": "linear", "start": 6, "over": 0.5, "soft": True},
        selection={"kind": "ema", "decay": 0.9},
        freeze_at=31,
        end_steps=20,
    )
    config = tiny_config("mixtral", num_hidden_layers=1, num_experts=8, num_experts_per_tok=2)
    with torch._dynamo.config.patch(recompile_limit=8):  # monkeypatch's undo would delete it
        model = build_model(config, router=router, steps=60)
        changes = model.layers[0].moe.router.changes
        assert changes == 4 + 1 + 2, "each K, the end of fading, frozen, no average"
        compile_blocks(model, changes=changes)
        assert torch._dynamo.config.recompile_limit == 8 + 3 * 7


def test_compiling_does_not_choose_by_timing_what_changes_sums(monkeypatch) -> None:
    monkeypatch.setattr(torch._inductor.config, "deterministic", False)
    compile_blocks(build_model(tiny_config("qwen3_moe")), backend="eager")
    assert torch._inductor.config.deterministic
