"""What the `parallel` section means for a number of processes, before any of them starts."""

import dataclasses
import math
import re

import pytest
import yaml

import train
from parallel.config import AllGather, AllToAll, Pairwise
from parallel.mesh import plan_mesh
from parallel.offload import Offload
from scripts import verify
from training.config.build import ConfigError, load_config, make_plan
from training.estimate import cost
from training.estimate.counts import held, parameter_counts


def plan(path, *words: str, world: int = 4, hosts: int = 1):
    return make_plan(
        load_config(path, ["train.global_batch_size=24", "train.micro_batch_size=1", *words]),
        world,
        cuda=False,
        hosts=hosts,
    )


def test_defaults_shard_over_the_host_and_split_experts_where_it_pays(tiny_config):
    one, host, two = (
        plan(tiny_config, world=1),
        plan(tiny_config),
        plan(tiny_config, hosts=2),
    )
    assert (one.engine, one.mesh.world) == ("local", 1)
    assert (host.engine, host.mesh.nodes, host.mesh.local, host.mesh.expert) == ("fsdp2", 1, 4, 1)
    assert (two.mesh.nodes, two.mesh.local, two.mesh.expert) == (2, 2, 1)  # few, small experts
    assert two.exchange == AllToAll()


def test_every_setting_arrives(tiny_config):
    words = ["parallel.nodes=2", "parallel.expert=2", "parallel.expert_placement=within_node"]
    mesh = plan(tiny_config, *words).mesh
    assert (mesh.nodes, mesh.local, mesh.expert, mesh.placement) == (2, 2, 2, "within_node")
    for word, exchange in (
        ("chunks=3", AllToAll(chunks=3)),
        ("kind=pairwise", Pairwise()),
        ("kind=all_gather", AllGather()),
        ("payload=float8", AllToAll(payload="float8")),
    ):
        found = plan(tiny_config, "parallel.nodes=4", f"parallel.exchange.{word}")
        assert found.exchange == exchange
    pytest.importorskip("deepspeed")
    for word in ("parallel.engine=deepspeed", "parallel.offload.kind=cpu"):
        assert plan(tiny_config, word).engine == "deepspeed"
    words = ["parallel.offload={kind: cpu, states: false, weights: true}"]
    assert plan(tiny_config, *words).offload == Offload(weights="cpu")
    words = ["parallel.offload.kind=nvme", "parallel.offload.path=/disk"]
    assert plan(tiny_config, *words).offload == Offload("nvme", path="/disk")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("parallel.nodes=3", "parallel.nodes=3 does not divide the 4 processes; allowed: 1, 2, 4"),
        ("parallel.nodes=4 parallel.expert=3", "parallel.expert=3 does not divide parallel.nodes"),
        ("parallel.expert=4", "allowed: 1 (or parallel.expert_placement=within_node)"),
        ("parallel.nodes=4 parallel.expert=4 model.num_experts=6", "does not divide num_experts=6"),
        ("parallel.engine=zero", "parallel.engine='zero'"),
        (
            "parallel.engine=fsdp2 parallel.offload.kind=cpu",
            "parallel.offload.kind=cpu alone needs parallel.engine=deepspeed",
        ),
        ("parallel.offload.kind=true", "parallel.offload.kind=true is unknown; allowed: cpu, nvme"),
        ("parallel.offload.kind=nvme", "parallel.offload.path is missing"),
        (
            "parallel.offload.kind=nvme parallel.offload.path=''",
            "parallel.offload.path='' must name a folder on a local disk",
        ),
        ("parallel.offload.path=x", "parallel.offload.kind is missing; allowed with path: nvme"),
        (
            "parallel.offload.kind=cpu parallel.offload.states=false",
            "parallel.offload.states=false and weights=false leave nothing to offload",
        ),
        (
            "parallel.exchange.chunks=3",
            "parallel.exchange.chunks=3 has no effect while the experts are not split",
        ),
        (
            "parallel.nodes=4 parallel.exchange.transport=pull",
            "parallel.exchange.transport=pull needs CUDA devices",
        ),
        (
            "parallel.nodes=4 parallel.exchange.kind=pairwise parallel.exchange.chunks=2",
            "parallel.exchange.chunks=2 is no key of kind pairwise, which has payload; it is one",
        ),
        (
            "parallel.nodes=4 parallel.exchange.kind=all_gather router.rounding.to=nearest "
            "router.rounding.tile=4",
            "parallel.exchange.kind=all_gather does not go with router.rounding",
        ),
        (
            "parallel.nodes=4 parallel.exchange.sizes=bounded router.rounding.to=nearest "
            "router.rounding.tile=4",
            "parallel.exchange.sizes=bounded does not go with router.rounding",
        ),
        ("parallel.nodes=0", "parallel.nodes=0"),
        ("parallel.expret=2", "did you mean parallel.expert"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tiny_config, words, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        plan(tiny_config, *words.split())
    assert "\n" not in str(refused.value)


def test_one_node_may_not_span_hosts(tiny_config):
    with pytest.raises(ConfigError, match=r"parallel\.nodes=1 on 2 hosts .*allowed: 2, 4"):
        plan(tiny_config, "parallel.nodes=1", hosts=2)


def test_a_layout_that_cannot_be_ends_with_2_before_any_process_joins(
    tiny_config, monkeypatch, capsys
):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(train, "start", lambda *_: pytest.fail("joined the others"))
    code = train.main([str(tiny_config), "train.micro_batch_size=1", "parallel.nodes=3"])
    told = capsys.readouterr().err
    assert code == 2 and told.count("\n") == 1 and "parallel.nodes=3" in told


@pytest.mark.parametrize("below", ["text", "text/disk"])
def test_a_folder_that_cannot_be_is_refused_before_a_model_is_built(
    tiny_config, tmp_path, monkeypatch, capsys, below
):
    (tmp_path / "text").write_text("a file, no folder")
    path = str(tmp_path / below)

    def planned(*arguments, **options):  # one that needs no DeepSpeed
        plan = make_plan(*arguments, **options)
        return dataclasses.replace(plan, offload=Offload("nvme", path=path))

    for program in (train, verify):
        monkeypatch.setattr(program, "make_plan", planned)
    monkeypatch.setattr(train, "start", lambda *_: pytest.fail("joined the others"))
    monkeypatch.setattr(verify, "run_processes", lambda *_, **__: pytest.fail("started processes"))
    for main, words in ((train.main, []), (verify.main, ["--nproc", "2", "run.device=cpu"])):
        try:
            code = main([str(tiny_config), *words])
        except SystemExit as stop:
            code = stop.code
        told = capsys.readouterr().err
        assert code == 2 and told.count("\n") == 1, told
        assert f"parallel.offload.path={path!r} cannot be used" in told
        assert "allowed: a folder on a local disk that can be made and written" in told


def test_a_folder_to_offload_to_is_made(tmp_path):
    Offload("nvme", path=str(tmp_path / "new" / "disk")).check_folder()
    assert list((tmp_path / "new" / "disk").iterdir()) == []
    Offload().check_folder()


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_c17_an_engine_that_is_named_is_used_by_one_process(tiny_config, engine):
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    both = ("parallel.offload.kind=cpu", "parallel.offload.weights=true")
    assert plan(tiny_config, world=1).engine == "local"
    assert plan(tiny_config, f"parallel.engine={engine}", world=1).engine == engine
    assert plan(tiny_config, f"parallel.engine={engine}", *both, world=1).engine == engine
    with pytest.raises(ConfigError, match=r"parallel\.offload\.kind=cpu needs an engine"):
        plan(tiny_config, *both, world=1)
    for word in (
        "train.sparsity.density=0.5",
        "optim.storage.moments=bfloat16",
        "train.cuda_graph=true",
    ):
        with pytest.raises(ConfigError, match=f"parallel.engine={engine}"):
            plan(tiny_config, f"parallel.engine={engine}", word, world=1)


@pytest.mark.parametrize(
    ("words", "world", "micro", "accumulation"),
    [
        (["train.global_batch_size=4"], 1, 4, 1),  # the default of 8 is the most
        (["train.global_batch_size=20"], 1, 5, 4),
        (["train.global_batch_size=7", "train.micro_batch_size=3"], 1, 1, 7),
        (["train.global_batch_size=7", "train.micro_batch_size=3"], 2, 2, 2),  # 4 rows and 3
        (["train.global_batch_size=32"], 3, 1, 11),
    ],
)
def test_d6_the_micro_batch_is_the_largest_divisor_of_a_process_s_rows(
    tiny_config, tmp_path, words, world, micro, accumulation
):
    values = yaml.safe_load(tiny_config.read_text())
    del values["train"]["micro_batch_size"]
    (tmp_path / "unset.yaml").write_text(yaml.safe_dump(values))
    found = make_plan(load_config(tmp_path / "unset.yaml", words), world, cuda=False)
    assert (found.micro_batch_size, found.accumulation) == (micro, accumulation)


@pytest.mark.parametrize("placement", ["across_nodes", "within_node"])
@pytest.mark.parametrize("name", ["olmoe_1b_7b", "qwen3_30b_a3b", "quickstart"])
def test_d7_the_default_layout_is_the_fastest_of_the_cost_model(name, placement):
    """32 GPUs on 4 hosts: neither the largest degree, as it was, nor always the same."""
    config = load_config(
        f"configs/{name}.yaml",
        [f"parallel.expert_placement={placement}", "train.global_batch_size=128"],
    )
    found = make_plan(config, 32, cuda=True, hosts=4)
    model, tokens = config.model.config, found.micro_batch_size * config.data.seq_len
    seconds = {}
    for degree in found.mesh.degrees:
        mesh = dataclasses.replace(found.mesh, expert=degree)
        spent = cost.step_cost(
            model, mesh, cost.Machine(), tokens, config.data.seq_len, found.accumulation
        )
        seconds[degree] = spent.best + spent.worst
    assert found.mesh.expert == min(seconds, key=seconds.get)
    if placement == "across_nodes":
        expected = {"quickstart": 1, "olmoe_1b_7b": 2, "qwen3_30b_a3b": 4}
        assert found.mesh.expert == expected[name]


def test_d7_a_layout_that_does_not_fit_is_not_taken(tiny_config):
    """Of three degrees, with room for the states of one, of two, and of none."""
    model = load_config("configs/qwen3_30b_a3b.yaml").model.config
    plans = [plan_mesh(16, 4, degree, num_experts=model.num_experts) for degree in (1, 2, 4)]
    counts = parameter_counts(model)
    sizes = [cost.STATE_BYTES * held(counts, plan) for plan in plans]
    assert sizes[0] > sizes[1] > sizes[2]
    for most, degree in ((sizes[0], 2), (sizes[1], 2), (sizes[2], 4), (sizes[2] / 2, 4)):
        memory = math.ceil(most / cost.STATE_SHARE) + 1
        assert cost.fastest(plans, model, 16384, 4096, 1, memory).expert == degree


def test_d7_settings_of_the_exchange_have_a_layout_with_one(tiny_config):
    assert plan(tiny_config, "parallel.nodes=4").mesh.expert == 1
    assert (
        plan(tiny_config, "parallel.nodes=4", "parallel.exchange.kind=all_gather").mesh.expert > 1
    )


def test_split_experts_are_compiled_only_where_it_is_asked_for(tiny_config):
    """Not by `auto` on a GPU, nor where an engine's hooks would cut the blocks, nor in one
    process."""

    def compiled(*words: str, world: int = 4, cuda: bool = False) -> tuple[bool, bool]:
        found = make_plan(load_config(tiny_config, [*words]), world, cuda=cuda)
        return found.compile, found.whole_blocks

    assert compiled("train.compile=true") == (True, True)
    assert compiled("run.device=cuda", cuda=True) == (True, False)
    assert compiled("train.compile=true", world=1) == (True, False)
    assert compiled("train.compile=false") == (False, False)
    pytest.importorskip("deepspeed")
    assert compiled("train.compile=true", "parallel.engine=deepspeed") == (True, False)
