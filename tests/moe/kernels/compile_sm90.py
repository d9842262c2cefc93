"""Compiling kernels for sm_90a on any x86-64 Linux machine, and reading what became of them.

A test runs its own file as a program (`rows_of`), since its process may run Triton's interpreter.
There the launchers run as they are, with the launch itself replaced (`compile_only`), and print one
line of JSON per kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHARED_LIMIT = 232_448  # bytes of a program on compute capability 9.0
EVERYTHING = os.environ.get("TESSERA_COMPILE_ALL", "0") == "1"


def _supported() -> bool:
    try:
        import triton.backends.nvidia as nvidia
    except ImportError:
        return False
    return (Path(nvidia.__file__).parent / "bin" / "cuobjdump").exists()


needs_tools = pytest.mark.skipif(not _supported(), reason="needs Triton with its NVIDIA tools")


def report(kernel) -> dict:
    """Registers, spills and instructions of a compiled kernel."""
    import triton.backends.nvidia as nvidia
    from triton.backends.nvidia.compiler import get_ptxas

    tools = Path(nvidia.__file__).parent / "bin"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        ptx.write_text(kernel.asm["ptx"])
        cubin.write_bytes(kernel.asm["cubin"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", folder + "/o"]
        notes = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [str(tools / "cuobjdump"), "-sass", str(cubin)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    early, waits, _ = code.partition("ACQBULK")  # of a launch that overlaps the kernel before
    return {
        "waits": bool(waits),
        "memory before the wait": len(re.findall(r"\b(?:LDG|STG|RED|ATOMG?)\b", early)),
        "registers": int(re.search(r"Used (\d+) registers", notes)[1]),
        "spilled bytes": sum(map(int, re.findall(r"(\d+) bytes spill", notes))),
        "serialised": "C75" in notes,
        "shared": kernel.metadata.shared,
        "HGMMA": code.count("HGMMA"),
        "TMA loads": code.count("UTMALDG"),
        "TMA stores": code.count("UTMASTG"),
        "async copies": code.count("LDGSTS"),
        "register moves": code.count("USETMAXREG"),
    }


def compile_only(made: Callable[[str, object], None], gluon: bool = False) -> None:
    """From here on in this process a launch compiles its kernel for sm_90 and hands it, with its
    name, to `made`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    if gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Source
        from triton.experimental.gluon._runtime import GluonJITFunction as Function
    else:
        from triton.compiler import ASTSource as Source
        from triton.runtime.jit import JITFunction as Function

    target = GPUTarget("cuda", 90, 32)

    def run(self, *args, grid, warmup, **options):
        backend = make_backend(target)
        options |= {"debug": False, "sanitize_overflow": False}
        binder = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, rest = binder(*args, **options)
        packed = self._pack_args(backend, options, bound, specialization, rest)
        rest, signature, constexprs, attributes = packed
        source = Source(self, signature, constexprs, attributes)
        made(self.fn.__name__, triton.compile(source, target=target, options=rest.__dict__))

    Function.run = run


def rows_of(script: str, tmp_path: Path, *arguments: str) -> list[dict]:
    """What the test file prints when it runs as a program, without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TESSERA_TUNE": "0"}
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{path}:{ROOT}" if path else str(ROOT)
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
