"""What a reader must hold in mind stays small: circles, private names, hidden imports, parameters.

Each rule is a function over the sources, run on the packages and on a planted offence. What still
breaks a rule is listed by name: such a list may only become shorter.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("moe", "models", "parallel", "training")
OPTIONAL = {
    "datasets", "deepspeed", "gguf", "huggingface_hub", "liger_kernel", "matplotlib",
    "transformers", "triton", "wandb",
}  # fmt: skip
"""Packages that may be missing or are slow to import; functions import them when they need them."""
MAX_PARAMETERS = 10

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


def private_names(trees: Trees) -> list[str]:
    """`module < other._name` for each underscored name that is imported from another module."""
    found = []
    for name, tree in trees.items():
        for node, module, _ in imports(tree):
            if isinstance(node, ast.ImportFrom) and module.split(".")[0] in PACKAGES:
                found += [
                    f"{name} < {module}.{alias.name}"
                    for alias in node.names
                    if alias.name.startswith("_") and f"{module}.{alias.name}" not in trees
                ]
    return sorted(found)


def hidden_imports(trees: Trees) -> list[str]:
    """`module > imported` for imports inside functions, but of optional packages."""
    found = {
        f"{name} > {module}"
        for name, tree in trees.items()
        for _, module, inside in imports(tree)
        if inside and module.split(".")[0] not in OPTIONAL
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
                given = node.args
                names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                count = len([n for n in names if n not in ("self", "cls", "ctx")])
                if count > MAX_PARAMETERS:
                    found.append(f"{name}.{node.name} ({count})")
    return sorted(found)


RULES = {
    "circles": lambda trees: [" ".join(group) for group in circles(trees)],
    "private names": private_names,
    "hidden imports": hidden_imports,
    "long signatures": long_signatures,
}

STILL: dict[str, list[str]] = {
    "circles": [
        "models.config models.config_hf",
        "moe.balance moe.metrics",
        "moe.control moe.layer moe.router moe.router_checks moe.router_gradient moe.surgery",
        "moe.kernels.down_backward moe.kernels.down_forward moe.kernels.hopper._configs "
        "moe.kernels.hopper._selftest moe.kernels.hopper.down_backward "
        "moe.kernels.hopper.outer moe.kernels.hopper.rows moe.kernels.input_gradient "
        "moe.kernels.up_forward moe.kernels.weight_gradient",
        "moe.kernels.hopper.gating moe.kernels.topk_gating",
        "moe.sparse.formats moe.sparse.products",
        "training.data.sources training.data.stream training.data.tokenizer training.data.writer",
    ],
    "private names": [
        "models.config_hf < models.config._HF_TOKEN_IDS",
        "models.config_hf < models.config._OWN",
        "models.config_hf < models.config._normal_rope_scaling",
        "moe.kernels.ragged < moe.kernels.down_backward._gates_of",
        "moe.kernels.ragged < moe.kernels.down_backward._slots_of",
        "moe.kernels.ragged < moe.kernels.down_backward._to_slots",
        "moe.kernels.ragged < moe.kernels.up_forward._finish",
        "moe.kernels.ragged < moe.kernels.up_forward._product",
        "moe.kernels.ragged < moe.kernels.weight_gradient._operand",
    ],
    "hidden imports": [
        "models > models.documents",
        "models.config > models.config_hf",
        "models.config > moe.layer",
        "moe.kernels._tuning > fcntl",
        "moe.kernels.down_backward > moe.kernels.hopper.down_backward",
        "moe.kernels.down_forward > moe.kernels.hopper.rows",
        "moe.kernels.hopper._configs > moe.kernels.hopper",
        "moe.kernels.input_gradient > moe.kernels.hopper.rows",
        "moe.kernels.topk_gating > moe.kernels.hopper.gating",
        "moe.kernels.up_forward > moe.kernels.hopper.rows",
        "moe.kernels.weight_gradient > moe.kernels.hopper.outer",
        "moe.sparse.formats > moe.sparse.products",
        "parallel.engines > parallel.deepspeed_adam",
        "parallel.engines > parallel.deepspeed_engine",
        "parallel.processes > parallel.world",
        "parallel.processes > torch",
        "parallel.processes > torch.distributed",
        "parallel.exchange.pull > torch.distributed._symmetric_memory",
        "training.data.readers > pyarrow",
        "training.data.readers > pyarrow.parquet",
        "training.data.stream > training.data.sources",
        "training.data.stream > training.data.tokenizer",
        "training.data.stream > training.data.writer",
        "training.data.tokenizer > training.data.sources",
        "training.report.plots > numpy",
        "training.report.status > training.report.plots",
    ],
    "long signatures": [
        "moe.experts.experts (11)",
        "moe.experts.forward (19)",
        "moe.mixed_experts.forward (16)",
        "parallel.engines.make_engine (11)",
        "training.optim.adamw._adamw_kernel (18)",
        "training.step.train_step (14)",
    ],
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


if __name__ == "__main__":  # how things stand
    for rule, function in RULES.items():
        print(rule, *function(read(ROOT)), sep="\n  ")
    for package in PACKAGES:
        counts = {path: code_lines(path) for path in (ROOT / package).rglob("*.py")}
        kernels = sum(count for path, count in counts.items() if "kernels" in path.parts)
        print(f"{package}: {sum(counts.values()) - kernels} lines of code, {kernels} of kernels")
