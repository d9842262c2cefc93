"""The test of the null hypothesis about amplitudes: its arms differ in what they say, and learn."""

import torch


def test_arms_have_the_parameters_they_say(script):
    null = script("null_amplitudes")
    rows = {}
    for name in null.ARMS:
        model = null.arm(name, 8)
        rows[name] = (
            sum(p.numel() for n, p in model.named_parameters() if "w1" not in n)
            - (model.layer if hasattr(model, "layer") else model).w2.numel()
        )
    assert rows["softmax, drawn"] == null.E * null.D
    assert (
        rows["amplitudes, drawn"] == rows["softmax, twice the rows, drawn"] == 2 * null.E * null.D
    )


def test_a_small_run(script, capsys):
    null = script("null_amplitudes")
    first = null.run("amplitudes, drawn", 0, 1)
    assert null.run("amplitudes, drawn", 0, 40) < first
    twice = null.arm("softmax, twice the rows, drawn", 8)
    twice(torch.randn(5, null.D))[0].sum().backward()
    assert twice.other.grad.any()
    assert torch.equal(twice.other.grad, twice.layer.router.weight.grad)
    assert null.spread([0.5]) == "+0.5000"  # one seed has no standard error
    assert null.main(["--seeds", "2", "--steps", "2"]) == 0
    table = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split(" | ")[0].strip("| ") for line in table] == list(null.ARMS)
