"""RoPE scaling: the kinds are functions in one dict, and what a config says of them is checked."""

from __future__ import annotations

import pytest
import torch

from models.build import build_model
from models.rope import SCALINGS, Rope, normal_rope_scaling
from tests.models.tiny import tiny_config, tokens


def shifted(frequencies_F: torch.Tensor, *, factor: float, by: float, power: int = 1):
    return (frequencies_F + by) ** power / factor


@pytest.fixture(autouse=True)
def _known(monkeypatch) -> None:
    monkeypatch.setitem(SCALINGS, "shifted", shifted)


def test_a_kind_of_ones_own_reaches_the_angles() -> None:
    config = tiny_config("mixtral", rope_scaling={"type": "shifted", "factor": 2, "by": 0.5})
    assert config.rope_scaling == {"rope_type": "shifted", "by": 0.5, "factor": 2.0}
    positions = torch.arange(5)[None]
    plain = tiny_config("mixtral").attention(0).rope
    moved = config.attention(0).rope
    frequencies_F = plain(torch.tensor([[1]])).sin_BLF.asin()  # the first angle is 1
    expected_BLF = (frequencies_F + 0.5) / 2 * positions[..., None]
    torch.testing.assert_close(moved(positions).cos_BLF, expected_BLF.cos())
    assert plain.key != moved.key == config.attention(1).rope.key
    assert Rope(8, 100.0).key != Rope(8, 101.0).key != Rope(16, 101.0).key


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rope_type": "shifted", "factor": 2}, "type shifted needs by; allowed: rope_type, fact"),
        ({"rope_type": "shifted", "factor": 2, "by": 1, "to": 1}, r"unknown keys \['to'\]"),
        ({"rope_type": "shifted", "by": 1}, "factor=None must be a number"),
        ({"rope_type": ["linear"], "factor": 2}, "not supported; allowed: default, linear"),
        ({"rope_type": "linear", "factor": 2, "by": 1}, "'by'.*allowed: rope_type, factor$"),
    ],
)
def test_what_a_kind_does_not_read_is_refused(given: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        normal_rope_scaling(given)


def test_layers_turn_by_their_own_rope_and_share_equal_ones() -> None:
    model = build_model(tiny_config("mixtral"), dtype=torch.float64)
    assert len(model.ropes) == 1  # the angles of three layers are computed once
    for layer, block in enumerate(model.layers):
        block.attn.rope = Rope(16, (1e4, 100.0)[layer % 2])
    model.ropes = {block.attn.rope.key: block.attn.rope for block in model.layers}
    assert len(model.ropes) == 2
    tokens_BL, positions_BL = tokens(model.config, 2, 9), torch.arange(9).expand(2, 9)
    with torch.no_grad():
        x_BLD = model.embed(tokens_BL)
        for block in model.layers:
            x_BLD, _ = block(x_BLD, block.attn.rope(positions_BL))
        expected = model.head(model.norm(x_BLD))
        assert torch.equal(model(tokens_BL, logits=True).logits, expected)
