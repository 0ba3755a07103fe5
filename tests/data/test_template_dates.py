"""A chat template that writes today's date: work that is gone on with another day would draw for other prompts."""

import datetime

import pytest
from datasets import Dataset

from trl_repulse import ReinforceTrainer, RePULSeGRPOTrainer
from trl_repulse.data._prompts import warn_of_template
from trl_repulse.evaluation.attacks import Attack, run_attacks
from trl_repulse.evaluation.records import COMPLETE, shard_path
from trl_repulse.evaluation.report import check_same_settings as header_check
from trl_repulse.evaluation.report import tail_report
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.rewards import ChatReward

from ..conftest import also_thorough, build_model, build_tokenizer
from ..reward_models import CHAT_TEMPLATE, save_model
from ..reward_models import build_tokenizer as build_reward_tokenizer


DATED = (
    "{% if date_string is not defined %}{% set date_string = strftime_now('%d') %}{% endif %}"
    "{{ {'01': ' sat', '02': ' ran'}[date_string] }}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role == 'assistant' %} cat{% endif %}"
)
MESSAGES = [[{"role": "user", "content": text}] for text in (" the cat", " fish", " the dog", " bad")]
FIRST_DAY = {"date_string": "01"}
REMEDY = "if the chat template writes today's date, pass the earlier one by `chat_template_kwargs`"


@pytest.fixture
def today(monkeypatch):
    """Sets the day that templates write."""

    def set_day(day):
        class Day(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(2026, 1, day)

        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Day)

    return set_day


@pytest.fixture
def dated():
    return build_tokenizer(chat_template=DATED)


def length(completions, **columns):
    return [float(len(str(each))) for each in completions]


@pytest.mark.trainer
@pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, *also_thorough(RePULSeGRPOTrainer)])
def test_a_training_run(make, dated, today, trainer_cls):
    def run(steps, resume, **kwargs):
        options = {"dataset": Dataset.from_dict({"prompt": MESSAGES}), "reward_funcs": length}
        options |= {"extra": {"processing_class": dated}, "save_strategy": "steps", "save_steps": 1}
        trainer = make(trainer_cls, max_steps=steps, **options, **kwargs)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    today(1)
    run(1, None)
    run(2, True)
    today(2)
    with pytest.raises(ValueError, match=f"a prompt reads ' ran.*, not ' sat.*; {REMEDY}.*, or start a new run"):
        run(3, True)
    assert run(3, True, chat_template_kwargs=FIRST_DAY).state.global_step == 3
    with pytest.raises(ValueError, match="Prompts differ"):
        run(4, True, chat_template_kwargs={"date_string": "02"})
    today(1)
    assert run(4, True).state.global_step == 4


def test_held_out_samples(dated, today, tmp_path):
    def sample(folder, seed=0, **settings):
        model = build_model("gpt2", len(dated), seed)
        settings = SamplingSettings(num_samples=2, max_completion_length=2, shard_size=3, **settings)
        options = {"tokenizer": dated, "progress": False}
        return sample_completions(tmp_path / folder, model, MESSAGES, length, settings, **options)

    today(1)
    whole = sample("a").table
    for path in (tmp_path / "a" / COMPLETE, shard_path(tmp_path / "a", 1)):
        path.unlink()
    today(2)
    with pytest.raises(ValueError, match=rf"with another `prompts.token_ids_sha256`; go on .* \({REMEDY}"):
        sample("a")
    resumed = sample("a", chat_template_kwargs=FIRST_DAY)
    assert resumed.table.equals(whole)
    others = [sample("b", 1, chat_template_kwargs=FIRST_DAY), sample("c", 2)]
    assert tail_report([resumed, others[0]]).seeds == 2
    with pytest.raises(ValueError, match=f"prompts.token_ids_sha256.*{REMEDY}"):
        tail_report([resumed, others[1]])


@pytest.mark.parametrize("kind", ["ChatReward", "path", "model"])
def test_rewards_that_read_the_date(dated, today, tmp_path, kind):
    folder, tokenizer = str(tmp_path / "reward"), build_reward_tokenizer("bos", DATED)
    module = save_model(tmp_path / "reward", "llama", tokenizer)[1]
    dated.chat_template = dated.chat_template.replace("strftime_now('%d')", "'01'")  # prompts are the same each day
    model = build_model("gpt2", len(dated), 0)

    def sample(name="a", variables=None):
        reward, processors = {"path": folder, "model": module}.get(kind), [tokenizer]
        if reward is None:
            reward, processors = ChatReward(folder, device="cpu", chat_template_kwargs=variables), None
        template = variables if processors else None
        drawn = {"num_samples": 2, "max_completion_length": 2, "shard_size": 3}
        settings = SamplingSettings(**drawn, chat_template_kwargs=template)
        options = {"tokenizer": dated, "progress": False, "reward_processing_classes": processors}
        return sample_completions(tmp_path / name, model, MESSAGES, reward, settings, **options)

    today(1)
    whole = sample()
    for path in (tmp_path / "a" / COMPLETE, shard_path(tmp_path / "a", 1)):
        path.unlink()
    today(2)
    with pytest.raises(ValueError, match=rf"with another `rewards\..*\.rendering`; go on .* \({REMEDY}"):
        sample()
    assert sample(variables=FIRST_DAY).table.equals(whole.table)
    other = sample("b")
    with pytest.raises(ValueError, match=rf"rendering.*{REMEDY}"):
        header_check([whole, other])
    if kind == "ChatReward":
        today(1)
        with pytest.raises(ValueError, match=r"rewards\..*\.rendering"):  # another text
            header_check([whole, sample("c", {"add_generation_prompt": True})])


@pytest.mark.parametrize("kind", ["ChatReward", "path", "attack"])
def test_samples_are_not_continued_with_another_template_of_a_judge(tmp_path, kind):
    folder, model = tmp_path / "reward", build_model("gpt2", len(build_tokenizer()), 0)
    tokenizer, judge = build_tokenizer(), build_reward_tokenizer("bos", CHAT_TEMPLATE)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    save_model(folder, "llama", judge)
    settings = SamplingSettings(num_samples=1, max_completion_length=2)

    def sample():
        reward = ChatReward(str(folder), device="cpu") if kind == "ChatReward" else str(folder)
        if kind == "attack":
            behaviors = Dataset.from_dict({"prompt": MESSAGES})
            policy, attacks = str(tmp_path / "policy"), [Attack("b")]
            return run_attacks(tmp_path / "a", policy, behaviors, attacks, reward, settings)["b"]
        options = {"tokenizer": tokenizer, "progress": False}
        return sample_completions(tmp_path / "a", model, MESSAGES, reward, settings, **options)

    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "policy")

    whole = sample()
    assert sample().table.equals(whole.table)
    judge.chat_template = CHAT_TEMPLATE + "{% if messages[-1].role == 'assistant' %}bad{% endif %}"
    judge.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"with another `rewards\..*\.rendering`"):
        sample()


@pytest.mark.parametrize(
    ("template", "variables", "warned"),
    [(DATED, None, True), (DATED, FIRST_DAY, False), (DATED.replace("strftime_now('%d')", "'01'"), None, False)],
)
def test_a_template_that_writes_the_date_is_said_once(dated, caplog, template, variables, warned):
    dated.chat_template, dated.name_or_path = template, f"a {warned} {variables} tokenizer"
    for messages in MESSAGES:
        warn_of_template(dated, messages, variables)
    said = [each.message for each in caplog.records if "writes today's date" in each.message]
    assert len(said) == warned and all("`chat_template_kwargs`" in each for each in said)
