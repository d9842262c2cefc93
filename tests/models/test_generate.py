"""Generation: greedy, sampling, end of text, seeds, batches."""

from __future__ import annotations

import pytest
import torch

from models.build import build_model
from models.generate import Sampling, choose, generate
from tests.models.tiny import FAMILIES, tiny_config, tokens


def text(model, prompt, sampling=None, **options) -> list[int]:
    options = {"max_new_tokens": 12, "eos_token_ids": ()} | options
    return [step[0] for step in generate(model, [prompt], sampling, **options)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_the_argmax_of_the_whole_text(family: str) -> None:
    model = build_model(tiny_config(family), dtype=torch.float64, seed=1)
    row = tokens(model.config, 1, 6)[0].tolist()
    new = text(model, row)
    whole = torch.tensor([row + new])
    with torch.no_grad():
        best = model.eval()(whole, logits=True).logits.argmax(-1)[0]
    assert new == best[5:-1].tolist()
    assert len(set(new)) > 2


def test_batch_of_different_lengths_gives_each_its_own_text() -> None:
    model = build_model(tiny_config("glm4_moe"), dtype=torch.float64)
    prompts = [tokens(model.config, 1, n, seed=n)[0].tolist() for n in (1, 7, 3)]
    together = list(generate(model, prompts, max_new_tokens=10, eos_token_ids=()))
    for row, prompt in enumerate(prompts):
        assert [step[row] for step in together] == text(model, prompt, max_new_tokens=10)


def test_ended_prompts_are_silent_and_the_rest_goes_on() -> None:
    model = build_model(tiny_config("mixtral"), dtype=torch.float64)
    prompts = [tokens(model.config, 1, 4, seed=n)[0].tolist() for n in (1, 2)]
    first, second = (text(model, prompt) for prompt in prompts)
    stop = next(token for token in first[2:] if token not in second)
    place = first.index(stop)
    steps = list(generate(model, prompts, max_new_tokens=12, eos_token_ids=[stop]))
    assert [step[0] for step in steps] == first[: place + 1] + [None] * (12 - place - 1)
    assert [step[1] for step in steps] == second
    alone = list(generate(model, prompts[:1], max_new_tokens=12, eos_token_ids=[stop]))
    assert len(alone) == place + 1
    # the config's own end-of-text token, when none is given
    model.config = model.config.model_copy(update={"eos_token_id": [1, stop]})
    assert len(list(generate(model, prompts[:1], max_new_tokens=12))) == place + 1


def test_seed_fixes_the_draws() -> None:
    model = build_model(tiny_config("olmoe", initializer_range=0.05))
    prompt = [5, 6, 7]
    texts = [text(model, prompt, Sampling(1.0, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    torch.manual_seed(123)  # the global state plays no part
    assert text(model, prompt, Sampling(1.0, seed=1)) == texts[0]


def test_model_is_left_as_it_was() -> None:
    model = build_model(tiny_config("olmoe")).train()
    steps = generate(model, [[3]], max_new_tokens=5)
    next(steps)
    assert not model.training
    steps.close()
    assert model.training
    assert all(p.grad is None for p in model.parameters())


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).log_softmax(-1)
P = LOGITS[0].exp()


def frequencies(sampling: Sampling, draws: int = 20_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    chosen = choose(LOGITS.expand(draws, 4), sampling, generator)
    return torch.bincount(chosen, minlength=4) / draws


def test_draws_follow_the_probabilities() -> None:
    assert (frequencies(Sampling(1.0)) - P).abs().max() < 0.01
    cold = (LOGITS[0] / 0.5).softmax(-1)
    assert (frequencies(Sampling(0.5)) - cold).abs().max() < 0.01


def test_top_k_and_top_p_cut() -> None:
    two = torch.tensor([P[0], P[1], 0, 0]) / (P[0] + P[1])
    assert (frequencies(Sampling(1.0, top_k=2)) - two).abs().max() < 0.01
    # P = .644, .237, .087, .032: the first alone reaches 0.6, the first two reach 0.65 to 0.88
    assert frequencies(Sampling(1.0, top_p=0.6)).tolist() == [1, 0, 0, 0]
    assert (frequencies(Sampling(1.0, top_p=0.65)) - two).abs().max() < 0.01
    assert (frequencies(Sampling(1.0, top_p=0.88)) - two).abs().max() < 0.01
    assert (frequencies(Sampling(1.0, top_p=1.0)) - P).abs().max() < 0.01
    assert frequencies(Sampling(1.0, top_p=0.01)).tolist() == [1, 0, 0, 0]
    assert frequencies(Sampling(1.0, top_k=100)).count_nonzero() == 4


def test_mistakes_are_refused() -> None:
    model = build_model(tiny_config("olmoe"))
    for settings, match in [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p=1\.5"),
        ({"top_k": 3}, "do nothing at temperature=0"),
    ]:
        with pytest.raises(ValueError, match=match):
            Sampling(**settings)
    for prompts, match in [([], "at least one token"), ([[1], []], "at least one token"),
                           ([[96]], r"\[0, 96\)"), ([[-1]], r"\[0, 96\)")]:  # fmt: skip
        with pytest.raises(ValueError, match=match):
            generate(model, prompts, max_new_tokens=3)
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        generate(model, [[1]], max_new_tokens=0)
