"""`train.py --help PLACE` tells of every place of the config what it is."""

import pytest

from training.config.build import field_names
from training.config.describe import describe

PLACES = [f"{place}.{key}".lstrip(".") for place, keys in field_names().items() for key in keys]


def test_every_place_is_described():
    for place in PLACES:
        head, *lines = describe(place, field_names())
        assert head.startswith(f"{place}: ") and ", default" in head, place
        assert all(len(line) <= 100 for line in lines), place


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            "optim.schedule",
            ["kind wsd: Constant, then down at the end.", "  decay_fraction: number"],
        ),
        ("router.balance", ["kind lagged: Compares with", "  coef: number > 0, default 0.01."]),
        ("data.sources", ["  path: text or list of text, default null."]),
        ("checkpoint.keep.every", ["checkpoint.keep.every: integer ≥ 1, default null"]),
        ("model.hidden_size", ["default by family"]),
        ("log.trackers", ["kind tensorboard: TensorBoard"]),
    ],
)
def test_settings_and_kinds_are_listed(place, told):
    text = "\n".join(describe(place, field_names()))
    assert all(words in text for words in told), text
