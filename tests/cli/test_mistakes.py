"""
Mistakes of users. Each ends in one line that names what is wrong and what to do, and most before a model is loaded.

Each is made as a user makes it, in a training command or with a trainer, in a call that is right otherwise.
"""

import importlib.metadata
import importlib.util
import json

import pytest
import torch
from peft import get_peft_model
from transformers import GPT2ForSequenceClassification, PreTrainedModel
from transformers.integrations import unset_hf_deepspeed_config

from examples.worlds import two_tokens
from trl_repulse.cli.methods import train
from trl_repulse.cli.scripts import main_or_exit
from trl_repulse.evaluation._generation import as_function

from ..conftest import about_the_cpu, build_model, build_tokenizer
from ..engine.test_adapters import lora


pytestmark = [pytest.mark.trainer, about_the_cpu]


class User:
    """Makes calls that are right but for what they are given."""

    def __init__(self, folder, make, model_dirs, tokenizer):
        self.folder, self.make, self.models, self.tokenizer = folder, make, model_dirs, tokenizer
        self.loaded = []

    def command(self, name="repulse", **flags):
        """A training command with a model, reward and prompts of the user's own; `None` leaves a flag out."""
        flags = {
            "model_name_or_path": two_tokens.policy_path(),
            "reward_model_path": two_tokens.reward_model_path(),
            "dataset_name": two_tokens.prompts_path(),
            "output_dir": self.folder / "out",
            "max_completion_length": 2,
            "bad_reward_threshold": -4,
            **flags,
        }
        given = {flag: str(value) for flag, value in flags.items() if value is not None}
        main_or_exit(lambda: train(name, [word for flag, value in given.items() for word in (f"--{flag}", value)]))

    def file(self, name, text):
        path = self.folder / name
        path.write_text(text)
        return path

    def adapter(self):
        get_peft_model(build_model("gpt2", len(self.tokenizer)), lora()).save_pretrained(self.folder / "adapter")
        return str(self.folder / "adapter")

    def reward_of_few_tokens(self):
        model = GPT2ForSequenceClassification.from_pretrained(self.models["gpt2"], num_labels=1)
        model.config.pad_token_id = 0
        model.resize_token_embeddings(5)
        model.save_pretrained(self.folder / "few")
        self.tokenizer.save_pretrained(self.folder / "few")
        return str(self.folder / "few")


@pytest.fixture
def user(tmp_path, make, model_dirs, tokenizer):
    return User(tmp_path, make, model_dirs, tokenizer)


# Name -> mistake, words for what is wrong, words for the remedy
MISTAKES = {
    # Prompts
    "no prompts": (
        lambda user: user.command(dataset_name=None),
        "`--dataset_name` is needed",
        "give a path or a Hub name",
    ),
    # Fields and flags
    "positive target_dist_beta": (
        lambda user: user.command(proposal="learned", target_dist_beta=10),
        "`target_dist_beta=10.0`",
        "must be below 0 for the tilted potential",
    ),
    "the paper's beta as TRL's": (
        lambda user: user.command(beta=-10),
        "`beta=-10.0` must be at least 0",
        "`target_dist_beta` of `RePULSeConfig`",
    ),
    "missing file of settings": (
        lambda user: user.command(config=user.folder / "mine.yaml"),
        "mine.yaml`, which `--config` names",
        "give the path of a YAML file",
    ),
    "output folder that the system refuses": (
        lambda user: user.make(output_dir="/proc/out"),
        "`output_dir='/proc/out'` cannot be written (/proc: ",
        "name another folder",
    ),
    "reward model of fewer tokens": (
        lambda user: user.command(reward_model_path=user.reward_of_few_tokens()),
        "`reward_funcs[0]` has embeddings for 5 tokens, and its tokenizer has 19",
        "use the tokenizer that it was trained with",
    ),
    "reward of fewer tokens, in evaluation": (
        lambda user: as_function(user.reward_of_few_tokens(), None, torch.device("cpu")),
        "A reward model has embeddings for 5 tokens, and its tokenizer has 19",
        "use the tokenizer that it was trained with",
    ),
    "completions longer than the context": (
        lambda user: user.command(max_completion_length=256),
        "`max_completion_length=256` leaves no room for a prompt in the model's context of 64 tokens",
        "lower it",
    ),
    "output_dir is a file": (
        lambda user: user.command(output_dir=user.file("out", "")),
        "`output_dir='",
        "is a file; name a folder",
    ),
    # Models
    "adapter as a model": (
        lambda user: user.command(model_name_or_path=user.adapter()),
        "is the folder of an adapter, without its base",
        "`merge_and_unload`",
    ),
    "model that is not on the Hub": (
        lambda user: user.command(model_name_or_path="nobody/nothing"),
        "`model='nobody/nothing'` (`--model_name_or_path` on the command line) cannot be loaded",
        "give the path of a saved model, or its id on the Hub",
    ),
    "model that is not there, for TRL's trainer": (
        lambda user: user.command(
            "grpo", bad_reward_threshold=None, model_name_or_path=user.folder / "nothing", max_prompt_length=8
        ),
        "nothing'` (`--model_name_or_path` on the command line) cannot be loaded",
        "give the path of a saved model",
    ),
    # Rewards
    "reward model that is not there": (
        lambda user: user.command(reward_model_path=user.folder / "nothing"),
        "(`--reward_model_path` on the command line) cannot be loaded",
        "give the path of a saved model",
    ),
    "no reward": (
        lambda user: user.command(reward_model_path=None),
        "`--reward_model_path` is needed",
        "give a path or a Hub name",
    ),
    **{
        f"{field} that are no JSON": (
            lambda user, field=field: user.command(reward_type="toxicity", **{field: "{label: 1}"}),
            f"`{field}='{{label: 1}}'` is not valid JSON",
            'write e.g. `{"a_name": 300}`',
        )
        for field in ("reward_kwargs", "model_init_kwargs")
    },
    "reward function without **kwargs": (
        lambda user: user.make(reward_funcs=lambda prompts, completions: [0.0] * len(completions)),
        "The reward function '<lambda>' does not take `completion_ids`, `trainer_state`",
        "add `**kwargs` to its parameters",
    ),
    # Packages and earlier runs
    "missing vLLM": (
        lambda user: user.command(use_vllm=True),
        "`use_vllm=True` needs vLLM, which is not installed",
        "pip install 'trl-repulse[vllm]'",
    ),
    "missing DeepSpeed": (
        lambda user: user.command(deepspeed=user.file("zero.json", json.dumps({"zero_optimization": {"stage": 2}}))),
        "'deepspeed>=",
        'Run `pip install "trl-repulse[deepspeed]"`',
    ),
    "resuming what was never begun": (
        lambda user: user.command(resume_from_checkpoint="true"),
        "There is no complete checkpoint in",
        "start without `resume_from_checkpoint`",
    ),
}
# Text of the file of `--config` -> words for what is wrong in it, words for the remedy
FILES = {
    "alpha: [1\n": ("is not valid YAML", "correct it"),
    "alpha: 1\nseed: 1\nalpha: 0\n": ("has `alpha` on line 1 and again on line 3", "keep one"),
    "reward_kwargs: {label: 1, label: 0}\n": ("has `label` on line 1 and again on line 1", "keep one"),
    "max_steps: {start: 1}\n": ("has `max_steps: {'start': 1}`, which cannot be read", "it takes plain values"),
    "reward_weights: [1, a]\n": ("has `reward_weights: [1, 'a']`, which cannot be read", "could not convert string"),
    "max_steps: ten\n": ("has `max_steps: ten`, which cannot be read", "invalid literal for int()"),
    "training:\n  learning_rate: 1e-5\n": (
        "has `training`, which is no argument. Nested sections are not read",
        "write their settings at the top level.",
    ),
}
MISTAKES |= {
    text: (lambda user, text=text: user.command(config=user.file("mine.yaml", text)), f"mine.yaml` {wrong}", remedy)
    for text, (wrong, remedy) in FILES.items()
}
# Those that only a model, or what it drew, can show
AFTER_LOADING = {
    "reward model of fewer tokens": "the embeddings are counted",
    "reward of fewer tokens, in evaluation": "the embeddings are counted",
}
# Name -> package that is missing, and what says so
MISSING = {
    "missing vLLM": ("vllm", "trl_repulse.generation._engine.is_vllm_available"),
    "missing DeepSpeed": ("deepspeed", "transformers.integrations.deepspeed.is_deepspeed_available"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_what_is_wrong_and_a_remedy(name, user, monkeypatch):
    mistake, wrong, remedy = MISTAKES[name]
    load, version, loaded = PreTrainedModel.from_pretrained.__func__, importlib.metadata.version, []
    package, target = MISSING.get(name, (None, None))

    def note(cls, *args, **kwargs):
        loaded.append(cls.__name__)
        return load(cls, *args, **kwargs)

    def version_of(name):
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(note))
    if package is not None:
        monkeypatch.setattr(importlib.metadata, "version", version_of)
        monkeypatch.setattr(target, lambda *args, **kwargs: False)
    with pytest.raises((SystemExit, ValueError, TypeError, ImportError, RuntimeError)) as caught:
        mistake(user)
    unset_hf_deepspeed_config()  # where DeepSpeed is installed, its settings were read before it was missed
    said = caught.value.code if isinstance(caught.value, SystemExit) else str(caught.value)
    assert wrong in said and remedy in said
    assert "\n" not in said and "Traceback" not in said
    assert name in AFTER_LOADING or not loaded


def test_a_tokenizer_without_padding_is_no_mistake(make):
    tokenizer = build_tokenizer()
    tokenizer.pad_token = None
    trainer = make(extra={"processing_class": tokenizer}, max_steps=1)
    trainer.train()
    assert trainer.processing_class.pad_token == tokenizer.eos_token
