"""What the evaluation's tests share: small sample sets, and a run of the sampler for a process that is killed."""

import json

import numpy as np
import pyarrow as pa

from trl_repulse.evaluation import records
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions

from .conftest import build_model, build_tokenizer, word_reward


# What a chat model reads, and " bad" behind it unless it may think
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if not thinking | default(true) %} bad{% endif %}"


def write_inputs(folder, rewards="[0.0 for _ in completions]", prompts=("the cat", "fish")):
    """Prompts and a reward function in files, which the expression `rewards` returns; the flags that name them."""
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "mine.py").write_text(f"def reward(prompts, completions, **columns):\n    return {rewards}\n")
    flags = ["--prompts", str(folder / "prompts.jsonl"), "--reward_type", f"{folder / 'mine.py'}:reward"]
    return [*flags, "--max_completion_length", "2"]


def save_chat(folder, template):
    """The path of a saved random GPT-2, whose tokenizer has a chat template; and the tokenizer."""
    tokenizer = build_tokenizer(chat_template=template)
    for each in (build_model("gpt2", len(tokenizer)), tokenizer):
        each.save_pretrained(folder)
    return str(folder), tokenizer


def write_samples(folder, values, weights="w", prompts=None, shards=1, completions=None, **settings):
    """A complete folder of samples whose rewards are `values`, (P, N); other columns are functions of it."""
    values = np.asarray(values, dtype=np.float64)
    prompts = prompts or [f"prompt {i}" for i in range(len(values))]
    header = {
        "model": {"name": "m", "revision": None, "weights": weights},
        "reference": None,
        "rewards": {"r": {"name": "r"}},
        "prompts": {"count": len(values), "sha256": records.digest(prompts)},
        "settings": {"num_samples": values.shape[1], "seed": 0, "revision": None, **settings},
        "device": "cpu",
        "versions": {"trl-repulse": "0"},
    }
    records.open_folder(folder, header)
    table = pa.table(
        {
            "prompt": [prompt for prompt in prompts for _ in range(values.shape[1])],
            "completion": completions or [f"completion {i}" for i in range(values.size)],
            "reward": pa.array(values.ravel(), pa.float64(), from_pandas=True),
            "return": pa.array(values.ravel() - 1.0, pa.float64(), from_pandas=True),
        }
    )
    size = -(-len(table) // shards)
    for number in range(shards):
        records.write_shard(folder, number, table.slice(number * size, size))
    records.close_folder(folder, shards)
    return folder


def sample(folder, model, prompts, reward=word_reward, reference=None, tokenizer=None, engine_kwargs=None, **settings):
    """Few and short completions, in several shards."""
    settings = SamplingSettings(**({"num_samples": 4, "max_completion_length": 3, "shard_size": 5} | settings))
    options = {"reference": reference, "tokenizer": tokenizer, "engine_kwargs": engine_kwargs, "progress": False}
    return sample_completions(folder, model, prompts, reward, settings, **options)


def sample_slowly(folder, model):
    """Many small shards, so that there is time to kill the process."""
    settings = SamplingSettings(num_samples=80, max_completion_length=3, batch_size=4, shard_size=4, seed=3)
    prompts = ["the cat", "fish", "the dog ran the cat ate"]
    sample_completions(folder, model, prompts, word_reward, settings, reference=model, progress=False)
