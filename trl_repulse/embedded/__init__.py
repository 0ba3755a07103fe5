"""
The embedded world: a tiny policy, a tiny reward model and four prompts that ship with the package.

Completions have two tokens over a vocabulary of fewer than two hundred, so that every quantity that RePULSe estimates
can also be computed exactly (see [`~trl_repulse.evaluation.exact.ExactEvaluator`]). Everything is in the ordinary
Hugging Face format and loads with `from_pretrained` from the paths below. In a checkout,
`python -m benchmarks.embedded.build` rebuilds it.

Importing this module imports neither torch nor transformers.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


__all__ = [
    "bad_token_ids",
    "bad_words",
    "load_prompts",
    "policy_path",
    "prompts_path",
    "reward_model_path",
    "settings_path",
]

_WORLD = Path(__file__).parent / "world"


def policy_path() -> str:
    """
    Folder of the policy, a GPT-2 causal language model with its tokenizer.

    Returns:
        `str`: path for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.
    """
    return str(_WORLD / "policy")


def reward_model_path() -> str:
    """
    Folder of the reward model, a GPT-2 sequence classifier with one label, and its tokenizer.

    Returns:
        `str`: path for `AutoModelForSequenceClassification.from_pretrained`, or for a trainer's `reward_funcs`.
    """
    return str(_WORLD / "reward_model")


def prompts_path() -> str:
    """
    File of the prompts, one `{"prompt": ...}` a line.

    Returns:
        `str`: path of a JSONL file.
    """
    return str(_WORLD / "prompts.jsonl")


def settings_path(command: str) -> str:
    """
    File of the settings with which a training command runs in this world.

    Args:
        command (`str`):
            Training command, such as `"repulse"` or `"repulse-ppo"`.

    Returns:
        `str`: path of a YAML file for `--config`.
    """
    return str(Path(__file__).parent / "settings" / f"{command}.yaml")


def load_prompts() -> "Dataset":
    """
    The prompts as a dataset.

    Returns:
        [`~datasets.Dataset`]: one column, `"prompt"`, of plain text.
    """
    from datasets import Dataset

    with open(prompts_path(), encoding="utf-8") as file:
        return Dataset.from_list([json.loads(line) for line in file])


def bad_words() -> list[str]:
    """
    The rude words, whose use in a completion makes it bad. All are mild.

    Returns:
        `list[str]`: words, without spaces.
    """
    return json.loads((_WORLD / "bad_words.json").read_text(encoding="utf-8"))


def bad_token_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """
    Token ids of the rude words.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer of the embedded policy. A word is one token of it, with a leading space.

    Returns:
        `list[int]`: one id a word, in the order of [`bad_words`].

    Raises:
        ValueError: If the tokenizer does not know one of the words as a single token.
    """
    vocabulary = tokenizer.get_vocab()
    ids = []
    for word in bad_words():
        if " " + word not in vocabulary:
            raise ValueError(
                f"The tokenizer has no token {' ' + word!r}. Pass the embedded world's own tokenizer, "
                "AutoTokenizer.from_pretrained(policy_path())."
            )
        ids.append(vocabulary[" " + word])
    return ids
