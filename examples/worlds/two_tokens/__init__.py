"""
The world of two tokens: a tiny policy, a tiny reward model and four prompts, as in the paper's toy experiment.

Completions have two tokens over a vocabulary of fewer than two hundred, so that everything that RePULSe estimates can be computed
by enumeration (`examples/worlds/exact.py`). `python -m examples.worlds.two_tokens.build` builds it again.
"""

import json
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase


WORLD = Path(__file__).parent / "world"
CONFIGS = Path(__file__).parents[2] / "configs" / "two_tokens"


def policy_path() -> str:
    """Folder of the policy, a GPT-2 language model with its tokenizer."""
    return str(WORLD / "policy")


def reward_model_path() -> str:
    """Folder of the reward model, a GPT-2 sequence classifier with one label, and its tokenizer."""
    return str(WORLD / "reward_model")


def prompts_path() -> str:
    """File of the prompts, one `{"prompt": ...}` a line."""
    return str(WORLD / "prompts.jsonl")


def config_path(command: str) -> str:
    """Settings of a training command, such as `"repulse-ppo"`, with paths that hold in the checkout's top folder."""
    return str(CONFIGS / f"{command.replace('-', '_')}.yaml")


def paths() -> list[str]:
    """The world's files as arguments of a training command, from any folder."""
    models = ["--model_name_or_path", policy_path(), "--reward_model_path", reward_model_path()]
    return [*models, "--dataset_name", prompts_path()]


def flags(command: str) -> list[str]:
    """Arguments of a training command that runs in this world, from any folder."""
    return ["--config", config_path(command), *paths()]


def load_prompts() -> Dataset:
    """The prompts as a data set with one column, `"prompt"`."""
    with open(prompts_path(), encoding="utf-8") as file:
        return Dataset.from_list([json.loads(line) for line in file])


def bad_words() -> list[str]:
    """The rude words, whose use in a completion makes it bad. All are mild."""
    return json.loads((WORLD / "bad_words.json").read_text(encoding="utf-8"))


def bad_token_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of the rude words, in their order; a word is one token of the policy's tokenizer, with a leading space."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[" " + word] for word in bad_words()]
