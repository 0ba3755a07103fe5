"""Conversations that cannot be used: refused in one line with their row, wherever prompts are read, before anything is drawn."""

import pytest
from datasets import Dataset
from transformers import GPT2Config, GPT2ForSequenceClassification
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeTrainer
from trl_repulse.data import drop_long_prompts, load_prompts
from trl_repulse.data._prompts import check_conversations
from trl_repulse.evaluation.callback import TailReportCallback
from trl_repulse.evaluation.gcg.config import GCGConfig
from trl_repulse.evaluation.gcg.evaluator import evaluate_gcg
from trl_repulse.evaluation.gcg.prompt import build_prompt
from trl_repulse.evaluation.rare.sampling import draw, find_temperature
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.generation import TransformersGenerator

from ..conftest import build_model, build_tokenizer, silent


TRAINERS = [RePULSeTrainer, PPOTrainer]
# As many do: roles take turns, and there is no system message
TEMPLATE = """{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}{{ m['content'] }}{% endfor %}"""
TURN = {"role": "user", "content": "the cat"}
GOOD = [TURN]
MALFORMED = {
    "no role": [{"content": "fish"}],
    "no content": [{"role": "user"}],
    "role is no text": [{"role": 1, "content": "fish"}],
    "content is no text": [{"role": "user", "content": ["fish"]}],
    "content is missing": [{"role": "user", "content": None}],
    "other keys": [{"from": "human", "value": "fish"}],
    "second message": [TURN, {"role": "assistant"}],
}
ANSWERED = [TURN, {"role": "assistant", "content": "ran"}]
ENDS = "Row 2 of `{}` ends in a message of the assistant, .*begins another answer.*; end it in a message of the user"
# Arguments of `apply_chat_template`, set where it is called; the others would change what is sampled from
NO_VARIABLES = {"add_generation_prompt": False, "tokenize": True, "chat_template": "{{ 1 }}", "return_dict": False}
NO_VARIABLES |= {"continue_final_message": True, "conversation": [], "messages": [], "max_length": 1, "padding": True}
SET = "`chat_template_kwargs` has `{}`: no variable of a chat template, but set where it is applied; leave it out"
WRONG = "Row 1 of `{}` has a `prompt` that is neither text nor a list of messages .* with text in both .it has .*; write it as one"
NO_TEMPLATE = "Row 1 of `{}` is a conversation, but the tokenizer has no chat template; save one .* or use plain text"
REFUSED = "Row 2 of `{}`, with the roles user, user, is refused by the chat template .*roles must alternate.*; change its messages"


def one_line(error):
    return "\n" not in str(error.value) and len(str(error.value)) < 500


def rows_of(prompt):
    """A data set of one kind of rows, which Arrow can hold."""
    return Dataset.from_list([{"prompt": prompt}] * 16)


@pytest.fixture
def chat_tokenizer():
    return build_tokenizer(chat_template=TEMPLATE)


@pytest.fixture
def judge(tokenizer):
    """A reward model of this name."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "num_labels": 1, "pad_token_id": 0}
    model = GPT2ForSequenceClassification(GPT2Config(vocab_size=len(tokenizer), **sizes))
    model.config._name_or_path = "judge"
    return model


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        *(pytest.param([prompt, GOOD], WRONG, id=kind) for kind, prompt in MALFORMED.items()),
        *(([prompt] * 2, WRONG) for prompt in (3, TURN, ["the cat"])),
        ([GOOD] * 15 + [[]], "Row 16 of `{}` has an empty `prompt`"),
        ([GOOD, ANSWERED], ENDS),
        (["the cat", GOOD], "Row 2 of `{}` differs in kind from row 1"),
    ],
)
def test_prompts_that_cannot_be_used(rows, message):
    with pytest.raises(ValueError, match=message.format("prompts")) as error:
        check_conversations(rows, "`prompts`")
    assert one_line(error)


@pytest.mark.parametrize("name", NO_VARIABLES)
def test_template_variables_that_are_none(name):
    with pytest.raises(ValueError, match=SET.format(name)):
        SamplingSettings(chat_template_kwargs={name: NO_VARIABLES[name]})
    SamplingSettings(chat_template_kwargs={"tools": [], "thinking": True})  # without a trainer to give tools to


@pytest.mark.trainer
@pytest.mark.parametrize("trainer_cls", TRAINERS)
class TestTrainers:
    def test_prompts_are_checked_before_a_model_is_loaded(self, make, nothing_loaded, trainer_cls):
        refused = Dataset.from_list([{"prompt": prompt} for prompt in [GOOD, ANSWERED] * 8])
        with pytest.raises(ValueError, match=ENDS.format("train_dataset")):
            make(trainer_cls, dataset=refused)
        for name, given in (("eval_dataset", refused), ("hard", {"hard": refused})):
            with pytest.raises(ValueError, match=ENDS.format(name)):
                make(trainer_cls, dataset=rows_of(GOOD), extra={"eval_dataset": given})
        with pytest.raises(ValueError, match=SET.format("tools")):
            make(trainer_cls, dataset=rows_of(GOOD), chat_template_kwargs='{"tools": []}')

    def test_templates(self, make, chat_tokenizer, tokenizer, judge, trainer_cls):
        with pytest.raises(ValueError, match=NO_TEMPLATE.format("train_dataset")) as error:
            make(trainer_cls, dataset=rows_of(GOOD))
        assert one_line(error)
        with pytest.raises(ValueError, match=NO_TEMPLATE.format("eval_dataset")):
            make(trainer_cls, extra={"eval_dataset": rows_of(GOOD)})
        dataset = Dataset.from_list([{"prompt": GOOD}, {"prompt": [TURN, TURN]}] * 8)
        with pytest.raises(ValueError, match=REFUSED.format("train_dataset")) as error:
            make(trainer_cls, dataset=dataset, extra={"processing_class": chat_tokenizer})
        assert one_line(error)
        extra = {"processing_class": chat_tokenizer, "reward_processing_classes": tokenizer}
        read = "Row 1 of `train_dataset`, as the reward model 'judge' reads it, is a conv"
        with pytest.raises(ValueError, match=read) as error:
            make(trainer_cls, reward_funcs=judge, dataset=rows_of(GOOD), extra=extra)
        assert one_line(error)
        extra["reward_processing_classes"] = chat_tokenizer
        make(trainer_cls, reward_funcs=judge, dataset=rows_of(GOOD), extra=extra).train()

    def test_conversations_that_are_well_formed(self, make, chat_tokenizer, trainer_cls):
        """Roles of several kinds; a row that is made as it is read is looked at only then."""
        answered = [TURN, {"role": "assistant", "content": "ran"}, TURN]
        dataset = Dataset.from_list([{"prompt": GOOD}, {"prompt": answered}] * 8)
        make(trainer_cls, reward_funcs=silent, dataset=dataset, extra={"processing_class": chat_tokenizer}).train()
        made = Dataset.from_dict({"prompt": range(16)})
        made = made.with_transform(lambda rows: {"prompt": [GOOD for _ in rows["prompt"]]})
        make(trainer_cls, dataset=made, extra={"processing_class": chat_tokenizer})

    def test_token_types_are_not_passed_on(self, make, chat_tokenizer, trainer_cls):
        """Sampling with them would draw from another distribution than is scored, and a joint draw has more rows."""
        chat_tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        settings = {"dataset": rows_of(GOOD), "extra": {"processing_class": chat_tokenizer}, "max_steps": 1}
        trainer, passed = make(trainer_cls, reward_funcs=silent, **settings), []
        control = GRPOTrainer._tokenize_prompts(trainer, [GOOD])
        assert any("token_type_ids" in fields for fields in control if isinstance(fields, dict))
        trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs: passed.append("token_type_ids" in kwargs), with_kwargs=True
        )
        trainer.train()
        assert passed and not any(passed)


class TestEvaluation:
    @pytest.fixture(params=["sampling", "draw", "temperature", "generator", "callback"])
    def read(self, request, tmp_path, model_dirs, make):
        """Reads prompts with a tokenizer."""
        model = build_model("gpt2", len(build_tokenizer()))

        def read(prompts, tokenizer):
            if request.param == "sampling":
                settings = SamplingSettings(num_samples=1, max_completion_length=2)
                options = {"tokenizer": tokenizer, "progress": False}
                return sample_completions(tmp_path / "s", model_dirs["gpt2"], prompts, silent, settings, **options)
            if request.param == "draw":
                return draw([model], tokenizer, prompts, silent, [2], 2)
            if request.param == "temperature":
                return find_temperature(model, tokenizer, prompts, 2, num_samples=2)
            if request.param == "generator":
                return TransformersGenerator({"policy": model}, tokenizer, 2).complete(prompts, "policy")
            trainer = make(ReinforceTrainer, extra={"processing_class": tokenizer})
            return TailReportCallback(trainer, prompts, num_samples=2)

        return read

    def test_prompts_and_templates_are_checked(self, read, tokenizer, chat_tokenizer):
        read([GOOD], chat_tokenizer)
        for own, prompts, message in (
            (chat_tokenizer, [GOOD, ANSWERED], ENDS),
            (chat_tokenizer, [GOOD, [TURN, TURN]], REFUSED),
            (tokenizer, [GOOD], NO_TEMPLATE),
        ):
            with pytest.raises(ValueError, match=message.format("prompts")) as error:
                read(prompts, own)
            assert one_line(error)

    def test_template_variables_are_checked(self, tmp_path, chat_tokenizer):
        model, variables = build_model("gpt2", len(chat_tokenizer)), {"chat_template_kwargs": {"tokenize": True}}
        for refused in (
            lambda: GCGConfig(**variables),
            lambda: draw([model], chat_tokenizer, [GOOD], silent, [2], 2, **variables),
            lambda: drop_long_prompts(rows_of(GOOD), chat_tokenizer, 9, *variables.values()),
        ):
            with pytest.raises(ValueError, match=SET.format("tokenize")):
                refused()

    def test_a_reward_model_without_a_template(self, tmp_path, model_dirs, chat_tokenizer, tokenizer, judge):
        settings = SamplingSettings(max_completion_length=2)
        options = {"tokenizer": chat_tokenizer, "reward_processing_classes": [tokenizer], "progress": False}
        read = "completion, as the reward model 'judge' reads it, is a conversation, but the tokenizer has no chat"
        with pytest.raises(ValueError, match=read):
            sample_completions(tmp_path / "s", model_dirs["gpt2"], [GOOD], judge, settings, **options)

    def test_long_prompts(self, tokenizer, chat_tokenizer):
        prompts = Dataset.from_list([{"prompt": GOOD}, {"prompt": [TURN, TURN]}])
        for data in (prompts, prompts.to_iterable_dataset()):
            with pytest.raises(ValueError, match="Row 1 of the prompts is a conversation, but the tokenizer has no"):
                list(drop_long_prompts(data, tokenizer, 9))
            with pytest.raises(ValueError, match="Row 2 of the prompts, with the roles user, user, is refused"):
                list(drop_long_prompts(data, chat_tokenizer, 9))

    def test_attacks(self, tmp_path, chat_tokenizer):
        for messages, message in (
            (MALFORMED["no role"], "The conversation that is attacked has a"),
            (ANSWERED, "The conversation that is attacked ends in a message of the assistant"),
            ([TURN, TURN], "conversation that is attacked, with the roles user, user, is refused"),
        ):
            with pytest.raises(ValueError, match=message) as error:
                build_prompt(chat_tokenizer, messages, " ran")
            assert one_line(error)
        chat_tokenizer.chat_template = "{{ raise_exception('No users') }}"
        rows, model = [{"goal": "the cat", "target": " ran"}], build_model("gpt2", len(chat_tokenizer))
        message = "Row 1 of the table: .* the roles user, is refused by the chat template .*No users"
        with pytest.raises(ValueError, match=message):
            evaluate_gcg(model, chat_tokenizer, rows, lambda goals, responses: [], output=tmp_path / "out")


def test_names_that_are_no_file(tmp_path, monkeypatch):
    """Offline, as the tests are, and where the Hub knows no such name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)  # where folders of these names may be
    for name in ("p.jsonn", "data/prompts", "prompts", "a/b/c", "org/data-v1.2"):
        message = f"no file or folder `{name}`, and no data set of that name could be loaded from .*correct the path"
        with pytest.raises(ValueError, match=f"{message} or") as error:
            load_prompts(name)
        assert one_line(error)
    with pytest.raises(ValueError, match="The name of the prompts is empty"):
        load_prompts("")


def test_folders_that_hold_no_data(tmp_path):
    with pytest.raises(ValueError, match="The folder .* cannot be read as a data set .*any data files"):
        load_prompts(tmp_path)
    (tmp_path / "train.csv").write_text('prompt,tag\n"a,1\nb,2\n')
    with pytest.raises(ValueError, match="The folder .* cannot be read as a data set .*EOF inside string") as error:
        load_prompts(tmp_path)
    assert one_line(error)


@pytest.mark.trainer
@pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, RePULSeTrainer, PPOTrainer])
def test_reinforce_rewards_the_whole_message(make, chat_tokenizer, monkeypatch, trainer_cls):
    """GRPO takes messages apart where the tokenizer has a `response_template`, PPO with it; RLOO does not, nor does REINFORCE."""
    part = {"role": "assistant", "content": "part"}
    monkeypatch.setattr(grpo_trainer, "parse_response", lambda *args, **kwargs: part)
    chat_tokenizer.response_template = "any"
    seen = []

    def look(completions, completion_ids, **kwargs):
        texts = [chat_tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids]
        seen.append([completion[0]["content"] for completion in completions] == texts)
        return [1.0 * len(ids) for ids in completion_ids]

    extra = {"processing_class": chat_tokenizer}
    make(trainer_cls, reward_funcs=look, dataset=rows_of(GOOD), extra=extra, max_steps=1).train()
    assert seen and all(whole == (trainer_cls is not PPOTrainer) for whole in seen)
