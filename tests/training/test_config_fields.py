"""No dead fields: each one, turned away from its default, gives another plan or an error.

The plan is what `train.py` hands to the parts of a run before and around the first step: it is
prepared for real, on a tiny text; a few parts are replaced by ones that note their arguments.
"""

import ast
import hashlib
import itertools
import re
from pathlib import Path

import pytest
import torch

import train
import training.data.cache
import training.data.loader
from models.config import known_fields
from moe.control import router_losses, routers_of
from moe.types import RouterStats
from parallel import World
from training.config.build import Config, ConfigError, field_names, load_config, make_plan
from training.data.config import DataError
from training.due import due_after
from training.health import HealthCounters
from training.optim.groups import group_table
from training.optim.schedule import learning_rate
from training.report import log_step
from training.report.window import Window
from training.sparsity import Sparsity
from training.surgery.changes import change_experts
from training.surgery.importance import ExpertImportance

ROOT = Path(__file__).resolve().parents[2]


def digest(*tensors) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().double().contiguous().numpy().tobytes())
    return found.hexdigest()


class Told(dict):
    """Arguments of the parts that are replaced."""

    def spy(self, name, result=None):
        def call(*arguments, **keywords):
            self[name] = (arguments, keywords)
            return result

        return call


class SilentLog:
    active = False

    def __init__(self, folder, attempt, step, trackers, config):
        self.trackers = trackers

    def __getattr__(self, name):
        return lambda *arguments, **keywords: None


def plan_of(config: Config, monkeypatch) -> dict:
    """What a run with this config would do, as plain values that can be compared."""
    told = Told()
    real_saver, real_loader = train.Saver, training.data.loader.DataLoader

    def saver(*arguments, **keywords):
        told["saver"] = {key: keywords[key] for key in ("keep_last", "keep_every", "background")}
        return real_saver(*arguments, **keywords)

    def loader(*arguments, **keywords):
        told["workers"] = max(told.get("workers", 0), keywords.get("num_workers", 0))
        keywords["num_workers"] = 0  # none are started
        for key in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            keywords.pop(key, None)
        return real_loader(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(train, "setup_determinism", told.spy("deterministic"))
        patch.setattr(train, "Saver", saver)
        patch.setattr(train, "RunLog", SilentLog)
        patch.setattr(train, "validate", lambda model, sources, **_: {"sources": sources})
        patch.setattr(train, "sample_text", told.spy("sample", "text"))
        patch.setattr(log_step, "draw_plots", told.spy("plots"))
        patch.setattr(training.data.loader, "DataLoader", loader)
        config.run.folder.mkdir(parents=True, exist_ok=True)
        (config.run.folder / "config.yaml").touch()  # of an earlier start
        state = train.prepare(config, make_plan(config, cuda=False), World())
        try:
            return _collect(state, told)
        finally:
            state.data.close()
            state.saver.wait()
            train.release()


def updated(optimizer) -> str:
    """Weights and states after two steps with known gradients."""
    for _ in range(2):
        optimizer.zero_grad()
        for gradient in optimizer.gradients().values():
            gradient.copy_(torch.linspace(-1, 1, gradient.numel()))
        optimizer.step(0.01)
    return digest(*(tensor.float() for tensor in optimizer.parts().values()))


def _collect(state, told) -> dict:
    config, optimizer = state.config, state.train.optimizer
    batch = next(
        state.data.steps(
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            steps=1,
        )
    )[0]
    held_out = train.evaluate(state)["sources"]
    torch.manual_seed(0)
    stats = RouterStats(
        *(
            torch.rand(2, 4) if name.endswith("_E") else torch.rand(2)
            for name in RouterStats._fields
        )
    )
    auxiliary, _ = router_losses(routers_of(state.model), stats, 100)
    weights = digest(*state.model.parameters())
    health = HealthCounters(torch.tensor([[0.0, 3, 0, 0]] * 2), torch.zeros(2), torch.zeros(2))
    state.last_window = Window({}, {}, counts_LE=torch.ones(2, 4), health=health)
    sparsity = state.train.follower(Sparsity)
    importance = state.train.follower(ExpertImportance)
    if importance is not None:  # as after some steps
        importance.importance_LE.copy_(torch.tensor([1.0, 0.1, 1, 1]).expand(2, 4))
        importance.load_LE.copy_(torch.tensor([1.0, 1, 3, 0]).expand(2, 4))
        importance.low_LE.fill_(1.0)
        importance.changed_L.zero_()
    state.train.step = 3
    changed = change_experts(state)
    told.pop("sample", None) if config.eval.sample is None else None
    return {
        "plan": vars(state.plan),
        "folder": str(state.run.folder),
        "steps": state.steps,
        "weights": weights,
        "moe": [block.moe.config for block in state.model.layers],
        "recompute": (state.model.checkpointing, state.model.layers[0].recompute_attention),
        "groups": group_table(optimizer.groups, config.optim, lambda group: ""),
        "states": {name: tensor.dtype for name, tensor in optimizer.tensors().items()},
        "guard": (optimizer.rule.clip_norm, optimizer.guard.spike_factor, optimizer.guard.stop),
        "rates": [learning_rate(config.optim, step, state.steps) for step in range(state.steps)],
        "auxiliary": auxiliary.item(),
        "balance": config.router.balance,
        "due": [due_after(config, step, state.steps) for step in range(1, state.steps + 1)],
        "trackers": state.log.trackers,
        "batch": digest(batch.tokens_BL, batch.labels_BL, batch.positions_BL),
        "held_out": {
            name: [digest(b.tokens_BL) for b in batches] for name, batches in held_out.items()
        },
        "text": state.data.describe(),
        "position": state.data.state_dict(),
        "vocabulary": state.tokenizer.vocab_size,
        "sample": told.get("sample", ((), {}))[0][2:],
        **{key: value for key, value in told.items() if key in ("saver", "workers")},
        "deterministic": "deterministic" in told,
        "buffers": digest(*state.model.buffers()),
        "changed": [(done.dry, done.changes) for done in changed],
        "changed weights": digest(*state.model.parameters()),
        "updated": updated(optimizer),
        "importance": None if importance is None else (importance.how, importance.decay),
        "plots": "plots" in told,
        "masks": sparsity and sparsity.schedule,
    }


EMA = "router.selection.kind=ema router.selection.decay=0.9"
# Words that turn a field away from what the tiny run has; more than one where it needs company.
TURNED = {
    "run.name": "run.name=other",
    "run.dir": "run.dir=elsewhere",
    "run.seed": "run.seed=5",
    "run.resume": "run.resume=never",
    "run.device": "run.device=cuda",
    "run.deterministic": "run.deterministic=true",
    "model.hf_config": "model.hf_config=nowhere",
    "model.init_from": "model.init_from=nowhere",
    "model.kernels": "model.kernels=reference",
    "model.attention": "model.attention=flash4",
    "model.save": "model.save=x",
    "model.init.embedding": "model.init.embedding=0.5",
    "model.init.router": "model.init.router=0.5",
    "model.init.branches": "model.init.branches=by_depth",
    "router.z_coef": "router.z_coef=0.5",
    "router.balance.kind": "router.balance.kind=lagged",
    "router.balance.coef": "router.balance.coef=0.5",
    "router.balance.load": "router.balance.load=flops",
    "router.bias.kind": "router.bias.kind=sign",
    "router.bias.ema": "router.bias.ema=0.5",
    "router.bias.rate": "router.bias.rate=0.5",
    "router.bias.below": "router.bias.below=0.5",
    "router.bias.freeze_at": "router.bias.freeze_at=5",
    "router.bias.calibrate": "router.bias.calibrate=true",
    "router.rounding.to": "router.rounding.to=nearest",
    "router.rounding.tile": "router.rounding.tile=2",
    "router.rounding.min_tiles": "router.rounding.min_tiles=2",
    "router.rounding.max_tiles": "router.rounding.max_tiles=2",
    "router.rounding.min_mean_tiles": "router.rounding.min_mean_tiles=1.5",
    "router.rounding.protect_top1": "router.rounding.protect_top1=true",
    "router.rounding.gates": "router.rounding.gates=rounded",
    "router.rounding.dropped.decay": "router.rounding.dropped.decay=0.5",
    "router.top_k.kind": "router.top_k.kind=linear router.top_k.start=3",
    "router.top_k.start": "router.top_k.start=4",
    "router.top_k.over": "router.top_k.over=0.3",
    "router.top_k.levels": "router.top_k.levels=[[5,2]]",
    "router.top_k.soft": "router.top_k.soft=true",
    "router.selection.kind": "router.selection.kind=sample router.selection.temperature=1",
    "router.selection.decay": "router.selection.decay=0.5",
    "router.selection.temperature": "router.selection.temperature=2",
    "router.selection.until": "router.selection.until=5",
    "router.score.kind": "router.score.kind=amplitude router.exportable=false",
    "router.noise.kind": "router.noise.kind=jitter router.noise.size=0.1",
    "router.noise.size": "router.noise.size=0.2",
    "router.noise.probability": "router.noise.probability=0.2",
    "router.capacity.factor": "router.capacity.factor=1.5",
    "router.capacity.drop": "router.capacity.drop=position",
    "router.gradient.kind": "router.gradient.kind=default",
    "router.gradient.decay": "router.gradient.decay=0.5",
    "router.freeze_at": "router.freeze_at=3",
    "router.end_steps": "router.end_steps=2 router.exportable=true",
    "router.exportable": f"router.exportable=false router.end_steps=null {EMA}",
    "experts.start": "experts.start=3",
    "experts.events": "experts.events=[{step: 3, kind: retire, expert: 1}]",
    "experts.policy.kind": "experts.policy.kind=replace experts.policy.every=1",
    "experts.policy.after": "experts.policy.after=1",
    "experts.policy.every": "experts.policy.every=2",
    "experts.policy.dry_run": "experts.policy.dry_run=true",
    "experts.policy.retire_below": "experts.policy.retire_below=0.05",
    "experts.policy.retire_after": "experts.policy.retire_after=3",
    "experts.policy.clone_above": "experts.policy.clone_above=1.9",
    "experts.policy.cooldown": "experts.policy.cooldown=5",
    "experts.policy.min_experts": "experts.policy.min_experts=4",
    "experts.policy.max_experts": "experts.policy.max_experts=3",
    "experts.copies.kind": "experts.copies.kind=copy",
    "experts.copies.noise": "experts.copies.noise=0.5",
    "experts.importance.kind": "experts.importance.kind=gate_mass",
    "experts.importance.decay": "experts.importance.decay=0.5",
    "data.sources": "data.sources=[{path: {folder}/validation.txt, format: lines}]",
    "data.validation.kind": "data.validation={kind: fraction, fraction: 0.4}",
    "data.validation.fraction": "data.validation.fraction=0.2",
    "data.validation.sources": "data.validation.sources=[{path: {folder}/text.txt, format: lines}]",
    "data.tokenizer.kind": "data.tokenizer.kind=bpe",
    "data.tokenizer.path": "data.tokenizer.path={folder}/none",
    "data.tokenizer.vocab_size": "data.tokenizer.vocab_size=270",
    "data.tokenizer.eos_token": "data.tokenizer.eos_token='the'",
    "data.tokenizer.bos_token": "data.tokenizer.bos_token='<|endoftext|>'",
    "data.add_bos": "data.add_bos=true",
    "data.seq_len": "data.seq_len=16",
    "data.packing": "data.packing=false",
    "data.shuffle": "data.shuffle=false",
    "data.stream": "data.stream=true",
    "data.workers": "data.workers=1",
    "optim.kind": "optim.kind=muon",
    "optim.momentum": "optim.momentum=0.5",
    "optim.lr": "optim.lr=1e-4",
    "optim.betas": "optim.betas=[0.8, 0.9]",
    "optim.eps": "optim.eps=1e-6",
    "optim.weight_decay": "optim.weight_decay=0",
    "optim.schedule.kind": "optim.schedule.kind=linear",
    "optim.schedule.decay_fraction": "optim.schedule.decay_fraction=0.6",
    "optim.schedule.min_lr_ratio": "optim.schedule.min_lr_ratio=0.5",
    "optim.schedule.warmup_steps": "optim.schedule.warmup_steps=1",
    "optim.clip_norm": "optim.clip_norm=null",
    "optim.storage.weights": "optim.storage.weights=bfloat16 train.dtype=bfloat16",
    "optim.storage.moments": "optim.storage.moments=bfloat16 train.dtype=bfloat16",
    "optim.router.lr_multiplier": "optim.router.lr_multiplier=0.1",
    "optim.router.weight_decay": "optim.router.weight_decay=0.1",
    "optim.on_nonfinite": "optim.on_nonfinite=stop",
    "optim.spike_factor": "optim.spike_factor=3",
    "train.steps": "train.steps=9",
    "train.epochs": "train.epochs=3 train.steps=null",
    "train.global_batch_size": "train.global_batch_size=8",
    "train.micro_batch_size": "train.micro_batch_size=4",
    "train.dtype": "train.dtype=bfloat16",
    "train.compile": "train.compile=true",
    "train.cuda_graph": "train.cuda_graph=true",
    "train.checkpointing": "train.checkpointing=selective",
    "train.sparsity.kind": "train.sparsity.kind=regrow",
    "train.sparsity.density": "train.sparsity.density=0.5",
    "train.sparsity.block": "train.sparsity.block=4",
    "train.sparsity.start": "train.sparsity.start=2",
    "train.sparsity.every": "train.sparsity.every=2",
    "train.sparsity.end": "train.sparsity.end=4",
    "train.sparsity.until": "train.sparsity.until=5",
    "train.sparsity.regrow": "train.sparsity.regrow=0.5",
    "parallel.nodes": "parallel.nodes=2",
    "parallel.expert": "parallel.expert=2",
    "parallel.expert_placement": "parallel.expert_placement=within_node",
    "parallel.offload.kind": "parallel.offload.kind=cpu",
    "parallel.offload.states": "parallel.offload={kind: cpu, states: false, weights: true}",
    "parallel.offload.weights": "parallel.offload={kind: cpu, weights: true}",
    "parallel.offload.path": "parallel.offload={kind: nvme, path: disk}",
    "parallel.exchange.kind": "parallel.exchange.kind=pairwise",
    "parallel.exchange.chunks": "parallel.exchange.chunks=3",
    "parallel.exchange.payload": "parallel.exchange.payload=float8",
    "parallel.exchange.sizes": "parallel.exchange.sizes=bounded",
    "parallel.exchange.equal_tokens": (
        "parallel.exchange.kind=all_gather parallel.exchange.equal_tokens=true"
    ),
    "parallel.exchange.transport": "parallel.exchange.transport=pull",
    "checkpoint.every_steps": "checkpoint.every_steps=2",
    "checkpoint.keep.last": "checkpoint.keep.last=7",
    "checkpoint.keep.every": "checkpoint.keep.every=9",
    "checkpoint.async_save": "checkpoint.async_save=false",
    "eval.every_steps": "eval.every_steps=5",
    "eval.rows": "eval.rows=1",
    "eval.sample.prompt": "eval.sample.prompt=whale",
    "eval.sample.tokens": "eval.sample.tokens=3",
    "log.every_steps": "log.every_steps=3",
    "log.trackers": "log.trackers=[{kind: tensorboard}]",
    "log.plots": "log.plots=true",
}
# What the run is like before the field is turned, where the tiny run leaves the field no effect.
ROUNDED = "router.rounding.to=nearest router.rounding.tile=4"
NAMED = "data.tokenizer={path: {folder}/tokenizer}"
GLM = "model.family=glm4_moe model.first_k_dense_replace=0"
FALLING = "router.top_k.kind=linear router.top_k.start=3"
DRAWN = "router.selection.kind=sample router.selection.temperature=1"
LIMITED = "router.capacity.factor=1.2 router.end_steps=2"
MASKED = "train.sparsity.density=0.5"
# Policies with an expert that is not needed, and with one that has too much to do.
RESIZED = (
    f"{GLM} experts.policy.kind=resize experts.policy.every=1 experts.policy.cooldown=1 "
    "experts.policy.retire_below=0.5 experts.importance.kind=load"
)
FULL = (
    f"{GLM} experts.policy.kind=resize experts.policy.every=3 experts.policy.cooldown=1 "
    "experts.start=3"
)
BEFORE = {
    "router.balance.load": "model.moe_expert_widths=[4,8,8,16] model.moe_intermediate_size=16",
    "router.bias.kind": GLM,
    "router.bias.rate": f"{GLM} router.bias.kind=sign",
    "router.bias.below": f"{GLM} router.bias.kind=min_load",
    **dict.fromkeys(
        [f"router.bias.{n}" for n in ("ema", "freeze_at", "calibrate")],
        f"{GLM} router.bias.kind=quantile",
    ),
    **dict.fromkeys(
        [f"router.rounding.{n}" for n in ("tile", "min_tiles", "max_tiles", "min_mean_tiles")]
        + ["router.rounding.protect_top1", "router.rounding.gates"],
        ROUNDED,
    ),
    "router.rounding.dropped.decay": f"{ROUNDED} router.rounding.dropped={{}}",
    **dict.fromkeys([f"router.top_k.{n}" for n in ("start", "over", "soft")], FALLING),
    "router.top_k.levels": "router.top_k={kind: steps, start: 3, levels: [[4, 2]]}",
    "router.selection.decay": f"{EMA} router.exportable=false",
    **dict.fromkeys(("router.selection.temperature", "router.selection.until"), DRAWN),
    "router.noise.size": "router.noise.kind=jitter router.noise.size=0.1",
    "router.noise.probability": "router.noise.kind=dropout router.noise.probability=0.1",
    **dict.fromkeys(("router.capacity.factor", "router.capacity.drop"), LIMITED),
    "router.gradient.decay": "router.gradient.kind=default",
    "router.end_steps": f"{EMA} router.exportable=false",
    "router.exportable": f"{EMA} router.end_steps=2",
    "experts.policy.after": "experts.policy.kind=revive experts.policy.after=5",
    **{f"experts.{key}": RESIZED for key in ("start", "importance.kind", "importance.decay")},
    **{f"experts.policy.{key}": RESIZED for key in ("every", "dry_run", "retire_below")},
    **{f"experts.policy.{key}": RESIZED for key in ("retire_after", "cooldown", "min_experts")},
    **{f"experts.policy.{key}": FULL for key in ("clone_above", "max_experts")},
    **{f"experts.copies.{key}": FULL for key in ("noise", "kind")},
    **dict.fromkeys(
        [f"train.sparsity.{n}" for n in ("kind", "block", "start", "every", "end", "until")], MASKED
    ),
    "train.sparsity.regrow": f"{MASKED} train.sparsity.kind=regrow",
    "data.validation.fraction": "data.validation={fraction: 0.4}",
    **{f"data.tokenizer.{key}": NAMED for key in ("kind", "path", "eos_token")},
    "data.tokenizer.bos_token": f"{NAMED} data.add_bos=true",
    "data.tokenizer.vocab_size": "data.tokenizer={kind: bpe, vocab_size: 262}",
    **dict.fromkeys(("optim.storage.weights", "optim.storage.moments"), "train.dtype=bfloat16"),
    "optim.momentum": "optim.kind=muon",
    "eval.sample.tokens": "eval.sample.prompt=whale",
}
# Fields whose effect a plan cannot show, and where it is shown.
SHOWN_BY = {
    "checkpoint.stop_after_hours": "tests/training/test_train.py",
    "log.activation_threshold": "tests/training/test_sparsity.py",
    "parallel.timeout_s": "tests/training/test_config_fields.py",
    "parallel.engine": "tests/training/test_layout.py",  # one process uses none
    "data.on_bad_line": "tests/training/test_config_fields.py",
    "data.cache_dir": "tests/training/test_config_fields.py",
    "data.tokenize_workers": "tests/training/test_config_fields.py",
}


def words(text: str, folder: Path) -> list[str]:
    """Overrides of a line; values may have spaces in them."""
    return re.split(r" (?=[\w.]+=)", text.replace("{folder}", str(folder)))


@pytest.fixture
def run(tiny_config, monkeypatch, tmp_path):
    """`run("optim.lr=1")` is the plan of the tiny run with these words; runs go to tmp_path."""
    numbers = itertools.count()

    def plan(text: str) -> dict:
        place = tmp_path / str(next(numbers))  # so that no run finds what another left
        place.mkdir()
        monkeypatch.chdir(place)
        config = load_config(tiny_config, words(text, tiny_config.parent) if text else [])
        return plan_of(config, monkeypatch)

    return plan


@pytest.fixture(scope="session")
def plans():
    """Plans that several fields are compared with."""
    return {}


def places() -> set[str]:
    """Every field but those of the architecture and of the items of lists; of an option the fields
    of its kinds."""
    names = field_names()
    lists = {"data.sources", "data.validation.sources", "experts.events", "log.trackers"}
    found = {
        f"{section}.{key}"
        for section, keys in names.items()
        if section and section not in lists
        for key in keys
        if not (section == "model" and key in known_fields())
    }
    return found - (names.keys() - lists)  # of a nested section its keys, not itself


def test_every_field_is_turned():
    assert set(TURNED) | set(SHOWN_BY) == places()
    assert not set(TURNED) & set(SHOWN_BY)


@pytest.mark.parametrize("place", TURNED)
def test_a_turned_field_gives_another_plan_or_an_error(place, run, plans, tmp_path):
    before = BEFORE.get(place, "")
    if before not in plans:
        plans[before] = run(before)
    turned = f"{before} {TURNED[place]}".strip()
    option, _, key = place.rpartition(".")
    told = key if "." not in option else option
    try:
        plan = run(turned)
    except (ConfigError, DataError) as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert told in refusal
        return
    changed = {name for name in plan if plan[name] != plans[before][name]}
    assert changed, f"{turned} changes nothing"


def test_timeout_reaches_the_process_group(tiny_config, monkeypatch):
    class Asked(BaseException):
        pass

    def start(device, timeout_s, **_):
        raise Asked(timeout_s)

    monkeypatch.setattr(train, "start", start)
    with pytest.raises(Asked, match=r"12\.5"):
        train.main([str(tiny_config), "parallel.timeout_s=12.5"])


def test_bad_lines_stop_or_are_skipped(tiny_config, run, tmp_path):
    text = tmp_path / "bad.jsonl"
    good = '{"text": "' + "the old whale saw the sailor " * 40 + '"}\n'
    text.write_text(good + "{broken\n" + good)
    source = f"data.sources=[{{path: {text}, name: text}}]"
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        run(source)
    config = load_config(tiny_config, [source, "data.on_bad_line=skip", "run.name=skips"])
    assert config.data.on_bad_line == "skip"


def test_texts_are_cached_where_it_is_said(run, tmp_path):
    run(f"data.cache_dir={tmp_path}/here")
    assert list((tmp_path / "here").iterdir())


def test_tokenising_uses_as_many_processes_as_are_said(run, monkeypatch, tmp_path):
    seen = []
    real = training.data.cache.write_store

    def write(*arguments, **keywords):
        seen.append(keywords["workers"])
        return real(*arguments, **keywords | {"workers": 1})

    monkeypatch.setattr(training.data.cache, "write_store", write)
    run(f"data.tokenize_workers=3 data.cache_dir={tmp_path}/new")
    assert seen
    assert set(seen) == {3}


# --- read somewhere -----------------------------------------------------------------------------

# Names that the parts of the code give to a section, beside its own.
ALIASES = {
    "experts": {"event", "expert_changes"},
    "eval": {"evaluation", "settings"},
    "optim": {"optimizer", "rule", "self"},
    "data": {"config", "self", "given", "source", "state"},
    "model": {"config", "c", "self", "given"},
    "run": set(),
}


def test_every_field_is_read_outside_the_config():
    reads: dict[str, set[str]] = {}
    for path in [ROOT / "train.py", *sorted(ROOT.glob("*/**/*.py"))]:
        top = path.relative_to(ROOT).parts[0]
        if top not in ("train.py", "training", "models", "moe", "parallel", "scripts"):
            continue
        if path.name in ("config_load.py",) or path == ROOT / "training" / "config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                base = node.value
                last = getattr(base, "attr", getattr(base, "id", ""))
                reads.setdefault(node.attr, set()).add(last)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                reads.setdefault(getattr(node.args[1], "value", ""), set()).add("getattr")
            elif isinstance(node, ast.Assign) and top == "models":
                # a family names the field of its experts' width
                reads.setdefault(getattr(node.value, "value", ""), set()).add("config")
    # Read where the config itself is made into something: the run's folder, the plan, the model.
    within = {"run.name", "run.dir", "run.device", "train.dtype", "train.compile", "optim.kind"}
    within |= {"model.hf_config"}
    unread = []
    for section, keys in field_names().items():
        top = section.split(".")[0]
        for key in keys if section else ():
            allowed = {section.split(".")[-1], top} | ALIASES.get(top, set())
            if section.count(".") or top in ("optim", "router"):  # options go by many names
                allowed |= reads.get(key, set())
            if f"{section}.{key}" not in within and not reads.get(key, set()) & allowed:
                unread.append(f"{section}.{key} (bases seen: {sorted(reads.get(key, ()))})")
    assert not unread
