"""Options of several kinds: what is accepted, what is refused, and kinds from elsewhere."""

from typing import Literal

import pytest
from pydantic import Field, ValidationError

from moe.config import BIASES, GlobalBalance, QuantileBias, RouterConfig, SignBias
from moe.settings import Settings


def error(**values):
    with pytest.raises(ValidationError) as caught:
        RouterConfig(**values)
    (found,) = caught.value.errors()
    return ".".join(map(str, found["loc"])), found["msg"]


def test_a_kind_is_a_mapping_or_an_instance():
    given = RouterConfig(bias={"kind": "sign", "rate": 0.5}, balance={"coef": 0.1})
    assert given.bias == SignBias(rate=0.5)
    assert given.balance == GlobalBalance(coef=0.1), "the plain kind needs no name"
    assert RouterConfig(bias=given.bias, balance=None).bias is given.bias


def test_what_is_dumped_is_read_again():
    given = RouterConfig(bias={"kind": "min_load"}, rounding={"to": "up", "dropped": {}})
    dumped = given.model_dump(mode="json")
    assert dumped["bias"]["kind"] == "min_load"
    assert RouterConfig(**dumped) == given


@pytest.mark.parametrize(
    ("values", "place", "message"),
    [
        ({"bias": {"kind": "quantil"}}, "bias.kind", "is unknown; allowed: quantile, sign, min"),
        ({"bias": {"kind": ["sign"]}}, "bias.kind", "is unknown; allowed: quantile, sign, min"),
        ({"bias": {"rate": 1.0}}, "bias.kind", "is missing; allowed with rate: sign, min_load"),
        ({"bias": {}}, "bias.kind", "is missing; allowed: quantile, sign, min_load"),
        ({"bias": "sign"}, "bias", "must be auto or a mapping: {kind: sign, …}"),
        ({"bias": [3]}, "bias", "must be auto or a mapping: {kind: …, …}"),
        (
            {"bias": {"kind": "quantile", "rate": 1.0}},
            "bias.rate",
            "is no key of kind quantile, which has freeze_at, calibrate, ema; it is one of kind "
            "sign, min_load",
        ),
        ({"bias": {"kind": "sign", "rate": 0.0}}, "bias.rate", "greater than 0"),
        ({"selection": {"kind": "ema"}}, "selection.decay", "required"),
        ({"rounding": {"tile": 16}}, "rounding.to", "required"),
    ],
)
def test_mistakes_name_the_key_and_what_is_allowed(values, place, message):
    at, said = error(**values)
    assert at == place
    assert message in said


def test_a_kind_of_somebody_else_is_added_to_the_table(monkeypatch):
    class Toy(Settings):
        kind: Literal["toy"] = "toy"
        size: int = Field(1, ge=1)

    with pytest.raises(ValidationError):
        RouterConfig(bias={"kind": "toy"})
    monkeypatch.setitem(BIASES, "toy", Toy)
    assert RouterConfig(bias={"kind": "toy", "size": 3}).bias == Toy(size=3)
    assert error(bias={"kind": "toy", "size": 0})[0] == "bias.size"


def test_auto_is_what_the_family_can_express():
    plain = RouterConfig().resolved("softmax", has_bias=False)
    assert (plain.score, plain.bias, plain.balance) == ("softmax", None, GlobalBalance(coef=0.01))
    biased = RouterConfig().resolved("sigmoid", has_bias=True)
    assert (biased.score, biased.bias, biased.balance) == ("sigmoid", QuantileBias(), None)
    floor = RouterConfig(bias={"kind": "min_load"}).resolved("softmax", has_bias=False)
    assert floor.balance == GlobalBalance(), "min_load alone balances nothing"
    chosen = RouterConfig(score="sigmoid", balance=None).resolved("softmax", has_bias=True)
    assert (chosen.score, chosen.balance) == ("sigmoid", None)
