"""Draws from real models: pure sampling, scores that enumeration confirms, rewards as TRL gives them."""

import math

import pytest
import torch
from transformers import GenerationConfig

from trl_repulse.evaluation.log_probs import completion_logits
from trl_repulse.evaluation.rare import sampling as rare_sampling
from trl_repulse.evaluation.rare.components import Component, log_prob
from trl_repulse.evaluation.rare.estimates import prob_bad
from trl_repulse.evaluation.rare.mixture import largest_normalization_error
from trl_repulse.evaluation.rare.sampling import draw, find_temperature

from ..conftest import build_model, build_tokenizer
from ..reward_models import save_model


DOG = 13  # " dog"


@pytest.fixture
def models(architecture, tokenizer):
    return [build_model(architecture, len(tokenizer), seed) for seed in (0, 1)]


def test_log_probabilities_are_those_of_enumeration(models, tokenizer, prompts, evaluator):
    """Every completion there is, of each prompt, under each model."""
    rows = [[token for token in row if token >= 0] for row in evaluator.completion_ids.tolist()]
    for model in models:
        for prompt, expected in zip(prompts["prompt"], evaluator.log_probs(model), strict=True):
            found = log_prob(*completion_logits(model, [tokenizer(prompt)["input_ids"]] * len(rows), rows))
            assert torch.allclose(found, expected, atol=1e-4)
            assert float(found.exp().sum()) == pytest.approx(1, abs=1e-4)


def test_draws_estimate_what_enumeration_knows(models, tokenizer, prompts, evaluator, reward):
    def of_text(prompts, completions):  # the evaluator judges the whole text
        return reward([prompt + completion for prompt, completion in zip(prompts, completions, strict=True)])

    draws = draw(models, tokenizer, prompts["prompt"], of_text, (300, 200), 2, batch_size=128, seed=1)
    assert draws.sample.counts == (300, 200) and draws.sample.log_density.shape == (4, 500, 2)
    exact = evaluator.log_probs(models[0]).exp()
    for threshold in (-2.0, 0.1):
        truth = float((exact * (evaluator.rewards < threshold)).sum(1).mean())
        estimate = prob_bad(draws.sample, threshold)
        assert estimate.low < truth < estimate.high and estimate.high / estimate.low < 2.5
    assert largest_normalization_error(draws.sample) < 4
    assert draws.sample.rewards[0].tolist() == reward([prompts["prompt"][0] + text for text in draws.texts[0]])


class Tempered(torch.nn.Module):
    """A model at a temperature, for enumeration."""

    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, **inputs):
        output = self.model(**inputs)
        output.logits = output.logits / self.temperature
        return output


def test_a_hot_proposal_is_a_component_of_its_own(models, tokenizer, prompts, evaluator, reward, monkeypatch):
    policy, proposal = models
    passes = []

    def counted(model, *args):
        passes.append(model)
        return completion_logits(model, *args)

    monkeypatch.setattr(rare_sampling, "completion_logits", counted)
    counts, hot_proposal = (20, 300, 300), Component(proposal, temperature=3.0)
    given = [policy, proposal, hot_proposal], tokenizer, prompts["prompt"], reward, counts, 2
    draws = draw(*given, batch_size=1000, seed=2)
    assert len(passes) == 2 * 4  # one pass a model and prompt scores all components
    hot = evaluator.log_probs(Tempered(proposal, 3.0))
    texts = tokenizer.batch_decode(
        [[token for token in row if token >= 0] for row in evaluator.completion_ids.tolist()], skip_special_tokens=True
    )
    for i, row in enumerate(draws.texts):
        known = {}
        for text, value in zip(texts, hot[i].tolist(), strict=True):
            known.setdefault(text, []).append(value)  # texts of other tokens, where special ones are left out
        for text, value in zip(row, draws.sample.log_density[i, :, 2].tolist(), strict=True):
            assert min(abs(value - other) for other in known[text]) < 1e-4
        # It draws as it is scored
        mean = float((hot[i].exp() * hot[i]).sum())
        deviation = float((hot[i].exp() * hot[i].square()).sum() - mean**2) ** 0.5
        assert abs(float(draws.sample.log_density[i, 320:, 2].mean()) - mean) < 4 * deviation / 300**0.5
    assert largest_normalization_error(draws.sample) < 4


@pytest.mark.parametrize("architecture", ["gpt2"], indirect=True)
@pytest.mark.parametrize("divergence", [0.05, 0.3])
def test_the_temperature_of_a_divergence(models, tokenizer, prompts, evaluator, divergence):
    model = models[1]
    temperature = find_temperature(model, tokenizer, prompts["prompt"], 2, divergence, num_samples=200)
    q, hot = evaluator.log_probs(model), evaluator.log_probs(Tempered(model, temperature))
    assert float((q.exp() * (q - hot)).sum(dim=1).mean()) == pytest.approx(divergence, rel=0.1)
    assert find_temperature(model, tokenizer, prompts["prompt"], 2, 100.0, num_samples=2) == pytest.approx(10)
    with pytest.raises(ValueError, match="above 0"):
        find_temperature(model, tokenizer, prompts["prompt"], 2, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({name: 0}, f"`{name}=0` must be at least 1")
            for name in ("max_completion_length", "num_samples", "batch_size")
        ),
        *(({"divergence": value}, f"`divergence={value}` must be above 0") for value in (-1.0, math.inf, math.nan)),
        ({"prompts": []}, "`prompts` is empty"),
    ],
)
def test_what_a_temperature_cannot_be_found_with(tokenizer, change, message):
    arguments = {"prompts": ["the cat"], "max_completion_length": 2} | change
    with pytest.raises(ValueError, match=message):
        find_temperature(build_model("gpt2", len(tokenizer)), tokenizer, **arguments)


@pytest.mark.parametrize("architecture", ["gpt2"], indirect=True)
def test_tokens_of_probability_zero_have_no_part_in_the_temperature(models, tokenizer, prompts, monkeypatch):
    model, forward = models[1], type(models[1]).forward

    def without_dogs(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits[..., DOG] = -math.inf
        return output

    free = find_temperature(model, tokenizer, prompts["prompt"], 2, 0.1)
    monkeypatch.setattr(type(model), "forward", without_dogs)
    assert find_temperature(model, tokenizer, prompts["prompt"], 2, 0.1) == pytest.approx(free, rel=0.3)


def test_settings_that_a_model_was_saved_with_play_no_part(models, tokenizer, prompts, reward):
    arguments, state = (tokenizer, prompts["prompt"][:2], reward, (20, 20), 3), torch.get_rng_state()
    plain = draw(models, *arguments, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    saved = GenerationConfig(
        temperature=0.1, top_k=1, do_sample=False, repetition_penalty=5.0, max_length=3, suppress_tokens=[4, 5, 6]
    )
    saved.eos_token_id, saved.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    for model in models:
        model.generation_config = saved
        model.train()
    bent = draw(models, *arguments, seed=3)
    assert bent.texts == plain.texts and torch.equal(bent.sample.log_density, plain.sample.log_density)
    assert all(model.training and model.generation_config is saved for model in models)
    assert draw(models, *arguments, seed=4).texts != plain.texts


def test_progress_is_shown(models, tokenizer, prompts, reward, capfd):
    for progress in (True, False):
        draw(models, tokenizer, prompts["prompt"][:1], reward, (4, 4), 2, batch_size=2, progress=progress)
        shown = capfd.readouterr().err
        # Of eight completions, each drawn and scored
        assert ("drawing and scoring: 100%" in shown and "16/16" in shown and "rewards: 100%" in shown) == progress


def test_several_end_tokens(tokenizer, prompts, reward):
    model = build_model("gpt2", len(tokenizer))
    model.generation_config.eos_token_id = [1, DOG]
    draws = draw([model], tokenizer, prompts["prompt"][:1], reward, (200,), 3)
    ended = [text for text in draws.texts[0] if " dog" in text]
    assert ended and all(text.index(" dog") == len(text) - 4 for text in ended)
    assert float(draws.sample.log_density.max()) < 0
    # A completion that ends at once has the first token's probability
    ids = tokenizer(prompts["prompt"][0])["input_ids"]
    first = log_prob(*completion_logits(model, [ids] * 2, [[1], [DOG]]))
    with torch.no_grad():
        expected = model.eval()(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[[1, DOG]]
    assert torch.allclose(first, expected.double(), atol=1e-5)


def test_a_reward_model_reads_prompt_and_completion(tokenizer, prompts):
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, input_ids, attention_mask):
            length = (attention_mask * self.weight).sum(-1, keepdim=True)
            return type("Output", (), {"logits": length})()

    model = build_model("gpt2", len(tokenizer))
    draws = draw([model], tokenizer, prompts["prompt"], Head(), (10,), 2, reward_tokenizer=tokenizer)
    for prompt, texts, row in zip(prompts["prompt"], draws.texts, draws.sample.rewards, strict=True):
        assert row.tolist() == [2.0 * len(tokenizer(prompt + text)["input_ids"]) for text in texts]
    with pytest.raises(ValueError, match="reward_tokenizer"):
        draw([model], tokenizer, prompts["prompt"], Head(), (10,), 2)


def test_messages(tokenizer, reward):
    seen = []

    def judge(prompts, completions):
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(prompts)

    model, messages = build_model("gpt2", len(tokenizer)), [{"role": "user", "content": "the cat"}]
    templated = build_tokenizer(chat_template="{% for m in messages %}{{ m.content }} {% endfor %}sat")
    draws = draw([model], templated, [messages], judge, (10,), 2, seed=1)
    assert draws.texts == draw([model], tokenizer, ["the cat sat"], reward, (10,), 2, seed=1).texts
    assert all(prompt == messages and len(completion) == 1 for prompt, completion in seen)
    assert {completion[0]["content"] for _, completion in seen} == set(draws.texts[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": (4, 4)}, "`counts` has 2 numbers for 1 components"),
        ({"prompts": []}, "`prompts` is empty"),
        ({"prompts": ["fish " * 40]}, "context"),
        ({"max_completion_length": 0}, "`max_completion_length=0` must be at least 1"),
        ({"batch_size": 0}, "`batch_size=0` must be at least 1"),
        ({"reward": lambda completions, answer: [0.0]}, "needs `answer`, but the prompts have no such column"),
        ({"reward": lambda prompts, completions: [None] * len(prompts)}, "`None`"),
        ({"reward": lambda prompts, completions: [1.0]}, "rewards for"),
        ({"reward": lambda prompts, completions: [math.inf] * len(prompts)}, "finite"),
        ({"reward": lambda prompts, completions: [math.nan] * len(prompts)}, "nan"),
    ],
)
def test_what_is_refused(tokenizer, reward, change, message):
    arguments = {"prompts": ["the cat"], "reward": reward, "counts": (8,), "max_completion_length": 2} | change
    with pytest.raises(ValueError, match=message):
        draw([build_model("gpt2", len(tokenizer))], tokenizer, **arguments)


def test_models_of_different_vocabularies_are_refused(tokenizer, reward):
    models = [build_model("gpt2", len(tokenizer) + more) for more in (0, 1)]
    with pytest.raises(ValueError, match="share one"):
        draw(models, tokenizer, ["the cat"], reward, (4, 4), 2)


TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if thinking is defined %} bad{% endif %}{% endfor %}"


def test_a_template_takes_further_variables(tmp_path):
    """Policy, temperature and reward model read them: draws and scores are those of the prompts in full."""
    tokenizer = build_tokenizer(chat_template=TEMPLATE)
    model = build_model("gpt2", len(tokenizer))
    messages = [[{"role": "user", "content": text}] for text in ("the cat", "fish")]
    full, template = ["the cat bad", "fish bad"], {"chat_template_kwargs": {"thinking": False}}
    seen = []

    def reward(prompts, completions, **kwargs):
        texts = completions if isinstance(completions[0], str) else [each[0]["content"] for each in completions]
        seen.extend(texts)
        return [-float(len(text)) for text in texts]

    cases = (messages, template), (full, {}), (messages, {})
    found = [
        draw([model, Component(model, temperature=2.0)], tokenizer, prompts, reward, (8, 8), 2, **more)
        for prompts, more in cases
    ]
    assert found[0].texts == found[1].texts and seen
    assert torch.equal(found[0].sample.log_density, found[1].sample.log_density)
    assert not torch.equal(found[0].sample.log_density, found[2].sample.log_density)  # the control
    temperatures = [find_temperature(model, tokenizer, prompts, 2, 0.1, **more) for prompts, more in cases]
    assert temperatures[0] == temperatures[1] != temperatures[2]
    judge = save_model(tmp_path / "judge", "llama", tokenizer, num_labels=1)[1]  # which reads the template as well
    one = [[{"role": "user", "content": "fish"}]]
    rewards = [
        draw([model], tokenizer, one, judge, (8,), 2, reward_tokenizer=tokenizer, **more) for more in (template, {})
    ]
    common = [dict(zip(each.texts[0], each.sample.rewards[0].tolist(), strict=True)) for each in rewards]
    assert any(common[0][text] != common[1][text] for text in common[0].keys() & common[1].keys())
