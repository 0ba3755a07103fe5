"""The embedded world: a tiny policy, a tiny reward model and prompts, which ship with the package.

A customer speaks, and a clerk answers in one sentence. The policy is a GPT-2 of 2 layers and width 96 that was trained on such
sentences; about one answer in a hundred is rude. The reward model was trained to tell polite answers from rude ones. There are
240 prompts to train on and 120 others. Everything is in the ordinary Hugging Face format and loads with `from_pretrained` from
the paths below. In a checkout, `python -m benchmarks.held_out.build` makes it.

Importing this module imports neither torch nor transformers.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal


if TYPE_CHECKING:
    from datasets import Dataset


__all__ = ["load_prompts", "policy_path", "prompts_path", "reward_model_path", "settings_path", "stored_results"]

_WORLD = Path(__file__).parent / "world"


def policy_path() -> str:
    """Folder of the policy with its tokenizer, for `from_pretrained`."""
    return str(_WORLD / "policy")


def reward_model_path() -> str:
    """Folder of the reward model, a sequence classifier with one label, and its tokenizer, for `from_pretrained` or
    a trainer's `reward_funcs`."""
    return str(_WORLD / "reward_model")


def prompts_path(split: Literal["train", "unseen"] = "train") -> str:
    """JSONL file of the prompts, one `{"prompt": ...}` a line: those to train on, or `"unseen"` ones."""
    return str(_WORLD / f"{split}.jsonl")


def settings_path(command: str) -> str:
    """YAML file, for `--config`, with which a training command such as `"repulse-ppo"` runs in this world."""
    return str(Path(__file__).parent / "settings" / f"{command}.yaml")


def load_prompts(split: Literal["train", "unseen"] = "train") -> "Dataset":
    """The prompts of [`prompts_path`] as a data set with one column, `"prompt"`, of plain text."""
    from datasets import Dataset

    with open(prompts_path(split), encoding="utf-8") as file:
        return Dataset.from_list([json.loads(line) for line in file])


def stored_results() -> dict[str, dict[str, Any]]:
    """By name, what the initial policy and a run of REINFORCE have on the unseen prompts: `unseen` in such a run's
    `results.json`."""
    return json.loads((_WORLD / "results.json").read_text(encoding="utf-8"))
