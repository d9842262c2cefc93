"""Parameter counts against public numbers, memory against what the real code allocates."""

import functools
import gc
from pathlib import Path

import pytest
import torch
import yaml

import training.estimate.memory
from models.build import build_model, parameter_kinds
from models.config import ModelConfig
from models.documents import Documents
from models.execution import compile_blocks
from parallel.engines.local import LocalEngine
from tests.engines import local_engine
from training.config.build import load_config, make_plan
from training.device import PEAK_FLOPS
from training.estimate.counts import active_parameters, parameter_counts
from training.estimate.memory import activation_bytes, checkpoint_bytes, process_memory
from training.estimate.replay import Allocations, replay
from training.estimate.speed import BANDWIDTH, step_seconds
from training.optim.groups import parameter_groups

SMALL = ModelConfig(
    family="qwen3_moe",
    vocab_size=640,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    max_position_embeddings=256,
)


@pytest.fixture
def estimate(script):
    return script("estimate")


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # Model cards: OLMoE "1.3B active, 6.9B total"; Qwen3-30B-A3B "30.5B, 3.3B activated";
        # Mixtral "46.7B total parameters but only uses 12.9B parameters per token".
        ("olmoe_1b_7b", 6.9e9, 1.3e9),
        ("qwen3_30b_a3b", 30.5e9, 3.3e9),
        ("mixtral_8x7b", 46.7e9, 12.9e9),
        ("tessera_1b_a200m", 1.0e9, 0.2e9),
        ("deepseek_v3_2b", 1.83e9, 0.34e9),
    ],
)
def test_parameters_are_those_of_the_model_cards(name, total, active):
    config = load_config(f"configs/{name}.yaml")
    counts = parameter_counts(config.model.config)
    digits = 100e6 / 2 if total < 40e9 else 50e6
    assert sum(counts.values()) == pytest.approx(total, abs=digits)
    assert active_parameters(config.model.config, counts) == pytest.approx(active, abs=60e6)


def write(tmp_path, **train):
    path = tmp_path / "small.yaml"
    values = {"model": SMALL.model_dump(exclude_none=True), "data": {"seq_len": 128}}
    settings = {"steps": 200, "global_batch_size": 8, "micro_batch_size": 4}
    path.write_text(yaml.safe_dump({**values, "train": settings | train}))
    return path


@pytest.mark.parametrize(
    ("dtype", "narrow"),
    [("float32", []), ("bfloat16", []), ("bfloat16", ["weights"]), ("bfloat16", ["moments"])],
)
def test_states_are_the_optimizers_buffers(tmp_path, dtype, narrow, monkeypatch):
    monkeypatch.setattr(training.estimate.memory, "activation_bytes", lambda config, plan: 0)
    rows = 8 if "moments" in narrow else 4  # one micro-batch in a step, or two
    words = [f"train.dtype={dtype}", *(f"optim.storage.{kind}=bfloat16" for kind in narrow)]
    words.append(f"train.micro_batch_size={rows}")
    config = load_config(write(tmp_path), words)
    memory = process_memory(config, make_plan(config, cuda=False))
    model = build_model(SMALL, dtype=getattr(torch, dtype))
    groups = parameter_groups(model, parameter_kinds(model), weight_decay=0.1)
    plan = make_plan(config, cuda=False)
    states = {"storage": dict.fromkeys(narrow, "bfloat16")}
    optimizer = local_engine(groups, accumulates=plan.accumulation > 1, **states)
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    weights = sum(storages.values())
    moments = sum(state.nbytes for flat in optimizer.flats for state in flat.states.values())
    masters = sum(flat.master.nbytes for flat in optimizer.flats if flat.copy is not None)
    assert memory.weights == weights
    assert memory.moments == moments
    assert memory.masters == masters
    assert memory.gradients == optimizer.gradient.nbytes
    assert memory.context == 0


def test_states_of_muon_are_one_for_a_matrix_and_two_for_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(training.estimate.memory, "activation_bytes", lambda config, plan: 0)
    config = load_config(write(tmp_path), ["optim.kind=muon"])
    memory = process_memory(config, make_plan(config, cuda=False))
    model = build_model(SMALL)
    groups = parameter_groups(model, parameter_kinds(model), weight_decay=0.1, by_matrix=True)
    engine = LocalEngine(model, groups, config.optim, num_terms=1)
    states = [value for name, value in engine.parts().items() if not name.startswith("weights/")]
    held = {flat.group.name: sum(s.nbytes for s in flat.states.values()) for flat in engine.flats}
    assert memory.moments == sum(held.values())
    assert checkpoint_bytes(config, "float32") == sum(
        value.nbytes for value in [*states, *(p.detach() for p in model.parameters())]
    )


def test_states_of_several_processes_are_those_of_the_engine(tmp_path, monkeypatch):
    """4 nodes of 2, experts over 4: an eighth of the experts, half of the rest, routers whole."""
    monkeypatch.setattr(training.estimate.memory, "activation_bytes", lambda config, plan: 0)
    config = load_config(write(tmp_path), ["train.micro_batch_size=1", "train.dtype=bfloat16"])
    memory = process_memory(config, make_plan(config, 8, cuda=False, hosts=4))
    kinds = parameter_kinds(model := build_model(SMALL, device="meta"))
    share = {"expert": 8, "router": 1}
    held = sum(p.numel() / share.get(kinds[name], 2) for name, p in model.named_parameters())
    assert memory.masters == pytest.approx(4 * held, rel=1e-3)
    assert memory.moments == 2 * memory.masters
    assert memory.masters < memory.gradients < 2 * memory.masters
    pytest.importorskip("deepspeed")
    words = ["train.micro_batch_size=1", "train.dtype=bfloat16", "parallel.offload.kind=cpu"]
    files = ["parallel.offload={kind: nvme, states: false, weights: true, path: /disk}"]
    moved, both = load_config(write(tmp_path), words), load_config(write(tmp_path), words + files)
    moved = process_memory(moved, make_plan(moved, 8, cuda=False, hosts=4))
    both = process_memory(both, make_plan(both, 8, cuda=False, hosts=4))
    assert moved.masters == moved.moments == moved.disk == 0
    assert moved.host == pytest.approx(20 * held, rel=1e-3)
    assert memory.gradients - moved.gradients == pytest.approx(4 * held, rel=1e-3)
    # DeepSpeed's own part of the weights, in bfloat16, is on the device or in a file.
    assert both.host == 0 and both.disk == pytest.approx(2 * held, rel=1e-3)
    assert moved.weights - both.weights == both.disk and both.weights == memory.weights


def test_rows_of_other_ranks_count_where_all_are_sent(tmp_path):
    words = ["train.micro_batch_size=1", "train.dtype=bfloat16", "parallel.expert=4"]
    memories = []
    for more in (
        [],
        ["parallel.exchange.kind=all_gather"],
        ["parallel.exchange.kind=all_gather", "model.save=x"],
    ):
        config = load_config(write(tmp_path), words + more)
        memories.append(process_memory(config, make_plan(config, 8, cuda=False, hosts=4)))
    plain, whole, lean = memories
    tokens = 3 * config.data.seq_len  # of three other ranks
    rows = len(SMALL.moe_layers) * tokens * SMALL.hidden_size * 2
    h = len(SMALL.moe_layers) * tokens * SMALL.num_experts_per_tok
    assert whole.activations - plain.activations == rows + h * 2 * SMALL.moe_intermediate_size * 2
    assert lean.activations < whole.activations


def test_room_for_all_that_can_be_sent_counts_where_sizes_are_bounded(tmp_path, monkeypatch):
    """2 of 8 experts over 4 ranks, 128 tokens: 256 pairs are a rank's own. Without a limit there
    is room for 256 from each of four; with one of 1.25 for two experts of 40 each."""
    monkeypatch.setattr(training.estimate.memory, "activation_bytes", lambda config, plan: 0)
    words = ["train.micro_batch_size=1", "train.dtype=bfloat16", "parallel.expert=4"]
    found = []
    for more in ([], ["router.capacity.factor=1.25", "router.end_steps=10"]):
        config = load_config(write(tmp_path), [*words, "parallel.exchange.sizes=bounded", *more])
        found.append(process_memory(config, make_plan(config, 8, cuda=False, hosts=4)).activations)
    layers = len(SMALL.moe_layers)
    pair, row = 2 * SMALL.moe_intermediate_size * 2, SMALL.hidden_size * 2
    assert found[0] == layers * ((4 * 256 - 256) * pair + 3 * 128 * row)
    assert found[1] == layers * ((4 * 80 - 256) * pair + 3 * 80 * row)


@pytest.mark.parametrize("name", ["olmoe_1b_7b", "mixtral_8x7b", "qwen3_30b_a3b"])
def test_rows_of_other_ranks_are_as_wide_as_the_experts_of_each_family(name, monkeypatch):
    """olmoe and mixtral have no `moe_intermediate_size`."""
    monkeypatch.setattr(training.estimate.memory, "activation_bytes", lambda config, plan: 0)
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    words = ["parallel.exchange.kind=all_gather", "train.dtype=float32", "parallel.expert=4"]
    config = load_config(f"configs/{name}.yaml", words)
    plan = make_plan(config, 8, cuda=False, hosts=4)
    model, tokens = config.model.config, 3 * plan.micro_batch_size * config.data.seq_len
    layers = 1 if config.train.checkpointing == "full" else len(model.moe_layers)
    values = 2 * model.expert_size * model.num_experts_per_tok + model.hidden_size
    assert process_memory(config, plan).activations == 4 * layers * tokens * values


def saved_bytes(config: ModelConfig, rows: int, seq_len: int, **options) -> int:
    """What autograd really keeps of one forward pass, on the CPU."""
    model = build_model(config, kernels="reference", save=options.get("save", "h"))
    if options.get("compiled"):
        compile_blocks(model, backend="aot_eager_decomp_partition")
    seen: dict[int, tuple[int, torch.Tensor]] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept, so that it stays alone
        return tensor

    tokens_BL = torch.randint(0, config.vocab_size, (rows, seq_len))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        documents = Documents.from_lengths([seq_len] * rows)
        valid_BL = torch.ones_like(tokens_BL, dtype=torch.bool)
        model(tokens_BL, labels_BL=tokens_BL, documents=documents, valid_BL=valid_BL)
    return sum(size for size, _ in seen.values())


@functools.cache
def replayed(layers: int, rows: int = 4, dtype=torch.float32, save="h", **options) -> int:
    config = ModelConfig(**{**SMALL.model_dump(), "num_hidden_layers": layers})
    kept = {"save": save}
    return replay(config, rows=rows, seq_len=128, dtype=dtype, options=kept, **options)


def test_memory_of_a_layer_is_what_autograd_keeps_of_it():
    def saved(layers):
        config = ModelConfig(**{**SMALL.model_dump(), "num_hidden_layers": layers})
        return saved_bytes(config, 4, 128)

    assert replayed(3) - replayed(2) == pytest.approx(saved(3) - saved(2), rel=0.02)
    assert replayed(2) > saved(2), "the peak holds more than what is kept"


BFLOAT16 = [
    "optim.storage.weights=bfloat16",
    "optim.storage.moments=bfloat16",
    "train.checkpointing=none",
]
FOUR_ROWS = ["train.micro_batch_size=4", "train.global_batch_size=4"]


OLMOE = [*BFLOAT16, "train.micro_batch_size=8", "train.global_batch_size=8"]
QWEN3 = [*BFLOAT16, *FOUR_ROWS, "model.num_hidden_layers=8"]
EAGER = "train.compile=false"


@pytest.mark.parametrize(
    ("name", "words", "gib"),
    [
        ("tessera_1b_a200m", ["train.global_batch_size=64"], 29.75),
        ("tessera_1b_a200m", ["train.global_batch_size=16"], 25.96),
        ("tessera_1b_a200m", ["train.global_batch_size=16", EAGER], 28.46),
        ("olmoe_1b_7b", OLMOE, 78.18),
        ("olmoe_1b_7b", [*OLMOE, EAGER], 85.55),
        ("olmoe_1b_7b", ["train.global_batch_size=8"], 125.6),
        ("qwen3_30b_a3b", QWEN3, 43.58),
        ("qwen3_30b_a3b", [*QWEN3, EAGER], 45.77),
    ],
)
def test_a5_peaks_are_those_measured_on_one_h200(name, words, gib):
    """Of scripts/bench/train.py and of scripts/estimate.py --measure."""
    config = load_config(f"configs/{name}.yaml", words)
    memory = process_memory(config, make_plan(config, cuda=True))
    assert (memory.total - memory.context) / 2**30 == pytest.approx(gib, rel=0.03)


GLOBAL = ["train.global_batch_size=64", "router.balance.kind=global", "model.kernels=triton"]


@pytest.mark.parametrize(
    ("name", "words", "document", "speed"),
    [
        ("olmoe_1b_7b", OLMOE, 2389, 60.8e3),
        ("olmoe_1b_7b", [*OLMOE, EAGER], 2389, 49.5e3),
        ("olmoe_1b_7b", ["train.global_batch_size=8"], 2389, 49.1e3),
        ("qwen3_30b_a3b", QWEN3, 2183, 80.9e3),
        ("qwen3_30b_a3b", [*QWEN3, EAGER], 2183, 67.6e3),
        ("tessera_1b_a200m", GLOBAL, 1523, 252e3),  # of older code
        ("quickstart", [], None, 41e3),
    ],
)
def test_a5_speed_is_that_measured_on_one_h200(name, words, document, speed):
    """Each part at its rate; `document` is what the rows of scripts/bench/train.py have."""
    config = load_config(f"configs/{name}.yaml", words)
    plan = make_plan(config, cuda=True)
    seconds = sum(step_seconds(config, plan, "H200", document).values())
    assert plan.tokens_per_step / seconds == pytest.approx(
        speed, rel=0.1 if "tess" in name else 0.06
    )


def test_a5_speed_follows_what_a_step_does():
    def parts(*words, card="H200", gpus=1, document=None):
        config = load_config("configs/olmoe_1b_7b.yaml", ["train.global_batch_size=16", *words])
        return step_seconds(config, make_plan(config, gpus, cuda=True), card, document)

    plain = parts()
    attention = {n: parts(document=n)["attention"] for n in (100, 1000, 10_000)}
    assert (
        attention[10_000] == plain["attention"] == pytest.approx(4.09 * attention[1000], rel=0.01)
    )
    assert plain["attention"] > 40 * attention[100]
    h100, a100 = parts(card="H100"), parts(card="A100")
    assert h100["experts"] == plain["experts"] and h100["AdamW"] > 1.4 * plain["AdamW"]
    assert a100["dense products"] == pytest.approx(989 / 312 * plain["dense products"])
    assert a100["experts"] > 989 / 312 * plain["experts"], "with Triton's kernels"
    full, none = (parts(f"train.checkpointing={mode}") for mode in ("full", "none"))
    assert full["experts"] > 1.25 * plain["experts"] == 1.25 * none["experts"]
    assert none["norms and rotations"] < plain["norms and rotations"]
    assert parts("model.save=x")["experts"] > 1.1 * plain["experts"]
    counted = parts("router.balance.kind=global")
    assert counted["experts"] == full["experts"] and counted["AdamW"] == plain["AdamW"]
    half = parts(gpus=2, card="H200")
    assert half["AdamW"] == pytest.approx(plain["AdamW"] / 2, rel=0.01)
    assert half["experts"] == pytest.approx(plain["experts"] / 2)
    assert parts("train.dtype=float32") is None and parts("model.kernels=reference") is None


def test_a5_every_card_of_the_table_has_a_bandwidth():
    assert [name for name, _ in PEAK_FLOPS if name not in BANDWIDTH] == []


def test_a5_a_compiled_block_keeps_what_the_compiler_keeps():
    """The saved tensors of torch.compile with the partitioner of its default backend."""
    config = ModelConfig(**{**SMALL.model_dump(), "num_hidden_layers": 3})

    def kept(layers):
        small = ModelConfig(**{**config.model_dump(), "num_hidden_layers": layers})
        return saved_bytes(small, 4, 128, compiled=True)

    compiled = replayed(3, compiled=True) - replayed(2, compiled=True)
    assert compiled == pytest.approx(kept(3) - kept(2), rel=0.02)
    assert compiled < 0.8 * (replayed(3) - replayed(2))


def test_a5_gradients_count_while_they_exist():
    """They come to be while activations go: one that stays adds to the peak only at its end."""
    passing, kept = (
        replayed(3, rows=rows, dtype=torch.bfloat16, keep_gradients=keep)
        for rows, keep in ((4, False), (4, True))
    )
    gradients = 2 * sum(p.numel() for p in build_model(SMALL, device="meta").parameters())
    assert kept < passing + gradients / 2
    small = replayed(3, rows=1, dtype=torch.bfloat16, keep_gradients=True)
    assert small > 0.9 * gradients


def test_memory_is_that_of_the_routing_of_the_run(tmp_path):
    """Of the first step, which may have more experts per token; rounding needs slots."""

    def peak(*words):
        config = load_config(write(tmp_path), list(words))
        return activation_bytes(config, make_plan(config, cuda=False))

    plain = peak()
    k = SMALL.num_experts_per_tok + 1
    falling = peak("router.top_k.kind=linear", f"router.top_k.start={k}")
    assert falling == pytest.approx(peak(f"model.num_experts_per_tok={k}"), rel=0.02)
    assert falling > 1.05 * plain
    words = ["router.rounding.to=up", "router.rounding.tile=16", "router.rounding.min_mean_tiles=0"]
    assert peak(*words, "router.noise.kind=jitter", "router.noise.size=0.1") > 1.02 * plain


def test_recomputing_and_smaller_batches_need_less():
    none = replayed(2)
    selective = replayed(2, checkpointing="selective")
    full = replayed(2, checkpointing="full")
    assert none > 1.1 * selective > 1.1 * full
    assert replayed(2, save="x") < 0.95 * none
    assert replayed(2, rows=1) < 0.4 * none


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("save", ["h", "x", "fp8_h"])
def test_a5_whatever_is_kept_needs_less_when_compiled(checkpointing, save):
    options = {"checkpointing": checkpointing, "save": save, "gpu": True, "dtype": torch.bfloat16}
    compiled, eager = replayed(3, compiled=True, **options), replayed(3, **options)
    assert 0.4 * eager < compiled <= eager


def test_allocations_counts_storages_while_they_live():
    with Allocations() as allocations:
        a = torch.zeros(1000)
        b = a.view(10, 100)[2:]
        assert allocations.now == 4000
        c = a + 1
        assert (allocations.now, allocations.peak) == (8000, 8000)
        del a, b
        gc.collect()
        assert (allocations.now, allocations.peak) == (4000, 8000)
        del c


def test_verdict_and_exit_code(tmp_path, estimate, capsys, monkeypatch):
    # The replay is tested above; here a row takes 100 MiB, and a fifth of that when recomputed.
    def rows(config, plan):
        share = 1 if config.train.checkpointing == "none" else 0.2
        return int(config.train.micro_batch_size * share * 100 * 2**20)

    monkeypatch.setattr(training.estimate.memory, "activation_bytes", rows)
    path = str(write(tmp_path))
    assert estimate.main([path, "--gpu-memory", "8", "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert "fits: 1.4 GiB, within 95% of 8 GiB" in text, "1 GiB of context, 4 rows"
    assert "work, on 2 x H100, whatever this machine has" in text and "tokens per second" in text
    assert "accumulation 1" in text and "extrapolated from H200; MFU" in text
    assert "communication not counted" in text
    assert estimate.main([path, "--gpu", "h200", "--document", "20"]) == 0
    assert "rates measured on one H200; MFU" in capsys.readouterr().out
    assert estimate.main([path, "--mfu", "0.4"]) == 0
    assert "assuming 40% of 989 TFLOP/s" in capsys.readouterr().out
    assert estimate.main([path, "train.dtype=float32"]) == 0
    assert "give --mfu" in capsys.readouterr().out
    assert estimate.main([path, "--gpu-memory", "0.9", "model.save=x"]) == 1
    text = capsys.readouterr().out
    assert "does not fit: 1.0 GiB, more than 95% of 0.9 GiB" in text
    assert "fits with train.checkpointing=selective: 0.7 GiB" in text
    assert estimate.main([path, "--gpu-memory", "0.63"]) == 1
    assert "lower data.seq_len" in capsys.readouterr().out
    wide = "model.moe_intermediate_size=40_000"
    assert estimate.main([path, wide, "--gpu-memory", "2"]) == 1
    assert "weights and optimizer take" in capsys.readouterr().out
    assert estimate.main([path, "--gpu-memory", "0.5"]) == 1
    assert "(a fixed guess) 0.59 GiB: no setting changes the guess" in capsys.readouterr().out
    assert estimate.main([path]) == 0
    assert "give --gpu-memory" in capsys.readouterr().out
    assert estimate.main([path, "run.device=cpu"]) == 0
    text = capsys.readouterr().out
    assert "H100" not in text and "tokens per second" not in text and "FLOPs per token" in text
    assert "no peak is known of a CPU" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "1000"], "the 1000 processes"),
        (["--hosts", "0"], "--hosts: 0 must be at least 1"),
        (["--gpu-memory", "-5"], "--gpu-memory: -5 must be above 0"),
        (["--gpu", "Z9"], "--gpu: 'Z9' is not in the table"),
        (["train.step=3"], "did you mean train.steps?"),
        (["--document", "0"], "--document: 0 must be at least 1"),
        (["--mfu", "30"], "--mfu: 30 must be above 0"),
        (["--measure", "--steps", "0"], "--steps: 0 must be at least 1"),
        (["--measure", "--gpus", "2"], "--gpus=2 must be 1"),
        (["--host-mtbf", "100"], "--host-mtbf needs --save-seconds and --restart-seconds"),
        (
            ["--host-mtbf=100", "--save-seconds=1", "--restart-seconds=9", "run.device=cpu"],
            "--host-mtbf needs --step-seconds",
        ),
    ],
)
def test_mistakes_end_with_code_2(tmp_path, estimate, capsys, monkeypatch, words, message):
    monkeypatch.setattr(training.estimate.memory, "activation_bytes", lambda config, plan: 0)
    with pytest.raises(SystemExit) as caught:
        estimate.main([str(write(tmp_path)), *words])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_a_folder_of_experts_of_different_widths_is_padded(script, tmp_path):
    from models.build import build_model
    from models.hf import export_hf
    from tests.models.test_mixed_widths import config

    model = build_model(config())
    written = export_hf(model, tmp_path / "out")
    own = sum(parameter.numel() for parameter in model.parameters())
    assert written.bytes == 4 * (own + script("estimate").padding(config()))


def test_the_table_of_layouts(estimate, capsys):
    assert estimate.main([*LAYOUTS, "8,32", "--expert", "2,8"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("1 micro-batch(es) of 8192 tokens per GPU, 400 TFLOP/s, 270 GB/s in a")
    placements = [tuple(line.split(" | ")[:3]) for line in lines[2:]]
    assert placements == [
        ("| 8", "within_node", "2"), ("| 8", "within_node", "8"), ("| 32", "across_nodes", "2"),
        ("| 32", "within_node", "2"), ("| 32", "within_node", "8"),
    ]  # fmt: skip


LAYOUTS = ["configs/olmoe_1b_7b.yaml", "--layouts"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["12"], "12 GPUs are no multiple of the 8 in each node"),
        (["16", "--gpus-per-node", "0"], "--gpus-per-node: 0 must be at least 1"),
        (["16", "--inter-node-gbps", "0"], "--inter-node-gbps: 0 must be above 0"),
        (["16", "--expert", "3"], "--expert=3: no layout of 16 GPUs splits 64 experts so"),
    ],
)
def test_a_table_that_would_be_empty_or_of_other_nodes_is_refused(estimate, words, told, capsys):
    with pytest.raises(SystemExit) as stop:
        estimate.main([*LAYOUTS, *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and told in line


FAILING = ["--host-mtbf=2000", "--save-seconds=5", "--restart-seconds=300"]


def test_how_often_to_save(tmp_path, estimate, capsys, monkeypatch):
    """8 hosts that each fail every 2,000 hours: sqrt(2 * 5 s * 250 h) is 3,000 s."""
    monkeypatch.setattr(training.estimate.memory, "activation_bytes", lambda config, plan: 0)
    words = [*FAILING, "--gpus=8", "--hosts=8", "--step-seconds=3", "checkpoint.every_steps=10"]
    assert estimate.main([str(write(tmp_path)), *words]) == 0
    text = capsys.readouterr().out
    lines = {line[2:26].strip(): line for line in text.partition("failures, with")[2].splitlines()}
    assert "2.9  a month, of 8 hosts" in lines["failures"]
    assert "Young's formula: 50m00s" in lines["best interval"]
    assert "0.4%  checkpoint.every_steps=999; " in lines["time lost with it"]
    assert "14.3%  checkpoint.every_steps=10" in lines["time lost as given"], "5 s each 30 s"


def test_layouts_by_measured_times_and_with_failures(estimate, capsys):
    words = ["--device-ms", "100", "--host-ms", "400", "--micro-batches", "2", *FAILING]
    assert estimate.main([*LAYOUTS, "8,16384", "--expert", "1", *words]) == 0
    head, _, _, small, large = capsys.readouterr().out.splitlines()
    assert "100 ms of the GPU and 400 ms of the host each" in head
    cells = [cell.strip() for cell in small.split("|")]
    assert cells[5] == "200 ms", "two micro-batches"
    assert cells[9] == "25%", "the host takes 800 ms"
    lost = [float(line.split("|")[11].strip(" %")) for line in (small, large)]
    assert lost[0] < 0.2 and 10 < lost[1] < 20
