"""A run that is interrupted and resumed ends as one that is not: both models, to the last bit."""

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.engine.resume import ResumedSampler, find_checkpoint


pytestmark = [pytest.mark.trainer, pytest.mark.thorough]

ADAPTERS = {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], init_lora_weights=False)}
BASE = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 1, "max_steps": 6, "learning_rate": 1e-2}
ONE_BLOCK = {"per_device_train_batch_size": 4, "steps_per_generation": 4, "gradient_accumulation_steps": 1}
HOT = ONE_BLOCK | {"proposal": "hot_policy", "proposal_temperature": 2.0}
MOVING = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.3}
CASES = {
    "an update a generation": (RePULSeTrainer, {"per_device_train_batch_size": 8}),
    "accumulated": (RePULSeTrainer, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    "four updates a generation": (RePULSeTrainer, ONE_BLOCK),
    "each twice": (RePULSeTrainer, {"per_device_train_batch_size": 8, "num_iterations": 2}),
    "cut prompts": (RePULSeTrainer, ONE_BLOCK | {"per_device_train_batch_size": 2, "steps_per_generation": 8}),
    "proposal after": (RePULSeTrainer, ONE_BLOCK | {"proposal_update_order": "after", "beta": 0.1}),
    "adapters": (RePULSeTrainer, ONE_BLOCK | {"beta": 0.1}),
    "hot policy": (RePULSeTrainer, HOT),
    "REINFORCE": (ReinforceTrainer, ONE_BLOCK),
    "PPO": (PPOTrainer, ONE_BLOCK | {"num_iterations": 2}),
    "PPO, adapters": (PPOTrainer, ONE_BLOCK | {"beta": 0.1}),
    "RePULSe on PPO": (RePULSePPOTrainer, ONE_BLOCK | {"num_iterations": 2, "beta": 0.1}),
    "RePULSe on PPO, accumulated": (
        RePULSePPOTrainer,
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    ),
    "RePULSe on PPO, adapters": (RePULSePPOTrainer, ONE_BLOCK | {"beta": 0.1}),
    "hot policy on PPO": (RePULSePPOTrainer, HOT),
    "RePULSe on GRPO": (RePULSeGRPOTrainer, ONE_BLOCK | {"num_iterations": 2, "beta": 0.1}),
    "hot policy on GRPO": (RePULSeGRPOTrainer, HOT),
    "moving reference": (RePULSeTrainer, {"per_device_train_batch_size": 8} | MOVING),
    "PPO, moving reference": (PPOTrainer, ONE_BLOCK | MOVING),
}


EXTRA = {
    "adapters": ADAPTERS,
    "RePULSe on PPO, adapters": ADAPTERS,
    "PPO, adapters": ADAPTERS
    | {"value_peft_config": LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)},
}


def weights(trainer):
    second = [vars(trainer)[name] for name in ("proposal", "value") if vars(trainer).get(name)]
    modules = [trainer.model, *(model.module for model in second)]
    if trainer.args.sync_ref_model:
        modules.append(trainer.ref_model)
    return [p.detach().clone() for module in modules for p in module.parameters()]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(p.cpu(), q.cpu()) for p, q in zip(one, other, strict=True))


@pytest.fixture
def run(make, tmp_path):
    """A run of one of the cases in a folder of its own, resumed or not."""

    def run(case, folder, resume=None, **kwargs):
        trainer_cls, settings = CASES[case]
        settings = BASE | settings | {"output_dir": str(tmp_path / folder)} | kwargs
        trainer = make(trainer_cls, extra=EXTRA.get(case, {}), **settings)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


@pytest.mark.parametrize("case", CASES)
def test_resumed_runs_end_with_the_same_bits(run, tmp_path, case):
    """Six updates go over several epochs, and with four updates a generation stop in the middle of one."""
    negatives = {"save_negatives": True, "bad_reward_threshold": -1.0}
    whole = run(case, "whole", **negatives)
    assert whole.state.epoch > 1 or case == "cut prompts" or "PO" in case
    expected, written = weights(whole), (tmp_path / "whole" / "negatives.jsonl").read_bytes()
    assert written
    for step in (2, 5):
        folder = tmp_path / f"from {step}"
        shutil.copytree(tmp_path / "whole", folder)  # with what came after the checkpoint, as a killed run leaves it
        for later in range(step + 1, 7):
            shutil.rmtree(folder / f"checkpoint-{later}")
        assert same(weights(run(case, folder.name, resume=True, **negatives)), expected)
        assert (folder / "negatives.jsonl").read_bytes() == written


def test_a_value_adapter_is_not_saved_as_the_policy_found_it(run, tmp_path):
    whole = run("PPO, adapters", "run")
    resumed = run("PPO, adapters", "again", resume=str(tmp_path / "run" / "checkpoint-2"))
    assert list(resumed.model.peft_config) == ["default"]
    saved = [tmp_path / name / "checkpoint-6" / "value" / "adapter_model.safetensors" for name in ("run", "again")]
    assert saved[0].read_bytes() == saved[1].read_bytes()
    twice = run("PPO, adapters", "again", resume=str(tmp_path / "again" / "checkpoint-4"))
    assert same(weights(twice), weights(whole))


def test_a_moving_reference_that_is_missing_is_refused(run, tmp_path, caplog):
    run("moving reference", "run", max_steps=1)
    (tmp_path / "run" / "checkpoint-1" / "reference.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no reference that `sync_ref_model=True` could go on from"):
        run("moving reference", "run", resume=True)
    run("moving reference", "weights", max_steps=1, save_only_model=True)
    assert not (tmp_path / "weights" / "checkpoint-1" / "reference.safetensors").exists()
    with caplog.at_level(logging.WARNING):
        run("moving reference", "weights", resume=True, max_steps=2)
    assert "holds no reference; `sync_ref_model=True` begins" in caplog.text


def test_without_the_buffer_bits_would_differ(run, tmp_path):
    whole = run("four updates a generation", "whole")
    path = tmp_path / "whole" / "checkpoint-2" / "position-0.json"
    position = json.loads(path.read_text())
    assert len(position["buffer"]) == 4 and position["step"] == 2
    path.write_text(json.dumps(position | {"buffer": None}))
    resumed = run("four updates a generation", "whole", resume=str(path.parent))
    assert not same(weights(resumed), weights(whole))


def test_epochs_have_their_order(make):
    trainer = make(num_generations=2, per_device_train_batch_size=2, max_steps=1)
    plain = super(type(trainer).__mro__[1], trainer)._get_train_sampler()
    while isinstance(plain, ResumedSampler):
        plain = plain._sampler
    orders = [list(plain) for _ in range(4)]
    assert len({str(order) for order in orders}) > 1
    epoch = 0
    sampler = ResumedSampler(plain, lambda: epoch)
    for epoch in (2, 0, 3, 1):
        assert list(sampler) == orders[epoch] and len(sampler) == len(orders[epoch])


@pytest.mark.parametrize("damage", ["state missing", "state cut off", "random state cut off"])
def test_half_written_checkpoints_are_passed_over(run, tmp_path, caplog, damage):
    expected = weights(run("an update a generation", "run"))
    last = tmp_path / "run" / "checkpoint-6"
    name = "rng_state.pth" if damage.startswith("random") else "trainer_state.json"
    content = (last / name).read_bytes()
    (last / name).unlink()
    if "cut off" in damage:
        (last / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"checkpoint-6 is not complete \({name} is missing or cut off\)"):
        run("an update a generation", "run", resume=str(last))
    with caplog.at_level(logging.WARNING):
        resumed = run("an update a generation", "run", resume=True)
    assert f"checkpoint-6 is not complete ({name} is missing or cut off) and is passed over" in caplog.text
    assert same(weights(resumed), expected)
    assert find_checkpoint(True, str(tmp_path / "run")) == str(last)  # written anew


def test_a_checkpoint_that_is_written_over_is_not_complete_meanwhile(run, tmp_path, monkeypatch):
    trainer = run("an update a generation", "run")
    monkeypatch.setattr(trainer.proposal, "save_state", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer._save_checkpoint(trainer.model, None)
    assert find_checkpoint(True, str(tmp_path / "run")).endswith("checkpoint-5")
    with pytest.raises(ValueError, match="run` is the folder of a run; name one of the checkpoints in it"):
        find_checkpoint(str(tmp_path / "run"), "")


def test_a_checkpoint_that_is_not_there(run, tmp_path):
    with pytest.raises(ValueError, match="There is no complete checkpoint in .*without `resume_from_checkpoint`"):
        run("an update a generation", "empty", resume=True)
    with pytest.raises(ValueError, match=r"no checkpoint `.*checkpoint-9`; name .*`resume_from_checkpoint=True` from"):
        find_checkpoint(tmp_path / "checkpoint-9", str(tmp_path))


@pytest.mark.parametrize("case", ["an update a generation", "REINFORCE", "PPO"])
def test_negatives_of_an_earlier_run_are_set_aside(run, tmp_path, caplog, case):
    settings = {"save_negatives": True, "bad_reward_threshold": 9.0, "max_steps": 1}
    out, written = tmp_path / "out", []
    for seed in (1, 2, 3):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            trainer = run(case, "out", seed=seed, **settings)
        written.append((out / "negatives.jsonl").read_bytes())
        moved = f"negatives.jsonl is of an earlier run and is now {out}/negatives-{seed - 1}.jsonl"
        assert (moved in caplog.text) == (seed > 1)
    assert len(set(written)) == 3  # the control: other seeds, other rows
    assert [(out / f"negatives-{number}.jsonl").read_bytes() for number in (1, 2)] == written[:2]
    trainer.args.max_steps = 9  # beyond what is left of a generation
    trainer.train()  # the same run's, once more
    assert (out / "negatives.jsonl").read_bytes().startswith(written[2])
    assert len((out / "negatives.jsonl").read_bytes()) > len(written[2])
    assert len(list(out.glob("negatives*"))) == 3


def test_negatives_stay_where_nothing_would_mix(run, tmp_path, caplog):
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "negatives.jsonl"
    settings = {"bad_reward_threshold": 9.0, "max_steps": 1}
    path.touch()
    run("an update a generation", "out", save_negatives=True, **settings)  # nothing to lose
    written = path.read_bytes()
    run("an update a generation", "out", **settings)  # writes none
    assert written and path.read_bytes() == written
    trainer = run("an update a generation", "out", resume=True, save_negatives=True, **settings)
    trainer.train()  # goes on in the file that was resumed
    rows = path.read_bytes()
    assert rows.startswith(written) and len(rows) > len(written) and [*path.parent.glob("negatives*")] == [path]
    assert "negatives.jsonl" not in caplog.text
    first = rows.index(b"\n") + 1
    path.write_bytes(rows[:first])
    position = json.loads((Path(find_checkpoint(True, str(path.parent))) / "position-0.json").read_text())
    run("an update a generation", "out", resume=True, save_negatives=True, **settings)
    assert f"has {first} bytes, and had {position['negatives_bytes']} when" in caplog.text


def test_negatives_of_another_run_are_not_cut_by_a_resumed_one(run, tmp_path, caplog):
    settings = {"bad_reward_threshold": 9.0, "max_steps": 1, "save_negatives": True}
    run("an update a generation", "out", **settings)
    path = tmp_path / "out" / "negatives.jsonl"
    path.write_bytes(b'{"step": 0, "of": "another run"}\n' * 1000)
    others = path.read_bytes()
    run("an update a generation", "out", resume=True, **settings)
    assert (tmp_path / "out" / "negatives-1.jsonl").read_bytes() == others
    assert "is of an earlier run and is now" in caplog.text


@pytest.mark.parametrize(
    ("trainer_cls", "change"),
    [
        (RePULSeTrainer, {"alpha": 0.5}),
        (RePULSeTrainer, {"target_dist_beta": -3.0}),
        (RePULSeTrainer, {"per_device_train_batch_size": 8, "num_generations": 2}),
        (RePULSeTrainer, {"beta": 0.2}),
        (RePULSeTrainer, {"seed": 7}),
        (ReinforceTrainer, {"temperature": 0.5}),
        (ReinforceTrainer, {"top_k": 2}),
        (ReinforceTrainer, {"top_p": 0.5}),
        (ReinforceTrainer, {"min_p": 0.1}),
        (ReinforceTrainer, {"vllm_structured_outputs_regex": "a|b"}),
        (ReinforceTrainer, {"repetition_penalty": 1.5}),
        (ReinforceTrainer, {"generation_kwargs": {"no_repeat_ngram_size": 1}}),
        (ReinforceTrainer, {"disable_dropout": False}),
        (ReinforceTrainer, {"sync_ref_model": True}),
        (PPOTrainer, {"temperature": 0.5}),
        (PPOTrainer, {"delta": 3.0}),
        (RePULSeGRPOTrainer, {"scale_rewards": "none"}),
        (RePULSeGRPOTrainer, {"importance_sampling_level": "sequence"}),
        (RePULSeGRPOTrainer, {"max_tool_calling_iterations": 3}),
    ],
)
def test_changed_settings_are_refused(make, tmp_path, trainer_cls, change):
    settings = BASE | {"output_dir": str(tmp_path / "run"), "max_steps": 1, "beta": 0.1}
    make(trainer_cls, **settings).train()
    name, value = next(iter(change.items()))
    shown = re.escape(repr(value))
    with pytest.raises(ValueError, match=f"`{name}={shown}` does not go on with the run that wrote .*, where it is"):
        make(trainer_cls, **settings | change).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("which", ["peft_config", "proposal_peft_config", "value_peft_config"])
@pytest.mark.parametrize("change", [{"lora_alpha": 9}, {"r": 4}, {"use_rslora": True}, {"target_modules": ["c_proj"]}])
def test_changed_adapters_are_refused(make, tmp_path, which, change):
    trainer_cls = PPOTrainer if which == "value_peft_config" else RePULSeTrainer
    settings = BASE | {"output_dir": str(tmp_path / "run"), "max_steps": 1}

    def build(**changed):
        config = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["c_attn"]}
        extra = {"peft_config": LoraConfig(**config), which: LoraConfig(**config | changed)}
        if which == "peft_config":
            extra["proposal_peft_config"] = LoraConfig(**config)
        return make(trainer_cls, extra=extra, **settings)

    build().train()
    (key, value), kind = next(iter(change.items())), "adapter" if which == "peft_config" else "second adapter"
    shown = re.escape(f"{kind}: {{'{key}': {value!r}}} does not go on")
    with pytest.raises(ValueError, match=shown):
        build(**change).train(resume_from_checkpoint=True)
    build(init_lora_weights=False).train(resume_from_checkpoint=True)  # where it began is of no account


def test_other_changes_are_said(make, tmp_path, caplog):
    settings = BASE | {"output_dir": str(tmp_path / "run")}
    make(**settings | {"max_steps": 1}).train()

    def another_reward(completions, **kwargs):
        return [1.0] * len(completions)

    settings |= {"max_steps": 2, "adam_beta1": 0.5, "learning_rate": 0.5, "logging_steps": 2}
    settings |= {"log_completions": True, "vllm_group_port": 50000, "ref_model_sync_steps": 2, "eval_steps": 3}
    trainer = make(reward_funcs=another_reward, **settings)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 2
    assert "`reward functions` is ['another_reward'] here and ['word_reward'] in" in caplog.text
    for change in (
        "adam_beta1` is 0.5 here and 0.9",
        "learning_rate` is 0.5 here and 0.01",
        "max_steps` is 2 here and 1",
    ):
        assert f"`{change} in" in caplog.text
    for name in ("logging_steps", "log_completions", "vllm_group_port", "ref_model_sync_steps", "eval_steps"):
        assert f"`{name}`" not in caplog.text


@pytest.mark.parametrize("trainer_cls", [RePULSeTrainer, ReinforceTrainer, PPOTrainer])
def test_an_adapters_checkpoint_begins_a_new_run(make, tmp_path, model_dirs, tokenizer, trainer_cls):
    settings = BASE | {"output_dir": str(tmp_path / "run"), "max_steps": 1, "beta": 0.1}
    make(trainer_cls, extra=ADAPTERS, **settings).train()
    trainer = make(trainer_cls, extra=ADAPTERS, **settings | {"seed": 7})
    remedy = re.escape("start a new run with `model=PeftModel.from_pretrained(base, checkpoint, is_trainable=True)`")
    with pytest.raises(ValueError, match=remedy):
        trainer.train(resume_from_checkpoint=True)
    checkpoint = str(tmp_path / "run" / "checkpoint-1")
    with pytest.raises(ValueError, match=re.escape(f"`model={checkpoint!r}` is the folder of an adapter")):
        make(trainer_cls, model=checkpoint, **settings)
    base = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"])
    model = PeftModel.from_pretrained(base, checkpoint, is_trainable=True)
    make(trainer_cls, model=model, extra={"processing_class": tokenizer}, **settings).train()


@pytest.mark.parametrize("potential", ["indicator", "tilted", "hot"])
def test_the_threshold_may_change_where_it_only_counts(run, potential):
    settings = {"potential": potential, "bad_reward_threshold": -1.0}
    if potential == "hot":
        settings = {"proposal": "hot_policy", "proposal_temperature": 1.5, "bad_reward_threshold": -1.0}
    run("an update a generation", "run", max_steps=1, **settings)
    going_on = {"resume": True, "max_steps": 2} | settings
    assert run("an update a generation", "run", **going_on).state.global_step == 2
    going_on |= {"bad_reward_threshold": -2.0, "max_steps": 3}
    if potential != "tilted":
        with pytest.raises(ValueError, match="`bad_reward_threshold=-2.0` does not go on .*, where it is -1.0"):
            run("an update a generation", "run", **going_on)
    else:
        assert run("an update a generation", "run", **going_on).state.global_step == 3


def test_what_another_horizon_does_to_schedules_is_said(run, caplog):
    settings = {"alpha": 1.0, "alpha_start": 0.01, "lr_scheduler_type": "linear"}
    case = "an update a generation"
    whole = run(case, "whole", max_steps=5, **settings)
    run(case, "run", max_steps=3, **settings)
    with caplog.at_level(logging.WARNING):
        resumed = run(case, "run", resume=True, max_steps=5, **settings)
    (said,) = [r.getMessage() for r in caplog.records if "`max_steps` is 5 here and 3 in" in r.getMessage()]
    assert "`alpha` and `target_dist_beta` too, go on as if it had been so from the start" in said
    assert "go on as they were" not in caplog.text
    rates = [[r["learning_rate"] for r in t.state.log_history if "learning_rate" in r][-1] for t in (whole, resumed)]
    assert rates[0] == rates[1] and resumed._negative.scheduled("alpha") == whole._negative.scheduled("alpha")


def test_other_data_or_another_proposal_are_refused(run, make, tmp_path, prompts, model_dirs):
    run("an update a generation", "run", max_steps=1)
    settings = BASE | {"output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 8}
    trainer = make(dataset=prompts.select(range(2)), **settings)
    with pytest.raises(ValueError, match="train_dataset: 2 does not go on .* where it is 4"):
        trainer.train(resume_from_checkpoint=True)
    trainer = make(ReinforceTrainer, **settings)
    with pytest.raises(ValueError, match="second model: None does not go on .* where it is 'SecondModel'"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_checkpoint_of_weights_alone(run, tmp_path, caplog, earlier):
    if earlier:  # its state is not that of the weights to come
        run("an update a generation", "run", max_steps=2, seed=1)
    run("an update a generation", "run", save_only_model=True, max_steps=2)
    folder = tmp_path / "run" / "checkpoint-2"
    names = {path.name for path in folder.iterdir()} | {
        f"proposal/{path.name}" for path in (folder / "proposal").iterdir()
    }
    assert {"model.safetensors", "proposal/model.safetensors"} <= names
    state = ("position", "optimizer", "scheduler", "rng_state", "proposal/optimizer")
    assert not [name for name in names if name.startswith(state)]
    with caplog.at_level(logging.WARNING):
        trainer = run("an update a generation", "run", resume=True, max_steps=3)
    assert trainer.state.global_step == 3 and "does not say where in its data the run was" in caplog.text


@pytest.mark.parametrize("case", ["an update a generation", "adapters", "PPO", "PPO, adapters"])
def test_the_best_checkpoint_gives_both_models(make, tmp_path, prompts, case):
    trainer_cls, settings = CASES[case]
    best = {"load_best_model_at_end": True, "metric_for_best_model": "fake", "eval_strategy": "steps", "eval_steps": 1}
    extra = {"eval_dataset": prompts} | EXTRA.get(case, {})
    settings = BASE | settings | best | {"output_dir": str(tmp_path / "run"), "num_generations_eval": 4}
    trainer = make(trainer_cls, extra=extra, per_device_eval_batch_size=16, **settings)
    seen = {}

    def evaluate(*args, **kwargs):
        step = trainer.state.global_step
        seen[step] = weights(trainer)
        return {"eval_fake": 1.0 if step == 2 else 0.0}

    trainer.evaluate = evaluate
    trainer.train()
    assert same(weights(trainer), seen[2]) and not same(seen[2], seen[6])
    assert any(p.requires_grad for p in trainer.model.parameters())
