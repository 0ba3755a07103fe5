"""Conversations that cannot be used: refused in one line with their row, wherever prompts are read, before anything is drawn."""

import json

import pytest
from datasets import Dataset, IterableDataset
from transformers import GPT2Config, GPT2ForSequenceClassification
from trl.trainer import grpo_trainer

from examples.worlds.exact import ExactEvaluator
from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeTrainer
from trl_repulse.cli.main import main
from trl_repulse.cli.scripts import main_or_exit
from trl_repulse.data import drop_long_prompts, load_prompts
from trl_repulse.evaluation.callback import TailReportCallback
from trl_repulse.evaluation.gcg.config import GCGConfig
from trl_repulse.evaluation.gcg.evaluator import evaluate_gcg
from trl_repulse.evaluation.gcg.prompt import build_prompt
from trl_repulse.evaluation.log_probs import negative_log_probs
from trl_repulse.evaluation.rare.sampling import draw, find_temperature
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.generation import TransformersGenerator

from ..conftest import build_model, build_tokenizer


TRAINERS = [RePULSeTrainer, ReinforceTrainer, PPOTrainer]
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


def silent(completions, **kwargs):
    return [0.0 for _ in completions]


def one_line(error):
    return "\n" not in str(error.value) and len(str(error.value)) < 500


def rows_of(prompt):
    """A data set of one kind of rows, which Arrow can hold."""
    return Dataset.from_list([{"prompt": prompt}] * 16)


@pytest.fixture
def chat_tokenizer():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def judge(tokenizer):
    """A reward model of this name."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "num_labels": 1, "pad_token_id": 0}
    model = GPT2ForSequenceClassification(GPT2Config(vocab_size=len(tokenizer), **sizes))
    model.config._name_or_path = "judge"
    return model


@pytest.fixture
def nothing_loaded(monkeypatch):
    def loaded(*args, **kwargs):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", loaded)


@pytest.mark.trainer
@pytest.mark.parametrize("trainer_cls", TRAINERS)
class TestTrainers:
    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            *(pytest.param([prompt] * 16, WRONG, id=kind) for kind, prompt in MALFORMED.items()),
            *(([prompt] * 16, WRONG) for prompt in (3, TURN, ["the cat"])),
            ([GOOD] * 15 + [[]], "Row 16 of `{}` has an empty `prompt`"),
            ([GOOD, ANSWERED] * 8, ENDS),
        ],
    )
    def test_prompts_that_cannot_be_used(self, make, nothing_loaded, trainer_cls, rows, message):
        refused = Dataset.from_list([{"prompt": prompt} for prompt in rows])
        with pytest.raises(ValueError, match=message.format("train_dataset")) as error:
            make(trainer_cls, dataset=refused)
        assert one_line(error)
        for name, given in (("eval_dataset", refused), ("hard", {"hard": refused})):
            with pytest.raises(ValueError, match=message.format(name)):
                make(trainer_cls, dataset=rows_of(GOOD), extra={"eval_dataset": given})

    @pytest.mark.parametrize("name", NO_VARIABLES)
    def test_template_variables_that_are_none(self, make, nothing_loaded, trainer_cls, name):
        with pytest.raises(ValueError, match=SET.format(name)):
            make(trainer_cls, dataset=rows_of(GOOD), chat_template_kwargs={name: NO_VARIABLES[name]})
        with pytest.raises(ValueError, match=SET.format("tools")):
            make(trainer_cls, dataset=rows_of(GOOD), chat_template_kwargs='{"tools": []}')

    def test_templates(self, make, chat_tokenizer, trainer_cls):
        with pytest.raises(ValueError, match=NO_TEMPLATE.format("train_dataset")) as error:
            make(trainer_cls, dataset=rows_of(GOOD))
        assert one_line(error)
        with pytest.raises(ValueError, match=NO_TEMPLATE.format("eval_dataset")):
            make(trainer_cls, extra={"eval_dataset": rows_of(GOOD)})
        dataset = Dataset.from_list([{"prompt": GOOD}, {"prompt": [TURN, TURN]}] * 8)
        with pytest.raises(ValueError, match=REFUSED.format("train_dataset")) as error:
            make(trainer_cls, dataset=dataset, extra={"processing_class": chat_tokenizer})
        assert one_line(error)

    def test_a_reward_model_without_a_template(self, make, chat_tokenizer, tokenizer, judge, trainer_cls):
        extra = {"processing_class": chat_tokenizer, "reward_processing_classes": tokenizer}
        with pytest.raises(
            ValueError, match="Row 1 of `train_dataset`, as the reward model 'judge' reads it, is a conv"
        ) as error:
            make(trainer_cls, reward_funcs=judge, dataset=rows_of(GOOD), extra=extra)
        assert one_line(error)
        extra["reward_processing_classes"] = chat_tokenizer
        make(trainer_cls, reward_funcs=judge, dataset=rows_of(GOOD), extra=extra).train()

    @pytest.mark.thorough
    @pytest.mark.parametrize("kind", ["no content", "other keys", "empty", "mixed"])
    @pytest.mark.parametrize("share", ["auto", False])
    def test_streams_at_the_first_batch(self, make, chat_tokenizer, trainer_cls, kind, share):
        """The first rows are read at set-up if prompts are to be shared, the others in training."""
        prompts = {"empty": [GOOD, []], "mixed": [GOOD, "the cat"]}.get(kind) or [GOOD, MALFORMED[kind]]
        stream = IterableDataset.from_generator(lambda: iter([{"prompt": prompt} for prompt in prompts * 8]))
        settings = {"extra": {"processing_class": chat_tokenizer}, "num_generations": 2, "share_prompts": share}
        trainer = None if share else make(trainer_cls, dataset=stream, **settings)
        with pytest.raises(
            ValueError, match=r"Row \d+ of a batch of the data set (has a|has an empty|differs)"
        ) as error:
            make(trainer_cls, dataset=stream, **settings) if share else trainer.train()
        assert one_line(error)

    @pytest.mark.thorough
    def test_streams_that_the_template_refuses(self, make, chat_tokenizer, tokenizer, trainer_cls):
        stream = IterableDataset.from_generator(lambda: iter([{"prompt": [TURN, TURN]}] * 16))
        refused = "Row 1 of a batch, with the roles user, user, is refused .*must alternate"
        missing = "Row 1 of a batch is a conversation, but the tokenizer has no chat template"
        for own, message in ((chat_tokenizer, refused), (build_tokenizer(), missing)):
            settings = {"dataset": stream, "extra": {"processing_class": own}}
            with pytest.raises(ValueError, match=message) as error:  # where the first rows are read at set-up
                make(trainer_cls, **settings)
            assert one_line(error)
            trainer = make(trainer_cls, share_prompts=False, **settings)
            with pytest.raises(ValueError, match=message) as error:
                trainer.train()
            assert one_line(error)

    def test_conversations_that_are_well_formed(self, make, chat_tokenizer, trainer_cls):
        """Roles of several kinds; a row that is made as it is read is looked at only then."""
        answered = [TURN, {"role": "assistant", "content": "ran"}, TURN]
        dataset = Dataset.from_list([{"prompt": GOOD}, {"prompt": answered}] * 8)
        make(trainer_cls, reward_funcs=silent, dataset=dataset, extra={"processing_class": chat_tokenizer}).train()
        made = Dataset.from_dict({"prompt": range(16)}).with_transform(
            lambda rows: {"prompt": [GOOD for _ in rows["prompt"]]}
        )
        make(trainer_cls, dataset=made, extra={"processing_class": chat_tokenizer})


class TestEvaluation:
    """Held-out sampling, rare events, the callback, generators, attacks."""

    @pytest.fixture(params=["sampling", "draw", "temperature", "generator", "callback"])
    def read(self, request, tmp_path, model_dirs, make):
        """Reads prompts with a tokenizer."""
        model = build_model("gpt2", len(build_tokenizer()))

        def read(prompts, tokenizer):
            settings = SamplingSettings(num_samples=1, max_completion_length=2)
            if request.param == "sampling":
                return sample_completions(
                    tmp_path / "s",
                    model_dirs["gpt2"],
                    prompts,
                    silent,
                    settings,
                    tokenizer=tokenizer,
                    progress=False,
                )
            if request.param == "draw":
                return draw([model], tokenizer, prompts, silent, [2], 2)
            if request.param == "temperature":
                return find_temperature(model, tokenizer, prompts, 2, num_samples=2)
            if request.param == "generator":
                return TransformersGenerator({"policy": model}, tokenizer, 2).complete(prompts, "policy")
            trainer = make(ReinforceTrainer, extra={"processing_class": tokenizer})
            return TailReportCallback(trainer, prompts, num_samples=2)

        return read

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            *(pytest.param([prompt, GOOD], WRONG, id=kind) for kind, prompt in MALFORMED.items()),
            ([GOOD, ANSWERED], ENDS),
            ([GOOD, [TURN, TURN]], REFUSED),
            (["the cat", GOOD], "Row 2 of `{}` differs in kind from row 1"),
            ([GOOD, []], "Row 2 of `{}` has an empty `prompt`"),
        ],
    )
    def test_prompts_that_cannot_be_used(self, read, chat_tokenizer, rows, message):
        with pytest.raises(ValueError, match=message.format("prompts")) as error:
            read(rows, chat_tokenizer)
        assert one_line(error)

    def test_a_tokenizer_with_and_without_a_template(self, read, tokenizer, chat_tokenizer):
        read([GOOD], chat_tokenizer)
        with pytest.raises(ValueError, match=NO_TEMPLATE.format("prompts")) as error:
            read([GOOD], tokenizer)
        assert one_line(error)

    @pytest.mark.parametrize("name", NO_VARIABLES)
    def test_template_variables_that_are_none(self, tmp_path, chat_tokenizer, name):
        model, variables = build_model("gpt2", len(chat_tokenizer)), {name: NO_VARIABLES[name]}
        path = tmp_path / "negatives.jsonl"
        path.write_text(json.dumps({"prompt": GOOD, "completion": " bad"}))
        for refused in (
            lambda: SamplingSettings(chat_template_kwargs=variables),
            lambda: GCGConfig(chat_template_kwargs=variables),
            lambda: draw([model], chat_tokenizer, [GOOD], silent, [2], 2, chat_template_kwargs=variables),
            lambda: negative_log_probs(model, chat_tokenizer, path, chat_template_kwargs=variables),
            lambda: drop_long_prompts(rows_of(GOOD), chat_tokenizer, 9, variables),
        ):
            with pytest.raises(ValueError, match=SET.format(name)):
                refused()
        SamplingSettings(chat_template_kwargs={"tools": [], "thinking": True})  # without a trainer to give tools to

    def test_sampling_refuses_before_a_model_is_loaded(self, tmp_path, model_dirs, tokenizer, nothing_loaded):
        with pytest.raises(ValueError, match=NO_TEMPLATE.format("prompts")):
            sample_completions(tmp_path / "s", model_dirs["gpt2"], [GOOD], silent, tokenizer=tokenizer)
        with pytest.raises(ValueError, match=WRONG.format("prompts")):
            sample_completions(tmp_path / "s", model_dirs["gpt2"], rows_of([{"role": "user"}]), silent)

    def test_a_reward_model_without_a_template(self, tmp_path, model_dirs, chat_tokenizer, tokenizer, judge):
        with pytest.raises(
            ValueError,
            match="completion, as the reward model 'judge' reads it, is a conversation, but the tokenizer has no chat",
        ):
            sample_completions(
                *(tmp_path / "s", model_dirs["gpt2"], [GOOD], judge, SamplingSettings(max_completion_length=2)),
                tokenizer=chat_tokenizer,
                reward_processing_classes=[tokenizer],
                progress=False,
            )

    def test_exact_evaluation_is_of_plain_text(self, chat_tokenizer):
        with pytest.raises(ValueError, match="Exact evaluation needs plain-text prompts"):
            ExactEvaluator(chat_tokenizer, [GOOD], silent, [3], 2)

    def test_long_prompts(self, tokenizer, chat_tokenizer):
        prompts = Dataset.from_list([{"prompt": GOOD}, {"prompt": [TURN, TURN]}])
        for data in (prompts, prompts.to_iterable_dataset()):
            with pytest.raises(
                ValueError, match="Row 1 of the prompts is a conversation, but the tokenizer has no chat"
            ):
                list(drop_long_prompts(data, tokenizer, 9))
            with pytest.raises(ValueError, match="Row 2 of the prompts, with the roles user, user, is refused"):
                list(drop_long_prompts(data, chat_tokenizer, 9))

    def test_negatives(self, tmp_path, tokenizer, chat_tokenizer):
        model, path = build_model("gpt2", len(tokenizer)), tmp_path / "negatives.jsonl"
        for prompt, own, message in (
            (GOOD, tokenizer, "The prompt in line 1 of .* is a conversation, but the tokenizer has no chat"),
            (
                [{"content": "fish"}],
                chat_tokenizer,
                "Line 1 of .* has a `prompt` that is neither text nor a list of messages",
            ),
            (ANSWERED, chat_tokenizer, "Line 1 of .* ends in a message of the assistant"),
        ):
            path.write_text(json.dumps({"prompt": prompt, "completion": " bad"}))
            with pytest.raises(ValueError, match=message):
                negative_log_probs(model, own, path)

    @pytest.mark.parametrize(
        ("messages", "message"),
        [
            *((messages, "has a") for messages in [*MALFORMED.values(), []]),
            (ANSWERED, "ends in a message of the assistant"),
        ],
    )
    def test_attacks(self, chat_tokenizer, messages, message):
        with pytest.raises(ValueError, match=f"The conversation that is attacked {message}") as error:
            build_prompt(chat_tokenizer, messages, " ran")
        assert one_line(error)

    def test_attacks_that_the_template_refuses(self, tmp_path, chat_tokenizer):
        with pytest.raises(ValueError, match="conversation that is attacked, with the roles user, user, is refused"):
            build_prompt(chat_tokenizer, [TURN, TURN], " ran")
        chat_tokenizer.chat_template = "{{ raise_exception('No users') }}"
        rows, model = [{"goal": "the cat", "target": " ran"}], build_model("gpt2", len(chat_tokenizer))
        with pytest.raises(
            ValueError, match="Row 1 of the table: .* the roles user, is refused by the chat template .*No users"
        ):
            evaluate_gcg(model, chat_tokenizer, rows, lambda goals, responses: [], output=tmp_path / "out")


class TestCommands:
    """What a user of a command sees: one line, and no traceback."""

    @pytest.fixture
    def start(self, tmp_path, model_dirs):
        (tmp_path / "mine.py").write_text(
            "def reward(completions, **kwargs):\n    return [0.0 for _ in completions]\n"
        )
        reward = ["--reward_type", f"{tmp_path / 'mine.py'}:reward", "--max_completion_length", "2"]
        return {
            "evaluate": ["evaluate", str(tmp_path / "s"), "--model", model_dirs["gpt2"], *reward],
            "rare-events": ["rare-events", model_dirs["gpt2"], "--threshold", "-1", *reward],
        }

    @pytest.mark.parametrize("command", ["evaluate", "rare-events"])
    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("p.jsonl", '{"prompt": [{"role": "user", "content": "the cat"}]}', "Row 1 of `prompts` is a conversation, but the"),
            ("p.jsonl", '{"prompt": [{"role": "user"}]}', "neither text nor a list of messages"),
            ("p.jsonl", '{"prompt": ' + "[" * 100_000, "nested too deeply"),
            ("p.csv", 'prompt,tag\n"a,b\nc,d\n', "has a quote that is not balanced"),
            ("p.csv", "question\na\n", "only question; name the one that holds the prompts with `load_prompts(column=...)`"),
            ("p.jsonn", None, "p.jsonn`, and no data set of that name could be loaded from the Hugging Face Hub"),
        ],
    )  # fmt: skip
    def test_prompts(self, start, tmp_path, capsys, nothing_loaded, monkeypatch, command, name, text, message):
        monkeypatch.chdir(tmp_path)
        if text is not None:
            (tmp_path / name).write_text(text)
        assert main([*start[command], "--prompts", name]) == 1
        err = capsys.readouterr().err
        assert message in err and "Traceback" not in err
        assert err.startswith(f"trl-repulse {command}: ") and err.count("\n") == 1

    def test_attack_tables(self, tmp_path, model_dirs, capsys, nothing_loaded):
        (tmp_path / "t.csv").write_text('goal,target\n"a,b\nc,d\n')
        arguments = [
            "--table",
            str(tmp_path / "t.csv"),
            "--output",
            str(tmp_path / "o.jsonl"),
            "--reward_type",
            "refusal",
        ]
        assert main(["gcg", "--model_name_or_path", model_dirs["gpt2"], *arguments]) == 1
        err = capsys.readouterr().err
        assert "in the row that begins at line 2, has a quote that is not balanced" in err and err.count("\n") == 1

    @pytest.mark.trainer
    @pytest.mark.parametrize("flags", [[], ["--max_prompt_length", "8"]])
    def test_scripts(self, tmp_path, monkeypatch, flags):
        from trl_repulse import ReinforceConfig
        from trl_repulse.cli.arguments import TrainingScriptArguments, parse
        from trl_repulse.cli.scripts import run

        prompts = tmp_path / "p.jsonl"
        prompts.write_text('{"prompt": [{"role": "user", "content": "the waiter"}]}\n' * 16)
        config = tmp_path / "c.yaml"
        config.write_text("max_completion_length: 2\nreport_to: none\nuse_cpu: true\nbf16: false\n")
        argv = ["--output_dir", str(tmp_path / "out"), "--dataset_name", str(prompts), "--config", str(config), *flags]

        def script():
            run(ReinforceTrainer, *parse(argv, (TrainingScriptArguments, ReinforceConfig), config), "REINFORCE")

        with pytest.raises(SystemExit) as exit:
            main_or_exit(script)
        assert "is a conversation, but the tokenizer has no chat template" in str(exit.value)
        assert str(exit.value).startswith("error: Row 1 of ") and "\n" not in str(exit.value)


def test_names_that_are_no_file(tmp_path, monkeypatch):
    """Offline, as the tests are, and where the Hub knows no such name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "datasets.config.HF_DATASETS_CACHE", tmp_path
    )  # folders of these names may have been loaded before
    for name in ("p.jsonn", "data/prompts", "prompts", "a/b/c", "org/data-v1.2"):
        with pytest.raises(
            ValueError, match=f"no file or folder `{name}`, and no data set of that name could be loaded from"
        ) as error:
            load_prompts(name)
        assert one_line(error) and "correct the path or the name" in str(error.value)
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
    monkeypatch.setattr(
        grpo_trainer, "parse_response", lambda *args, **kwargs: {"role": "assistant", "content": "part"}
    )
    chat_tokenizer.response_template = "any"
    seen = []

    def look(completions, completion_ids, **kwargs):
        texts = [chat_tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids]
        seen.append([completion[0]["content"] for completion in completions] == texts)
        return [1.0 * len(ids) for ids in completion_ids]

    extra = {"processing_class": chat_tokenizer}
    make(trainer_cls, reward_funcs=look, dataset=rows_of(GOOD), extra=extra, max_steps=1).train()
    assert seen and all(whole == (trainer_cls is not PPOTrainer) for whole in seen)
