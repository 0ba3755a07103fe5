"""The tail report along a run, where the model or the data set are not as usual."""

import pytest

from trl_repulse import ReinforceTrainer
from trl_repulse.evaluation.callback import TailReportCallback


@pytest.mark.trainer
@pytest.mark.parametrize("every", [2, 3])
def test_the_last_report_is_of_the_best_model_if_that_is_loaded(make, prompts, monkeypatch, every):
    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    options = saving | best | {"max_steps": 4, "learning_rate": 0.1, "per_device_eval_batch_size": 16}
    trainer = make(ReinforceTrainer, extra={"eval_dataset": prompts}, **options)
    evaluated, evaluate = [], trainer.evaluate

    def falling(*args, **kwargs):  # the first is the best
        metrics = evaluate(*args, **kwargs) | {"eval_reward": -float(len(evaluated))}
        evaluated.append(metrics)
        return metrics

    monkeypatch.setattr(trainer, "evaluate", falling)
    callback = TailReportCallback(trainer, prompts, 50, thresholds=[-1.0], every=every)
    trainer.add_callback(callback)
    trainer.train()
    assert trainer.state.best_global_step == 1
    assert [entry["update"] for entry in callback.history] == [every, 4]
    assert callback.history[-1]["report"]["mean"].value == callback._sample().mean()
    logged = [entry["tail/mean"] for entry in trainer.state.log_history if "tail/mean" in entry]
    assert logged[-1] == callback.history[-1]["report"]["mean"].value and len(logged) == 2 + (every == 2)
