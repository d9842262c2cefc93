"""The Hopper kernels compiled for sm_90a on any x86-64 Linux machine, no GPU needed.

Every configuration that tuning may choose must keep its accumulator in registers (no spilled byte),
reach wgmma (HGMMA in the machine code) without ptxas serialising it (warning C7514), load by TMA
(UTMALDG) and, where it gathers, by cp.async (LDGSTS), and fit the shared memory of a program.

Compiling happens in a process of its own, since this one may run Triton's interpreter; the
launchers run there as they are, with the launch itself replaced by a compilation. By default three
products are compiled, with their first configuration; all with TESSERA_COMPILE_ALL=1.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
SHARED_LIMIT = 232_448  # bytes of a program on compute capability 9.0
KERNELS = (
    "up", "down", "dX", "dH", "dW1", "dW2",
    "up uneven", "dH uneven", "dW1 uneven", "dW2 uneven",
)  # fmt: skip
"""Products; uneven: widths that are no multiple of a tile's, which the gathers mask."""


# -------------------------------------------------------------------------- in a process of its own


def _report(kernel) -> dict:
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
    return {
        "spilled bytes": sum(map(int, re.findall(r"(\d+) bytes spill", notes))),
        "serialised": "C75" in notes,
        "shared": kernel.metadata.shared,
        "HGMMA": code.count("HGMMA"),
        "TMA loads": code.count("UTMALDG"),
        "TMA stores": code.count("UTMASTG"),
        "async copies": code.count("LDGSTS"),
        "register moves": code.count("USETMAXREG"),
    }


def _launches(D: int, N: int) -> dict:
    """Product → (table of configurations, launch with a configuration)."""
    import torch

    from moe.kernels._tiles import RowTiles
    from moe.kernels.hopper.down_backward import down_backward_hopper
    from moe.kernels.hopper.outer import weight_gradient_hopper
    from moe.kernels.hopper.rows import rows_hopper, up_forward_hopper
    from moe.kernels.routing_metadata import tile_schedule_ref

    T, E, R = 512, 4, 1024
    offsets = torch.arange(0, R + 1, R // E, dtype=torch.int32)
    index, gates = torch.zeros(R, dtype=torch.int32), torch.zeros(R)
    tiles = RowTiles(*tile_schedule_ref(offsets, 128, R), 128)
    x, w1, w2, h, a = (
        torch.empty(shape, dtype=torch.bfloat16)
        for shape in ((T, D), (E, 2 * N, D), (E, D, N), (R, 2 * N), (R, N))
    )
    return {
        "up": ("up", lambda c: up_forward_hopper(x, w1, index, True, tiles, c)),
        "down": ("rows", lambda c: rows_hopper(a, w2, None, tiles, transposed=True, config=c)),
        "dX": ("rows", lambda c: rows_hopper(h, w1, None, tiles, transposed=False, config=c)),
        "dH": ("down_backward", lambda c: down_backward_hopper(
            x, w2, h, gates, index, index, index, offsets, True, tiles, c)),
        "dW1": ("outer_right", lambda c: weight_gradient_hopper(h, x, None, index, offsets, c)),
        "dW2": ("outer_left", lambda c: weight_gradient_hopper(x, a, index, None, offsets, c)),
    }  # fmt: skip


def _compile(names: list[str], everything: bool) -> None:
    """Prints one line of JSON for each product and configuration."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
    from triton.runtime.jit import create_function_from_signature

    from moe.kernels import hopper

    reason = hopper.missing()
    if reason is not None:
        print(json.dumps({"missing": reason}), flush=True)
        return
    from moe.kernels.hopper import _configs, down_backward

    target = GPUTarget("cuda", 90, 32)
    made: list = []

    def compile_only(self, *args, grid, warmup, **options):
        backend = make_backend(target)
        options |= {"debug": False, "sanitize_overflow": False}
        binder = create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, rest = binder(*args, **options)
        packed = self._pack_args(backend, options, bound, specialization, rest)
        rest, signature, constexprs, attributes = packed
        source = GluonASTSource(self, signature, constexprs, attributes)
        made.append(triton.compile(source, target=target, options=rest.__dict__))

    GluonJITFunction.run = compile_only
    _configs.num_sms = lambda device: 132
    down_backward.sum_parts = lambda *args: None

    for name in names:
        product, _, uneven = name.partition(" ")
        table, launch = _launches(*((264, 72) if uneven else (1536, 256)))[product]
        for config in _configs.CONFIGS[table] if everything else _configs.CONFIGS[table][:1]:
            made.clear()
            launch(config)
            print(json.dumps({"kernel": name, "config": str(config)} | _report(made[0])))


# --------------------------------------------------------------------------------------------- test


def _supported() -> bool:
    try:
        import triton.backends.nvidia as nvidia
    except ImportError:
        return False
    return (Path(nvidia.__file__).parent / "bin" / "cuobjdump").exists()


@pytest.mark.skipif(not _supported(), reason="needs Triton with its NVIDIA tools")
@pytest.mark.timeout(1800)
def test_kernels_compile_for_hopper(tmp_path: Path):
    everything = os.environ.get("TESSERA_COMPILE_ALL", "0") == "1"
    names = KERNELS if everything else ("down", "up uneven", "dW2")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TESSERA_TUNE": "0"}
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{path}:{ROOT}" if path else str(ROOT)
    command = [sys.executable, __file__, ",".join(names), str(int(everything))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if "missing" in rows[0]:
        pytest.skip(rows[0]["missing"])
    assert {row["kernel"] for row in rows} == set(names)
    for row in rows:
        assert row["spilled bytes"] == 0, row
        assert not row["serialised"], row
        assert row["shared"] <= SHARED_LIMIT, row
        assert row["HGMMA"] > 0, row
        assert row["TMA loads"] > 0, row
        assert row["TMA stores"] > 0, row
        assert row["register moves"] > 0, f"the roles share registers evenly: {row}"
        if not row["kernel"].startswith(("down", "dX")):
            assert row["async copies"] > 0, f"the gather is not asynchronous: {row}"


if __name__ == "__main__":
    _compile(sys.argv[1].split(","), sys.argv[2] == "1")
