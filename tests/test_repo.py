"""Rules of the repository: layout, docstrings, documentation.

What a reader must hold in mind, imports and settings, is in test_structure.py.
"""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("moe", "models", "parallel", "training")


def tracked(pattern: str = "") -> list[Path]:
    """Files of the repository: in git where there is one, else all that are no build products."""
    git = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        names = done.stdout.splitlines()
    else:
        hidden = (".git", ".venv", "runs", "__pycache__")
        names = [
            str(path.relative_to(ROOT))
            for path in ROOT.rglob("*")
            if path.is_file() and not any(part in hidden for part in path.parts)
        ]
    return [ROOT / name for name in names if name.endswith(pattern) and (ROOT / name).is_file()]


SOURCES = tracked(".py")
PACKAGE_SOURCES = [p for p in SOURCES if p.relative_to(ROOT).parts[0] in PACKAGES]
SCRIPTS = sorted(
    path
    for folder in ("scripts", "scripts/bench")
    for path in (ROOT / folder).iterdir()
    if path.suffix in (".py", ".sh")
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(node: ast.AST) -> set[str]:
    """First parts of all imported names, also inside functions."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Import):
            found |= {alias.name.split(".")[0] for alias in part.names}
        elif isinstance(part, ast.ImportFrom) and part.level == 0:
            found.add((part.module or "").split(".")[0])
    return found


def test_everything_imports_without_triton():
    """Only common/backend.py imports it outright; others where it is known to be there."""
    outright = [
        name(path)
        for path in PACKAGE_SOURCES
        for node in tree(path).body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "triton" in imported_modules(node)
    ]
    assert not outright


def test_files_are_of_readable_size():
    long = {
        name(path): lines
        for path in SOURCES
        if "kernels" not in path.parts
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) > 600
    }
    assert not long


def test_every_package_says_what_lives_there():
    for path in PACKAGE_SOURCES:
        if path.name == "__init__.py":
            assert ast.get_docstring(tree(path)), name(path)


def _public(body: list[ast.stmt], inside: str = ""):
    """(class and dot, node) of what a module offers."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name.startswith("_"):
                continue
            yield inside, node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, f"{node.name}.")


# Methods whose meaning their name or their base class fixes.
SELF_EXPLAINING = {
    "forward",
    "backward",
    "extra_repr",
    "reset_parameters",
    "close",
    "setup_context",
}


def _is_trivial(node: ast.AST) -> bool:
    """Functions of one statement with a telling name need no sentence; overloads have none."""
    return isinstance(node, ast.FunctionDef) and len(node.body) == 1


def test_public_functions_and_classes_have_docstrings():
    # What several classes have in common is explained once in their package.
    explained = {
        (path.parent, node.name)
        for path in PACKAGE_SOURCES
        for inside, node in _public(tree(path).body)
        if inside and ast.get_docstring(node)
    }
    bare = []
    for path in PACKAGE_SOURCES:
        assert ast.get_docstring(tree(path)), f"{name(path)} has no module docstring"
        for inside, node in _public(tree(path).body):
            if ast.get_docstring(node) or node.name in SELF_EXPLAINING or _is_trivial(node):
                continue
            if inside and (path.parent, node.name) in explained:
                continue
            if inside and isinstance(node, ast.FunctionDef) and len(node.body) <= 4:
                continue  # short methods of a documented class
            bare.append(f"{name(path)}:{node.lineno} {inside}{node.name}")
    assert not bare


def test_public_functions_have_type_hints():
    bare = []
    for path in PACKAGE_SOURCES:
        for inside, node in _public(tree(path).body):
            if not isinstance(node, ast.FunctionDef):
                continue
            if any(
                "triton" in ast.unparse(d) or "jit" in ast.unparse(d) for d in node.decorator_list
            ):
                continue  # arguments of kernels have no Python types
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            missing = [a.arg for a in arguments if a.annotation is None]
            if inside and missing[:1] in (["self"], ["cls"], ["ctx"]):
                missing = missing[1:]
            missing = [a for a in missing if a not in ("ctx", "self", "cls")]
            if missing and not node.name.startswith("_"):
                bare.append(f"{name(path)}:{node.lineno} {inside}{node.name}({', '.join(missing)})")
    assert not bare


TEXT = (".py", ".md", ".yaml", ".yml", ".sh", ".toml", ".json", ".cfg")


def test_no_paths_of_a_machine():
    # Written in pieces so that this file passes itself.
    pattern = re.compile(r"(?<![\w.])/(?:wo" + r"rk|ho" + r"me/\w+|ro" + r"ot|Us" + r"ers/\w+)/")
    found = []
    for path in tracked():
        if path.suffix in TEXT or name(path).startswith(".ci/"):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if pattern.search(line):
                    found.append(f"{name(path)}:{number} {line.strip()[:80]}")
    assert not found


def test_no_large_files():
    large = {name(p): p.stat().st_size for p in tracked() if p.stat().st_size > 3 * 2**20}
    assert not large


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_every_script_answers_help(path, monkeypatch, capfd):
    module = path.suffix == ".py" and "__main__" not in path.read_text()
    if module or path.name in ("_setup.sh", "_engines.py"):
        pytest.skip("is used by other scripts")
    if path.suffix == ".sh":
        done = subprocess.run(["bash", str(path), "--help"], timeout=60, check=False)
        code = done.returncode
    else:
        monkeypatch.setattr(sys, "argv", [str(path), "--help"])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(path), run_name="__main__")
        code = caught.value.code
    text = capfd.readouterr().out
    assert not code, text
    assert len(text.splitlines()) >= 3, text


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("script", ["one_host.sh", "hosts.sh"])
def test_launchers_start_nothing_by_themselves_without_a_gpu(script):
    command = ["bash", str(ROOT / "scripts" / "launch" / script), "configs/quickstart.yaml"]
    environment = os.environ | {"PYTHON": sys.executable, "HOSTS": "1", "FIRST": "localhost"}
    environment.pop("GPUS", None)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 2
    assert done.stderr == f"{script}: PyTorch sees no GPU here; GPUS=2 starts two CPU processes\n"


def test_train_answers_help(capsys):
    import train

    assert train.main(["--help"]) == 0
    told = capsys.readouterr().out
    assert "section.key=value" in told and "docs/configuration.md" in told


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_loads(path):
    from training.config.build import load_config, make_plan

    config = load_config(path)
    plan = make_plan(config, world_size=1, cuda=False)
    assert plan.accumulation >= 1
    assert config.run.name == path.stem


COMMAND = re.compile(
    r"(?:^|[\s`(])((?:python3? |bash |torchrun [^`\n]*?)((?:scripts/)?[\w/]+\.(?:py|sh)))"
)

# Files that a page tells its reader to write.
OF_THE_READER = {"docs/extending.md": {"my_ideas.py"}}


@pytest.mark.parametrize("path", tracked(".md"), ids=name)
def test_commands_in_documents_exist(path):
    named = {file for _, file in COMMAND.findall(path.read_text(encoding="utf-8"))}
    for file in named - OF_THE_READER.get(name(path), set()):
        assert (ROOT / file).is_file(), f"{name(path)} names {file}, which does not exist"


TRAINING = re.compile(r"train\.py (configs/\w+\.yaml)((?: [\w.]+=\S+)*)")


def test_training_commands_in_the_readme_are_valid():
    from training.config.build import load_config

    commands = TRAINING.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert ("configs/quickstart.yaml", " train.steps=50 run.name=try") in commands
    for path, overrides in commands:
        load_config(ROOT / path, overrides.split())


LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("path", tracked(".md"), ids=name)
def test_links_in_documents_lead_somewhere(path):
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{name(path)} links to {target}"


def test_the_configuration_page_is_that_of_the_code():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import _config_docs
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert text == _config_docs.render(), "run: python scripts/_config_docs.py"


def test_ci_runs_what_the_contributor_guide_says():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "scripts/test.sh" in ci
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "scripts/test.sh" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def cut_lines(text: str) -> list[str]:
    """Lines of a docstring that end after a few words though the sentence, and the room, go on: an
    editor has broken the paragraph where it was, and added the next line where it is."""
    found, lines = [], text.splitlines()
    for before, line, after in zip(lines, lines[1:], lines[2:]):
        columns = re.search(r"\S {2,}\S", after) or re.match(r" *[\w, ]+: ", after)
        short = 0 < len(line.split()) <= 6 and not line.rstrip().endswith((".", ":"))
        code = re.search("[=`]|python ", line)
        if len(before) > 75 and short and after.strip()[:1].islower() and not (columns or code):
            found.append(line.strip())
    return found


def test_e24_docstrings_are_not_cut_by_a_reflow():
    example = f"config: {'a' * 70}\n        update\n            of 0.001 would vanish.\n"
    assert cut_lines(example) == ["update"]
    cut = []
    for path in PACKAGE_SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                if isinstance(node.value.value, str):
                    cut += [f"{path.name}: {line}" for line in cut_lines(node.value.value)]
    assert not cut
