"""Exact evaluation along a run: counts, clocks, history, table, figure."""

import math
from types import SimpleNamespace

import pytest
import torch
from matplotlib.image import imread
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.worlds import exact_tracking, two_tokens
from examples.worlds.exact import ExactEvaluator
from examples.worlds.exact_tracking import BadTokenTrackingCallback, ExactTrackingCallback
from trl_repulse import ReinforceConfig, ReinforceTrainer, RePULSeConfig, RePULSeTrainer
from trl_repulse.evaluation import tracking as tracking_module
from trl_repulse.evaluation.plots import logged_panels, plot_training
from trl_repulse.evaluation.tracking import TrackingCallback

from ..conftest import QUIET


pytestmark = pytest.mark.trainer

BASE = {"max_completion_length": 1, "per_device_train_batch_size": 8, "num_generations": 4, "beta": 0.0, **QUIET}
BASE |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}


def make_trainer(folder, repulse=True, reward=None, model=None, **settings):
    config, trainer = (RePULSeConfig, RePULSeTrainer) if repulse else (ReinforceConfig, ReinforceTrainer)
    if repulse:
        settings = {"proposal": "learned", "potential": "tilted", "target_dist_beta": -1.0, "alpha": 1.0} | settings
    return trainer(
        model=two_tokens.policy_path() if model is None else model,
        reward_funcs=two_tokens.reward_model_path() if reward is None else reward,
        args=config(output_dir=str(folder), **BASE | settings),
        train_dataset=two_tokens.load_prompts().repeat(4),
    )


def initial_policy():
    return AutoModelForCausalLM.from_pretrained(two_tokens.policy_path())


@pytest.fixture(scope="module")
def evaluator():
    tokenizer = AutoTokenizer.from_pretrained(two_tokens.policy_path())

    def reward(texts):
        return torch.tensor([float(len(text)) for text in texts])

    prompts, bad = two_tokens.load_prompts()["prompt"][:3], two_tokens.bad_token_ids(tokenizer)
    return ExactEvaluator(tokenizer, prompts, reward, bad, 1, reference_model=initial_policy())


def keys(report):
    return {"expected_reward": report.expected_reward, "log_prob_bad": report.log_prob_bad, "kl": report.kl}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"alpha": 0.0},
        {"proposal": "policy"},
        {"proposal": "hot_policy", "proposal_temperature": 2.0, "bad_reward_threshold": 0.0},
        {"num_proposal_generations": 6, "proposal_updates_per_step": 2},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
        {"steps_per_generation": 2, "num_iterations": 2},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
def test_samples_are_those_drawn(tmp_path, settings):
    drawn = 0

    def reward(completions, **kwargs):
        nonlocal drawn
        drawn += len(completions)
        return [float(len(completion)) for completion in completions]

    trainer = make_trainer(tmp_path, reward=reward, max_steps=5, **settings)
    tracking = TrackingCallback(trainer)
    trainer.add_callback(tracking)
    trainer.train()
    assert tracking.updates == 5
    assert tracking.samples == drawn > 0


def test_history(tmp_path, evaluator):
    trainer = make_trainer(tmp_path, max_steps=5)
    tracking = ExactTrackingCallback(evaluator, trainer, every=2)
    trainer.add_callback(tracking)
    trainer.train()
    history = tracking.history
    assert [entry["update"] for entry in history] == [0, 2, 4, 5]
    assert [entry["samples"] for entry in history] == [0, 32, 64, 80]
    seconds = [entry["seconds"] for entry in history]
    assert seconds == sorted(seconds)
    assert tracking.seconds >= seconds[-1] > seconds[0] >= 0
    start = keys(evaluator.evaluate(initial_policy()))
    assert history[0]["policy"] == history[0]["proposal"] == pytest.approx(start)
    assert start["kl"] == pytest.approx(0, abs=1e-6)
    assert history[-1]["policy"] == pytest.approx(keys(evaluator.evaluate(trainer.model)))
    assert history[-1]["proposal"] == pytest.approx(keys(evaluator.evaluate(trainer.proposal.module)))
    assert history[-1]["policy"]["kl"] > 1e-5
    assert history[-1]["policy"] != history[-1]["proposal"]


def test_a_second_run_starts_anew(tmp_path, evaluator):
    """In micro-batches too."""
    trainer = make_trainer(tmp_path, max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    tracking = ExactTrackingCallback(evaluator, trainer)
    trainer.add_callback(tracking)
    trainer.train()
    middle = tracking.history[-1]["policy"]
    trainer.train()
    assert [(entry["update"], entry["samples"]) for entry in tracking.history] == [(0, 0), (2, 32)]
    assert tracking.history[0]["policy"] == pytest.approx(middle)


@pytest.mark.invariant
def test_tracking_leaves_the_run_alone(tmp_path, evaluator):
    weights = []
    for tracked in (False, True):
        trainer = make_trainer(tmp_path, max_steps=3)
        if tracked:
            trainer.add_callback(ExactTrackingCallback(evaluator, trainer, every=1))
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    assert torch.equal(*weights)


def test_evaluation_is_not_on_the_clock(tmp_path, evaluator, monkeypatch):
    """On a clock that an evaluation moves by 100 s and a step by one."""
    now, evaluate = [0.0], evaluator.evaluate

    def moves(seconds, function=lambda *_: None):
        return lambda *args: now.__setitem__(0, now[0] + seconds) or function(*args)

    for module in (tracking_module, exact_tracking):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(evaluator, "evaluate", moves(100.0, evaluate))
    trainer = make_trainer(tmp_path, repulse=False, max_steps=2)
    monkeypatch.setattr(trainer, "training_step", moves(1.0, trainer.training_step))
    tracking = ExactTrackingCallback(evaluator, trainer, every=1)
    trainer.add_callback(tracking)
    trainer.train()
    assert [entry["seconds"] for entry in tracking.history] == [0.0, 1.0, 2.0] and now[0] == 402.0
    assert all(entry["proposal"] is None for entry in tracking.history)  # of REINFORCE
    now[0] += 5.0
    assert tracking.seconds == 2.0  # it has stopped


@pytest.mark.thorough
def test_from_trainer_ends_completions_and_weighs_rewards_as_the_trainer_does(tmp_path):
    plain = make_trainer(tmp_path, max_steps=1, max_completion_length=2)
    prompts, bad = two_tokens.load_prompts()["prompt"][:1], two_tokens.bad_token_ids(plain.processing_class)
    policy, tokens = initial_policy(), plain.processing_class(prompts[0], return_tensors="pt")
    first = policy(**tokens).logits[0, -1].argmax().item()
    policy.generation_config.eos_token_id = [policy.generation_config.eos_token_id, first]
    trainer = make_trainer(tmp_path, model=policy, max_steps=1, max_completion_length=2, reward_weights=[-2.0])
    assert first in trainer.eos_token_ids
    found = ExactTrackingCallback.from_trainer(trainer, prompts, bad, initial_policy(), every=3)
    assert found.every == 3 and found.evaluator.evaluate(initial_policy()).kl == pytest.approx(0, abs=1e-6)
    expected = BadTokenTrackingCallback(trainer, prompts, bad)._evaluate(policy)["log_prob_bad"]
    assert found._evaluate(policy)["log_prob_bad"] == pytest.approx(expected, abs=1e-5)
    usual = ExactTrackingCallback.from_trainer(plain, prompts, bad)
    assert usual._evaluate(policy)["log_prob_bad"] != pytest.approx(expected, abs=1e-2)
    for evaluator, weight in ((usual.evaluator, 1.0), (found.evaluator, -2.0)):
        ends = (evaluator.completion_ids[:, 0] == 1).nonzero()[0, 0]
        assert evaluator.rewards[0, ends].item() == pytest.approx(weight * usual.evaluator.rewards[0, 0].item())


def test_what_is_refused(tmp_path, evaluator, reward):
    trainer = make_trainer(tmp_path, False)
    with pytest.raises(ValueError, match="`every=0` must be at least 1"):
        ExactTrackingCallback(evaluator, trainer, every=0)
    with pytest.raises(ValueError, match="A prompt of .* exceed the model's context of .* shorten or drop the prompt"):
        ExactTrackingCallback.from_trainer(trainer, ["the " * 500], [0])
    with pytest.raises(ValueError, match="needs plain-text prompts; evaluate conversations by sampling"):
        ExactTrackingCallback.from_trainer(trainer, [[{"role": "user", "content": "a"}]], [0])
    with pytest.raises(ValueError, match="needs `reward_funcs` to be one reward model; build `ExactEvaluator`"):
        ExactTrackingCallback.from_trainer(make_trainer(tmp_path, False, reward=reward), ["the"], [0])
    for given, prompt, message in (
        (trainer, [{"role": "user", "content": "the "}], "plain-text prompts"),
        (trainer, "the " * 500, "exceed the model's context"),
        (make_trainer(tmp_path, False, max_completion_length=3), "the ", "`max_completion_length=3` is too long to"),
    ):
        with pytest.raises(ValueError, match=message):
            BadTokenTrackingCallback(given, [prompt], [4])


TWO = {"max_completion_length": 2, "per_device_train_batch_size": 32}


def test_bad_tokens_along_a_run(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2, **TWO)
    tokenizer, prompts = trainer.processing_class, two_tokens.load_prompts()["prompt"][:2]
    bad = two_tokens.bad_token_ids(tokenizer)
    tracking = BadTokenTrackingCallback(trainer, prompts, bad, every=1, batch_size=128)
    trainer.add_callback(tracking)
    trainer.train()
    assert [(entry["update"], entry["samples"]) for entry in tracking.history] == [(0, 0), (1, 64), (2, 128)]
    evaluator = ExactEvaluator(tokenizer, prompts, lambda texts: torch.zeros(len(texts)), bad, 2)
    for name, model in {"policy": trainer.model, "proposal": trainer.proposal.module}.items():
        expected = evaluator.evaluate(model).log_prob_bad
        assert tracking.history[-1][name] == {"log_prob_bad": pytest.approx(expected, abs=1e-5)}

    results = tracking.results()
    assert results["initial"] == tracking.history[0]["policy"]
    assert results["final"] == tracking.history[-1]["policy"]
    rows = {line[:22].strip(): line[22:].split() for line in tracking.table({"reward": 1.5}).splitlines()}
    start, end = (f"{results[name]['log_prob_bad']:.4f}" for name in ("initial", "final"))
    assert rows["exact log P(bad), nats"] == [start, end]
    assert rows["reward"] == ["1.5000"]
    assert not {"expected reward", "KL to reference, nats per completion"} & set(rows)
    plot_training([], tmp_path / "training.png", tracking.panels())
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("run"), max_steps=1)


class TestFiles:
    """What is written of a run, here an invented one."""

    @pytest.fixture
    def tracking(self, untrained, evaluator):
        tracking = ExactTrackingCallback(evaluator, untrained)
        tracking.updates = 20
        tracking.history = [
            {
                "update": update,
                "samples": 64 * update,
                "seconds": 0.5 * update,
                "policy": {"expected_reward": 1.0 + update, "log_prob_bad": bad, "kl": kl},
                "proposal": {"expected_reward": -1.0 * update, "log_prob_bad": -1.0, "kl": 0.5},
            }
            for update, bad, kl in ((0, -2.5, 0.0), (10, -4.0, 0.25), (20, -math.inf, None))
        ]
        return tracking

    def test_results(self, tracking):
        costs = {"samples": 0, "policy_updates": 20, "seconds": 0.0}
        assert TrackingCallback(tracking.trainer).results() == costs | {"policy_updates": 0}
        ends = {"initial": tracking.history[0]["policy"], "final": tracking.history[-1]["policy"]}
        assert tracking.results() == costs | ends | {"history": tracking.history}

    def test_table(self, tracking):
        lines = tracking.table({}).splitlines()
        assert lines[0].split() == ["start", "end"]
        assert lines[2].split() == ["expected", "reward", "1.0000", "21.0000"]
        assert lines[3].split() == ["exact", "log", "P(bad),", "nats", "-2.5000", "-inf"]
        assert lines[4].split() == ["KL", "to", "reference,", "nats", "per", "completion", "0.0000", "-"]
        assert [line.split()[0] for line in lines[5:]] == ["samples", "seconds"]
        assert len(set(map(len, lines))) == 1
        table = TrackingCallback(tracking.trainer).table({"reward": 0.123456, "step": 3})
        lines = [line.split() for line in table.splitlines()]
        assert ["reward", "0.1235"] in lines and ["step", "3"] in lines and ["samples", "drawn", "0"] in lines

    def test_figure(self, tmp_path, tracking):
        path = tmp_path / "new" / "training.png"
        plot_training([], path, tracking.panels())
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000
        tracking.history = [entry | {"proposal": None} for entry in tracking.history]
        tracking.history[0]["policy"]["log_prob_bad"] = None
        assert tracking.panels()[1][-1] == {"policy": [(640, -4.0)]}  # what is finite
        plot_training([], tmp_path / "training.pdf", tracking.panels())
        assert (tmp_path / "training.pdf").read_bytes().startswith(b"%PDF")

    @pytest.mark.parametrize("exact", [True, False])
    def test_figure_of_what_was_logged(self, tmp_path, tracking, exact):
        logs = [
            {"step": 5, "reward": 1.0, "proposal/reward": -1.0, "proposal/ess": 3.0, "kl": None},
            {"step": 10, "reward": 2.0, "negative/ess": 4.0, "bad_fraction": 0.5, "proposal/log_z_gap": 1.0},
            {"step": 10, "train_runtime": 1.0},
        ]
        assert [(title, series) for title, _, _, series in logged_panels(logs)] == [
            ("Reward of samples", {"policy": [(5, 1.0), (10, 2.0)], "proposal": [(5, -1.0)]}),
            ("Bad samples", {"policy": [(10, 0.5)]}),
            ("Effective sample size", {"proposal": [(5, 3.0), (10, 4.0)]}),
            ("Collapse gauge: gap of log Z", {"proposal": [(10, 1.0)]}),
        ]
        plot_training(logs, tmp_path / "training.png", tracking.panels() if exact else ())
        image = imread(tmp_path / "training.png")
        assert image.shape[0] / image.shape[1] == pytest.approx((2 if exact else 1) * 3.4 / (4 * 4.2), rel=0.01)

    def test_the_figure_of_the_hot_policy_has_probabilities_on_a_logarithmic_axis(self, tmp_path, monkeypatch):
        figures = []
        monkeypatch.setattr("trl_repulse.evaluation.plots._save", lambda figure, path: figures.append(figure))
        logs = [
            {"step": step, "reward": 1.0, "negative/ess": 1.0, "negative/p_bad": p}
            for step, p in ((1, 1e-2), (2, 0.0))
        ]
        plot_training(logs, tmp_path / "hot.png")
        panels = {panel.get_title(loc="left"): panel.get_yscale() for panel in figures[0].axes}
        assert panels == {"Reward of samples": "linear", "Estimated P(bad)": "log"}

    def test_the_kl_of_a_figure_is_per_completion(self):
        [panel] = logged_panels([{"step": 1, "kl": 0.5, "completions/mean_length": 4.0}, {"step": 2, "kl": 0.5}])
        assert panel[:2] == ("KL to reference", "nats per completion") and panel[-1] == {"policy": [(1, 2.0)]}

    def test_nothing_to_draw(self, tmp_path):
        with pytest.raises(ValueError, match="nothing to draw; log at least once"):
            plot_training([{"step": 1, "train_runtime": 1.0}], tmp_path / "training.png")
