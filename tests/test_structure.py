"""What a reader must hold in mind stays small: imports, private names, parameters, settings.

Each rule is a function over the sources, run on the packages and on a planted offence. What still
breaks a rule is listed by name: such a list may only become shorter.

    python -m tests.test_structure      # what is left, and lines of code by room
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from models.config import FAMILIES
from models.moe_config import MoEModelConfig

ROOT = Path(__file__).resolve().parents[1]
BELOW = {
    "moe": set(),
    "models": {"moe"},
    "parallel": {"moe"},
    "training": {"moe", "models", "parallel"},
}
"""Package to those that it may import: train.py → training → models → moe, training → parallel."""
PACKAGES = tuple(BELOW)
OPTIONAL = {
    "datasets", "deepspeed", "flash_attn", "gguf", "huggingface_hub", "matplotlib",
    "torch.utils.tensorboard", "trackio", "transformers", "triton", "wandb",
}  # fmt: skip
"""Packages that may be missing or are slow to import; functions import them when they need them."""
MAX_PARAMETERS = 10
MAX_SETTINGS_OF_A_KIND = 10
MAX_PLAIN_SETTINGS = 110
"""Settings that every run has, whatever it chooses. May only be lowered."""

Trees = Mapping[str, ast.Module]
"""Module name, as in `moe.layer`, to its syntax tree."""


def read(root: Path) -> dict[str, ast.Module]:
    """All modules of the packages below `root`."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, str, bool]]:
    """(statement, module, whether it is inside a function) of every import."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[ast.AST, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child, alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"line {child.lineno}: imports are absolute here"
                yield child, child.module or "", inside
            else:
                function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, inside or function)

    yield from walk(tree, False)


def graph(trees: Trees) -> dict[str, set[str]]:
    """Module to the modules of ours that it imports, for types and inside functions too."""
    edges: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        for node, module, _ in imports(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            # `from moe import kernels` imports the module moe.kernels, if there is one.
            targets = [t for n in names if (t := f"{module}.{n}") in trees] or [module]
            edges[name] |= {target for target in targets if target in trees and target != name}
    return edges


def circles(trees: Trees) -> list[tuple[str, ...]]:
    """Groups of modules that reach each other by imports (strongly connected components)."""
    edges = graph(trees)
    order: list[str] = []
    seen: set[str] = set()

    def visit(start: str, onto: list[str], links: Mapping[str, set[str]]) -> None:
        stack = [(start, iter(sorted(links[start])))]
        seen.add(start)
        while stack:
            node, following = stack[-1]
            after = next((n for n in following if n not in seen), None)
            if after is None:
                onto.append(node)
                stack.pop()
            else:
                seen.add(after)
                stack.append((after, iter(sorted(links[after]))))

    for name in sorted(edges):
        if name not in seen:
            visit(name, order, edges)
    backwards: dict[str, set[str]] = {name: set() for name in edges}
    for name, targets in edges.items():
        for target in targets:
            backwards[target].add(name)
    seen.clear()
    found = []
    for name in reversed(order):
        if name not in seen:
            group: list[str] = []
            visit(name, group, backwards)
            if len(group) > 1:
                found.append(tuple(sorted(group)))
    return sorted(found)


def upward_imports(trees: Trees) -> list[str]:
    """`module > imported` for imports of a package or program that is not below this one."""
    ours = {*PACKAGES, "train", "scripts", "tests"}
    found = set()
    for name, tree in trees.items():
        own = name.split(".")[0]
        for _, module, _ in imports(tree):
            if module.split(".")[0] in ours - BELOW[own] - {own}:
                found.add(f"{name} > {module}")
    return sorted(found)


def private_names(trees: Trees) -> list[str]:
    """`module < other._name` for each underscored name that is taken from another module, by
    `from other import _name` or as `other._name`."""
    found = set()
    for name, tree in trees.items():
        modules = {}  # names that stand for modules of ours here
        for node, module, _ in imports(tree):
            for alias in node.names:
                if isinstance(node, ast.Import):
                    modules[alias.asname or alias.name] = alias.name
                elif f"{module}.{alias.name}" in trees:
                    modules[alias.asname or alias.name] = f"{module}.{alias.name}"
                elif module.split(".")[0] in PACKAGES and alias.name.startswith("_"):
                    found.add(f"{name} < {module}.{alias.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                module = modules.get(ast.unparse(node.value), "")
                if module in trees and not node.attr.endswith("__"):
                    found.add(f"{name} < {module}.{node.attr}")
    return sorted(found)


def hidden_imports(trees: Trees) -> list[str]:
    """`module > imported` for imports inside functions, but of optional packages."""
    found = {
        f"{name} > {module}"
        for name, tree in trees.items()
        for _, module, inside in imports(tree)
        if inside and not {module, module.split(".")[0]} & OPTIONAL
    }
    return sorted(found)


def long_signatures(trees: Trees) -> list[str]:
    """`module.function (n)` for functions outside kernels with more than ten parameters."""
    found = []
    for name, tree in trees.items():
        if "kernels" in name.split("."):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                    continue  # a kernel
                given = node.args
                names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                count = len([n for n in names if n not in ("self", "cls", "ctx")])
                if count > MAX_PARAMETERS:
                    found.append(f"{name}.{node.name} ({count})")
    return sorted(found)


RULES = {
    "circles": lambda trees: [" ".join(group) for group in circles(trees)],
    "upward imports": upward_imports,
    "private names": private_names,
    "hidden imports": hidden_imports,
    "long signatures": long_signatures,
}

KINDS_STILL: dict[str, int] = {"DeepseekV3": 12}
"""Kinds with more settings than that; may only become fewer. DeepseekV3: the keys of its
config.json are not ours to choose."""

STILL: dict[str, list[str]] = {
    "circles": [],
    "private names": [],
    "hidden imports": [],
    "long signatures": [],
}


@pytest.fixture(scope="module")
def trees() -> Trees:
    return read(ROOT)


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule, trees):
    found, known = RULES[rule](trees), STILL.get(rule, [])
    new = [offence for offence in found if offence not in known]
    assert not new, f"{rule}: {new}"
    gone = [offence for offence in known if offence not in found]
    assert not gone, f"{rule}: no longer there, so take it off the list: {gone}"


PLANTED = {
    "circles": ("from moe import layer", "from moe.router import route"),
    "upward imports": ("", "def f():\n    from training.step import train_step"),
    "private names": ("", "from moe.router import _route"),
    "hidden imports": ("", "def f():\n    from moe.router import route"),
    "long signatures": ("", f"def f({', '.join('abcdefghijk')}): ..."),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_sees_a_planted_offence(rule, tmp_path):
    (tmp_path / "moe").mkdir()
    router, layer = PLANTED[rule]
    (tmp_path / "moe" / "router.py").write_text(router)
    (tmp_path / "moe" / "layer.py").write_text("")
    assert not RULES[rule](read(tmp_path))
    (tmp_path / "moe" / "layer.py").write_text(layer)
    assert len(RULES[rule](read(tmp_path))) == 1


@pytest.mark.parametrize("layer", ["from moe import router", "import moe.router as router"])
def test_private_names_are_seen_behind_a_module(layer, tmp_path):
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "router.py").write_text("")
    (tmp_path / "moe" / "layer.py").write_text(f"{layer}\nrouter._route(self._x, router.__doc__)")
    assert private_names(read(tmp_path)) == ["moe.layer < moe.router._route"]


def test_optional_packages_may_be_imported_inside_functions_and_kernels_may_be_long(tmp_path):
    (tmp_path / "moe" / "kernels").mkdir(parents=True)
    long = f"def f({', '.join('abcdefghijk')}): ..."
    (tmp_path / "moe" / "kernels" / "up.py").write_text(long)
    (tmp_path / "moe" / "adamw.py").write_text(f"@tl.jit\n{long}\ndef g():\n    import triton")
    assert not hidden_imports(read(tmp_path)) and not long_signatures(read(tmp_path))


# --- settings -----------------------------------------------------------------------------------


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Classes of settings that a field's annotation names, in lists and unions too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    parts = typing.get_args(annotation)
    return [model for part in parts for model in models_in(part)]


def nested(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a field's own settings that every run has: a section, or the plain kind of an
    option that is never null."""
    kind = field.annotation
    if not field.is_required() and (kind is Any or not isinstance(kind, type)):
        kind = type(field.get_default(call_default_factory=True))
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def plain_sections(config: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """The config's class and those of its sections."""
    yield config
    for field in config.model_fields.values():
        if (section := nested(field)) is not None:
            yield from plain_sections(section)


def plain_settings(config: type[BaseModel]) -> dict[str, int]:
    """Number of settings by section; an option that is null or auto counts as one, and of the
    architecture what the family of the quickstart has."""
    found = {
        section.__name__: sum(nested(field) is None for field in section.model_fields.values())
        for section in plain_sections(config)
    }
    if "ModelConfig" in found:
        found["ModelConfig"] = len(FAMILIES["qwen3_moe"].model_fields)
    return found


def kinds(base: type[BaseModel], sections: set[type[BaseModel]]) -> dict[str, int]:
    """Number of settings of each class below `base` that is not a plain section, nor what one
    derives from; of a family those that a plain section (`ModelConfig`, and what the quickstart's
    family derives from) does not have already."""
    sections = sections | {MoEModelConfig}
    found = {}
    for model in base.__subclasses__():
        if model.__module__.split(".")[0] in PACKAGES:
            if not any(issubclass(section, model) for section in sections):
                plain = {
                    key
                    for parent in sections.intersection(model.__mro__)
                    for key in parent.model_fields
                }
                found[model.__name__] = len(model.model_fields.keys() - plain - {"kind"})
            found |= kinds(model, sections)
    return found


def reached_settings() -> tuple[dict[str, int], dict[str, int]]:
    """Settings of a run: by plain section, and by optional kind."""
    from training.config.build import Config

    return plain_settings(Config), kinds(BaseModel, set(plain_sections(Config)))


def test_settings_in_reach():
    plain, optional = reached_settings()
    assert sum(plain.values()) <= MAX_PLAIN_SETTINGS, plain
    new = {k: n for k, n in optional.items() if n > MAX_SETTINGS_OF_A_KIND}.items()
    assert not new - KINDS_STILL.items(), optional


def test_settings_are_counted_by_what_every_run_has():
    class Rate(BaseModel):
        kind: str = "rate"
        rate: float = 0.1

    class Off(BaseModel):
        pass

    class Inner(BaseModel):
        depth: int = 1
        rate: Rate | None = None
        choice: Rate | Off = Field(default_factory=Off)
        several: list[Rate] = Field(default_factory=list)

    class Outer(BaseModel):
        inner: Inner = Field(default_factory=Inner)
        name: str = "x"

    assert plain_settings(Outer) == {"Outer": 1, "Inner": 3, "Off": 0}
    for model in (Rate, Inner, Outer, Off):
        model.__module__ = "training.planted"
    try:
        found = kinds(BaseModel, {Outer, Inner})
        assert (found["Rate"], found["Off"]) == (1, 0) and not {"Outer", "Inner"} & found.keys()
    finally:
        for model in (Rate, Inner, Outer, Off):
            model.__module__ = __name__


# --- lines of code ------------------------------------------------------------------------------


def code_lines(path: Path) -> int:
    """Lines with code: no blank ones, comments or docstrings, which nobody should save on."""
    text = path.read_text(encoding="utf-8")
    documentation = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documentation |= set(range(node.lineno, node.end_lineno + 1))
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*silent, tokenize.ENDMARKER):
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documentation)


def test_code_lines_counts_code(tmp_path):
    path = tmp_path / "x.py"
    path.write_text('"""Text.\n\nMore.\n"""\n\n# why\nx = [\n    1,  # one\n]\n\n\ny = "a"\n')
    assert code_lines(path) == 4


def room(path: Path) -> str:
    """Package and folder, as `moe.kernels`; the packages' own files have theirs alone."""
    parts = path.relative_to(ROOT).parts
    return ".".join(parts[: min(2, len(parts) - 1)]) or parts[0]


def report() -> None:
    """How things stand."""
    trees = read(ROOT)
    for rule, function in RULES.items():
        print(rule, *function(trees), sep="\n  ")
    plain, optional = reached_settings()
    print(f"plain settings: {sum(plain.values())} of {MAX_PLAIN_SETTINGS}", plain)
    print("settings of optional kinds:", optional)
    counts: Counter[str] = Counter()
    for part in ("train.py", *PACKAGES, "scripts", "tests"):
        top = ROOT / part
        for path in [top] if top.is_file() else top.rglob("*.py"):
            counts[room(path)] += code_lines(path)
    for name, count in sorted(counts.items()):
        print(f"{count:7,} {name}")
    kernels = sum(count for name, count in counts.items() if name == "moe.kernels")
    packages = sum(n for name, n in counts.items() if name.split(".")[0] in (*PACKAGES, "train"))
    print(f"{packages - kernels:7,} lines of code in train.py and the packages, kernels aside")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    report()
