"""Inputs of trainers that are refused in one sentence, before a model is loaded where that can be known."""

import functools
import shutil
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from peft import PeftModel, get_peft_model
from trl import GRPOConfig, RLOOConfig

from trl_repulse import PPOTrainer, ReinforceConfig, ReinforceTrainer, RePULSeTrainer
from trl_repulse.data._checks import as_dataset

from ..conftest import USE_CPU, build_model
from ..engine.test_adapters import lora


pytestmark = pytest.mark.trainer
TRAINERS = [RePULSeTrainer, ReinforceTrainer, PPOTrainer]
ROWS = [{"prompt": "the cat"}, {"prompt": "fish"}] * 8


@pytest.fixture
def nothing_loaded(monkeypatch):
    def loaded(*args, **kwargs):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", loaded)


@pytest.mark.parametrize("trainer_cls", TRAINERS)
@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (ROWS, "`train_dataset` is a list and no data set.*Dataset.from_list"),
        (DatasetDict(train=Dataset.from_list(ROWS)), r"`train_dataset` has several parts \('train'\); pass one"),
        (Dataset.from_list([*ROWS, {"prompt": None}]), "Row 17 of `train_dataset` has no `prompt`; drop"),
    ],
    ids=["list", "splits", "no prompt"],
)
def test_data_that_are_no_prompts(make, nothing_loaded, trainer_cls, dataset, message):
    with pytest.raises(ValueError, match=message):
        make(trainer_cls, dataset=dataset)


def test_rows_that_are_not_selected_may_lack_a_prompt(make):
    make(ReinforceTrainer, dataset=Dataset.from_list([*ROWS, {"prompt": None}]).select(range(16)))


@pytest.mark.parametrize("trainer_cls", TRAINERS)
@pytest.mark.parametrize("row", [{"question": "the cat"}, {"prompt": None}], ids=["no column", "None"])
def test_streams_without_prompts(make, trainer_cls, row):
    stream = IterableDataset.from_generator(lambda: iter([row] * 16))
    with pytest.raises(ValueError, match="has a row without a `prompt`"):
        make(trainer_cls, dataset=stream).train()


@pytest.mark.parametrize(
    ("trainer_cls", "config_cls"),
    [
        (RePULSeTrainer, ReinforceConfig),
        (RePULSeTrainer, RLOOConfig),
        (ReinforceTrainer, RLOOConfig),
        (PPOTrainer, GRPOConfig),
    ],
)
def test_configurations_of_another_trainer(tmp_path, prompts, reward, nothing_loaded, trainer_cls, config_cls):
    args = config_cls(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=f"class {config_cls.__name__}; pass a `{trainer_cls._config_cls.__name__}`"):
        trainer_cls(model="gpt2", reward_funcs=reward, args=args, train_dataset=prompts)


@pytest.mark.parametrize("trainer_cls", TRAINERS)
def test_a_configuration_that_was_changed_is_checked_again(make, prompts, reward, trainer_cls):
    args = make(trainer_cls).args
    args.beta = -1.0  # like `top_k`, which would make weights wrong
    with pytest.raises(ValueError, match="`beta=-1.0` must be at least 0"):
        trainer_cls("gpt2", reward, args, prompts)


@pytest.mark.parametrize("trainer_cls", TRAINERS)
def test_without_a_configuration_the_default_one_is_made(tmp_path, monkeypatch, model_dirs, reward, trainer_cls):
    monkeypatch.chdir(tmp_path)
    config_cls = trainer_cls._config_cls
    on_cpu = functools.partial(config_cls, use_cpu=USE_CPU, bf16=False, max_completion_length=2)
    monkeypatch.setattr(trainer_cls, "_config_cls", staticmethod(on_cpu))
    trainer = trainer_cls(model_dirs["gpt2"], reward, train_dataset=Dataset.from_list(ROWS))
    assert type(trainer.args) is config_cls and trainer.args.output_dir.endswith(f"-{trainer_cls._name}")
    assert trainer.num_generations == config_cls.num_generations


@pytest.mark.parametrize("trainer_cls", TRAINERS)
def test_no_reward(make, nothing_loaded, trainer_cls):
    for nothing in ([], None):
        with pytest.raises(ValueError, match="`reward_funcs=.*` gives no reward"):
            make(trainer_cls, reward_funcs=nothing)


@pytest.mark.parametrize(
    ("trainer_cls", "name"), [(RePULSeTrainer, "proposal_model"), (PPOTrainer, "value_model"), (PPOTrainer, "model")]
)
def test_path_objects(make, nothing_loaded, model_dirs, trainer_cls, name):
    path = Path(model_dirs["gpt2"])
    passed = {"model": path} if name == "model" else {"extra": {name: path}}
    with pytest.raises(ValueError, match=f"`{name}` is a path object; pass the path as text"):
        make(trainer_cls, **passed)


@pytest.mark.parametrize("kwargs", [{"alpha": 0.0}, {"proposal": "policy"}])
def test_an_adapter_of_no_proposal(make, nothing_loaded, kwargs):
    with pytest.raises(ValueError, match="`proposal_peft_config` is given, but the configuration builds no proposal"):
        make(extra={"proposal_peft_config": lora()}, **kwargs)


def test_a_policys_adapter_of_another_name(make, tokenizer):
    policy = get_peft_model(build_model("gpt2", len(tokenizer)), lora(), adapter_name="mine")
    for settings in ({}, {"beta": 0.1, "alpha": 0.0}):
        with pytest.raises(ValueError, match="The policy's adapter is named 'mine'.* load it under .* 'default'"):
            make(model=policy, extra={"processing_class": tokenizer}, **settings)


@pytest.mark.parametrize("trainer_cls", TRAINERS)
def test_a_policy_with_nothing_to_train(make, model_dirs, tmp_path, tokenizer, prompts, trainer_cls):
    get_peft_model(build_model("gpt2", len(tokenizer)), lora()).save_pretrained(tmp_path / "adapter")
    base = build_model("gpt2", len(tokenizer))
    base.config._name_or_path = model_dirs["gpt2"]  # where a value model is loaded from
    calls = []

    def reward(completions, **kwargs):
        calls.append(len(completions))
        return [0.0] * len(completions)

    policy = PeftModel.from_pretrained(base, tmp_path / "adapter")
    trainer = make(trainer_cls, policy, reward, extra={"processing_class": tokenizer}, per_device_eval_batch_size=16)
    with pytest.raises(ValueError, match="nothing to train.*is_trainable=True"):
        trainer.train()
    assert not calls
    assert "eval_loss" in trainer.evaluate(prompts)


@pytest.mark.parametrize("trainer_cls", TRAINERS)
def test_evaluation_batches_that_cut_prompts(make, prompts, trainer_cls):
    whole = {"num_generations": 5, "per_device_train_batch_size": 20}
    assert "eval_loss" in make(trainer_cls, **whole).evaluate(prompts)  # by default none does
    settings = whole | {"per_device_eval_batch_size": 8}
    message = "`per_device_eval_batch_size=8` on 1 processes is no multiple of the 5 completions"
    with pytest.raises(ValueError, match=message):
        make(trainer_cls, **settings).evaluate(prompts)
    with pytest.raises(ValueError, match=message):
        make(trainer_cls, extra={"eval_dataset": prompts}, **settings)


UNLOADABLE = {  # of a path
    "policy": (ReinforceTrainer, lambda path: {"model": path}, "model"),
    "policy of PPO": (PPOTrainer, lambda path: {"model": path}, "model"),
    "reward": (ReinforceTrainer, lambda path: {"reward_funcs": [len, path]}, "reward_funcs"),
    "reward of PPO": (PPOTrainer, lambda path: {"reward_funcs": path}, "reward_funcs"),
    "proposal": (RePULSeTrainer, lambda path: {"extra": {"proposal_model": path}}, "proposal_model"),
    "value model": (PPOTrainer, lambda path: {"extra": {"value_model": path}}, "value_model"),
}


@pytest.mark.parametrize("without", ["a folder", "weights"])
@pytest.mark.parametrize("name", UNLOADABLE)
def test_models_that_cannot_be_loaded_are_named_before_any_is(
    make, model_dirs, nothing_loaded, tmp_path, name, without
):
    trainer_cls, arguments, argument = UNLOADABLE[name]
    path = tmp_path / "mistyped"
    if without == "weights":
        path.mkdir()
        shutil.copy(Path(model_dirs["gpt2"]) / "config.json", path)
    with pytest.raises(ValueError, match=f"`{argument}='.*mistyped'`.* cannot be loaded.* give the path of") as error:
        make(trainer_cls, **arguments(str(path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, PPOTrainer])
def test_a_policy_from_nowhere_has_no_reference(make, tokenizer, trainer_cls):
    policy, extra = build_model("gpt2", len(tokenizer)), {"processing_class": tokenizer}
    with pytest.raises(ValueError, match="The reference model that `beta=0.1` needs, .* cannot be loaded; save"):
        make(trainer_cls, model=policy, beta=0.1, extra=extra)
    make(trainer_cls, model=policy, beta=0.0, extra=extra)


@pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, RePULSeTrainer])
@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_reinforce_takes_no_tools(make, nothing_loaded, trainer_cls, name, alpha):
    given = [print] if name == "tools" else print
    settings = {"alpha": alpha} if trainer_cls is RePULSeTrainer else {}
    with pytest.raises(ValueError, match=f"`{name}` is not for `{trainer_cls.__name__}`.*leave it out"):
        make(trainer_cls, extra={name: given}, **settings)


@pytest.mark.parametrize("kind", ["arrow", "pandas"])
@pytest.mark.parametrize("streamed", [False, True])
def test_rows_that_are_tables_are_refused(make, prompts, kind, streamed):
    rows = (prompts.to_iterable_dataset() if streamed else prompts).with_format(kind)
    with pytest.raises(ValueError, match=r"pass `dataset.with_format\(None\)`, whose rows are dictionaries"):
        make(ReinforceTrainer, dataset=rows).train()
    if not streamed:
        with pytest.raises(ValueError, match=rf"`prompts` are tables \({kind}\)"):
            as_dataset(rows)
