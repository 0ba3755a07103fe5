"""Metrics of an evaluation are those of all its samples, however they are cut into batches and over processes."""

import json
import math

import pytest
import torch

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.engine.logs import Moments, Pooled, highest, lowest, mean, pool, share_explained, std

from ..conftest import build_model
from ..distributed_support import launcher, run_forked
from ..pooled_run import POLICY, TRAINERS, evaluate


# Moments


@pytest.mark.parametrize("sizes", [(8, 1), (1, 1, 1), (5, 0, 2), (7,)])
def test_pooled_moments_are_those_of_all_values(sizes):
    torch.manual_seed(0)
    values = torch.randn(sum(sizes), dtype=torch.float64) * 3 + 100
    batches = values.split(sizes)
    expected = {mean: values.mean(), std: values.std(), lowest: values.min(), highest: values.max()}
    for statistic, value in expected.items():
        assert pool([Pooled(statistic, Moments.of(batch)) for batch in batches]) == pytest.approx(value.item())
    with_gaps = [torch.cat([batch, torch.tensor([torch.nan])]) for batch in batches]
    assert pool([Pooled(std, Moments.of(batch)) for batch in with_gaps]) == pytest.approx(values.std().item())


def test_statistics_of_too_few_values_are_unknown():
    empty, one = Moments.of(torch.tensor([torch.nan])), Moments.of(torch.tensor([2.0]))
    assert all(math.isnan(statistic(empty)) for statistic in (mean, std, lowest, highest))
    assert math.isnan(std(one)) and mean(one + empty) == mean(empty + one) == 2
    assert math.isnan(share_explained(one, one))
    assert Moments.alike(math.nan, 3) == Moments.alike(1.0, 0) == Moments()


def test_share_explained_by_values_of_several_batches():
    torch.manual_seed(1)
    targets = torch.randn(12, dtype=torch.float64)
    values = targets + 0.3 * torch.randn(12, dtype=torch.float64)
    expected = 1 - (targets - values).var() / targets.var()
    batches = zip(targets.split(5), (targets - values).split(5), strict=True)
    pooled = pool([Pooled(share_explained, Moments.of(r), Moments.of(e)) for r, e in batches])
    assert pooled == pytest.approx(expected.item())
    perfect, constant = torch.zeros(12), targets - 2.0
    assert Pooled(share_explained, Moments.of(targets), Moments.of(perfect)) == 1
    assert Pooled(share_explained, Moments.of(targets), Moments.of(constant)) == pytest.approx(0)


# Evaluation


def generations(name):
    return 1 if name == "ppo" else 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("runs")
    build_model("gpt2", len(tokenizer), seed=2).save_pretrained(folder / "reference")
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    """Metrics of each trainer's evaluation in one batch, which are of all samples by definition."""
    whole = {name: evaluate(folder, name, 18, generations(name)) for name in TRAINERS}
    # TRL shuffles a stream otherwise, so that the same completions follow other prompts
    return whole | {"stream": evaluate(folder, "reinforce", 18, 2, stream=True)}


def by_hand(rows):
    """What is logged of rewards and lengths, over all rows of the policy."""
    words = {13: "dog", 14: "sat", 15: "ran", 16: "ate", 17: "fish", 18: "bad"}
    rewards, lengths, ended = [], [], []
    for row in rows:
        lengths.append(len(row))
        if row[-1] == 1:
            ended.append(len(row))
        written = [token for token in row if token != 1]
        if row != [17, 17]:
            rewards.append(0.3 * len(written) - 3.3 * written.count(18))
    assert words[18] == "bad"
    rewards = torch.tensor(rewards, dtype=torch.float64)
    return {
        "eval_reward": rewards.mean().item(),
        "eval_reward_std": rewards.std().item(),
        "eval_rewards/rewards/mean": rewards.mean().item(),
        "eval_rewards/rewards/std": rewards.std().item(),
        "eval_bad_fraction": (rewards < -1).double().mean().item(),
        "eval_completions/mean_length": sum(lengths) / len(lengths),
        "eval_completions/min_length": min(lengths),
        "eval_completions/max_length": max(lengths),
        "eval_completions/clipped_ratio": 1 - len(ended) / len(lengths),
        "eval_completions/mean_terminated_length": sum(ended) / len(ended),
        "eval_completions/min_terminated_length": min(ended),
        "eval_completions/max_terminated_length": max(ended),
    }


@pytest.mark.trainer
@pytest.mark.parametrize("name", TRAINERS)
def test_evaluation_in_uneven_batches_is_of_all_samples(whole, folder, name):
    metrics = evaluate(folder, name, 8, generations(name))  # 8 + 1 rows of PPO, 8 + 8 + 2 of the others
    expected = by_hand(POLICY[: 9 * generations(name)])
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    compare(metrics, whole[name])


def compare(metrics, expected):
    """All metrics; how many rows the completions table keeps depends on the processes."""
    metrics, expected = ({k: v for k, v in each.items() if k != "without_reward"} for each in (metrics, expected))
    assert {"eval_loss", "eval_kl", "eval_entropy", "eval_return", "eval_letters"} <= metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.trainer
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_losses_that_are_means_over_samples_are_pooled_over_samples(folder, loss_type):
    together, apart = (evaluate(folder, "ppo", size, 1, loss_type=loss_type) for size in (9, 8))
    assert apart["eval_loss"] == pytest.approx(together["eval_loss"], rel=1e-4)


@pytest.mark.trainer
def test_each_evaluation_begins_anew(make, prompts):
    trainer = make(extra={"eval_dataset": prompts}, per_device_eval_batch_size=8, bad_reward_threshold=-1.0)
    assert trainer.predict(prompts).metrics["test_reward"] > -5  # is not logged
    trainer._metrics["eval"]["reward"].append(7.0)  # of an evaluation that failed
    trainer.reward_funcs = [lambda completions, **kwargs: [-5.0] * len(completions)]
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == -5 and metrics["eval_bad_fraction"] == 1
    assert not trainer._metrics["eval"]


@pytest.mark.trainer
@pytest.mark.parametrize(
    "trainer_cls", [ReinforceTrainer, RePULSeTrainer, PPOTrainer, RePULSePPOTrainer, RePULSeGRPOTrainer]
)
def test_each_evaluation_set_has_its_own_metrics(make, prompts, trainer_cls):
    sets = {name: prompts.select([i]).add_column("is_bad", [name == "bad"]) for i, name in enumerate(("good", "bad"))}
    best = {"metric_for_best_model": "eval_good_reward", "greater_is_better": True, "load_best_model_at_end": True}
    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    trainer = make(
        trainer_cls,
        reward_funcs=lambda completions, is_bad=None, **kwargs: [
            -5.0 if is_bad and is_bad[0] else 1.0 for _ in completions
        ],
        extra={"eval_dataset": sets},
        per_device_eval_batch_size=8,
        max_steps=1,
        **best,
        **saving,
    )
    trainer.train()
    assert trainer.state.best_metric == 1.0
    logged = [set(entry) for entry in trainer.state.log_history if any(key.startswith("eval_") for key in entry)]
    stems = [{key.removeprefix(f"eval_{name}_") for key in keys} for name, keys in zip(sets, logged, strict=True)]
    assert not any(key.startswith("eval_") for keys in stems for key in keys)
    expected = {"reward", "loss", "entropy"} | ({"proposal/reward"} if "RePULSe" in trainer_cls.__name__ else set())
    assert expected <= stems[0] & stems[1]
    modules = [trainer.model, *(second.module for second in trainer.second_models.values())]
    before = [p.clone() for module in modules for p in module.parameters()]
    metrics = trainer.evaluate()
    after = [p for module in modules for p in module.parameters()]
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))  # evaluation trains nothing
    assert (metrics["eval_good_reward"], metrics["eval_bad_reward"]) == (1.0, -5.0) and "eval_reward" not in metrics
    assert trainer.evaluate(sets["bad"], metric_key_prefix="held_out")["held_out_reward"] == -5.0


def test_the_best_model_by_none_of_the_sets_is_refused(make, prompts):
    sets = {"good": prompts, "bad": prompts}
    with pytest.raises(ValueError, match="`metric_for_best_model='reward'` is of none of the evaluation sets"):
        make(extra={"eval_dataset": sets}, per_device_eval_batch_size=8, metric_for_best_model="reward")


@pytest.mark.trainer
def test_training_metrics_count_each_sample_once(make, monkeypatch):
    """Of two updates that are logged together, one has a reward for a single sample."""
    trainer, calls = make(logging_steps=2, alpha=0.0, bad_reward_threshold=-1.0), []

    def reward(completions, **kwargs):
        calls.append(len(completions))
        return [float(i) for i in range(16)] if len(calls) == 1 else [-7.0, *[None] * 15]

    trainer.reward_funcs = [reward]
    trainer.train()
    log = next(log for log in trainer.state.log_history if "reward" in log)
    expected = torch.tensor([*range(16), -7.0])
    assert log["reward"] == pytest.approx(expected.mean().item())
    assert log["reward_std"] == pytest.approx(expected.std().item())
    assert log["bad_fraction"] == pytest.approx(1 / 17)


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.distributed
def test_rows_that_fill_up_the_last_batch_of_two_processes_do_not_count(whole, folder):
    """18 rows (PPO 9) in batches of 8 or 10 over both processes; a stream's rows are told as well."""
    run_forked([*launcher(2, None), "-m", "tests.pooled_run", str(folder)])
    for name, metrics in json.loads((folder / "result.json").read_text()).items():
        trainer = {"cut": "repulse"}.get(name, name)
        assert metrics["without_reward"] == 1  # in the table, which has no rows that fill up a batch
        # What functions log of a process's batch cannot be told apart by rows
        compare(metrics, whole[trainer] | {key: value for key, value in metrics.items() if key.endswith("letters")})
