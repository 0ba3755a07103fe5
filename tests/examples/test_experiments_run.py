"""One update of each published training command, on small stand-ins of the same architectures and templates."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed

from examples.worlds import exact_tracking
from examples.worlds.exact_tracking import train

from ..reward_models import build_tokenizer, save_causal_model, save_model
from .test_experiments import COMMANDS, CONFIGS, SCRIPTS, TOY_BAD


pytestmark = [pytest.mark.trainer, pytest.mark.thorough]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
PROMPTS = ["the cat", "the dog ran the cat ate", "fish", "the fish sat bad"]
# Completions of an update, of a pass, and of a prompt. Where the published prompts have few, the number stays
BATCHES = {"toy": (8, 8, 8), "smollm": (10, 10, 5), "llama": (8, 4, 4)}
METHODS = {
    "ppo": "PPO",
    "reinforce": "REINFORCE",
    "reinforce_transform": "REINFORCE (exponential transform)",
    "policy_proposal": "RePULSe (policy as proposal)",
    "repulse": "RePULSe",
}
FILLERS = [
    "Ġz" + "".join(letters) for letters in itertools.islice(itertools.product("abcdefghijklmnop", repeat=4), 50252)
]
EXACT = "toy_kl0/reinforce-1"  # evaluated in full: about five seconds for each of two evaluations


def save_gpt2(folder):
    """GPT-2 with its 50,257 tokens, few of them words, an end of text and no padding."""
    words = ["This", *(f"Ġ{word}" for word in ("man", "is", "a"))]
    ids = {word: i for i, word in enumerate([*words, *FILLERS, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=end).save_pretrained(folder)
    set_seed(1)
    ends = {"bos_token_id": 50256, "eos_token_id": 50256}
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    config = GPT2Config(vocab_size=50257, initializer_range=0.3, **sizes, **ends)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


def chat_tokenizer(template, end, more):
    """A tokenizer of a policy: an end of its own, and no token types, which a causal model does not take."""
    tokenizer = build_tokenizer(chat_template=template, more=[*more, end])
    tokenizer.eos_token = end
    tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = ["input_ids", "attention_mask"]
    return tokenizer


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Flags that put stand-ins in place of what is on the Hub, by group."""
    folder = tmp_path_factory.mktemp("experiments")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS))
    chatml = chat_tokenizer(CHATML, "<|im_end|>", ["<|im_start|>"])
    llama3 = chat_tokenizer(LLAMA3, "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"])
    policies = {
        "toy": save_gpt2(folder / "gpt2"),
        "smollm": save_causal_model(folder / "smollm", "llama", chatml)[0],
        "llama": save_causal_model(folder / "llama", "llama", llama3, context=256)[0],
    }
    rewards = {
        "toy": save_model(folder / "toxicity", "roberta", build_tokenizer("pair", more=FILLERS))[0],
        "smollm": save_model(folder / "deberta", "deberta", build_tokenizer("pair"))[0],
        "llama": save_model(folder / "skywork", "llama", llama3, context=256)[0],
    }
    return {
        group: ["--model_name_or_path", policy, "--reward_model_path", rewards[group], "--dataset_name", str(prompts)]
        + (["--eval_dataset_name", str(prompts)] if group != "toy" else [])
        for group, policy in policies.items()
    }


def largest_step(before, after):
    """The largest change of a weight: Adam's first step is the learning rate wherever there is a gradient."""
    before, after = (load_file(f"{folder}/model.safetensors") for folder in (before, after))
    return max((after[name] - before[name]).abs().max().item() for name in before)


def run(identifier, paths, output_dir):
    command = COMMANDS[identifier]
    group = command["group"].split("_")[0]
    update, a_pass, generations = map(str, BATCHES[group])
    flags = ["--config", str(CONFIGS / f"{identifier}.yaml"), *paths[group]]
    flags += ["--output_dir", str(output_dir), "--max_steps", "1"]
    flags += ["--train_batch_size", update, "--per_device_train_batch_size", a_pass, "--num_generations", generations]
    flags += ["--per_device_eval_batch_size", a_pass, "--disable_tqdm", "true", "--logging_steps", "1"]
    train(SCRIPTS[command["method"]], flags)
    return json.loads((output_dir / "results.json").read_text())


def check(identifier, paths, output_dir):
    command = COMMANDS[identifier]
    flags, method, group = command["flags"], command["method"], command["group"].split("_")[0]
    results = run(identifier, paths, output_dir)
    assert results["method"] == METHODS[method]
    assert results["policy_updates"] == 1
    assert results["samples"] == BATCHES[group][0] * (2 if method == "repulse" else 1)
    metrics = results["metrics"]
    assert math.isfinite(metrics["reward"])
    assert ("eval_reward" in metrics) == ("heldout_prompt_data" in flags)

    rates = {"": flags["actor_learning_rate"] if method == "ppo" else flags["base_actor_learning_rate"]}
    if method == "repulse":
        rates["proposal"] = flags["actor_learning_rate"]
    for folder, rate in rates.items():
        step = largest_step(paths[group][1], output_dir / folder)
        assert step == pytest.approx(rate, rel=0.02, abs=1.5e-7)  # weights near 1 are that coarse in float32
        assert step > 0
    assert (output_dir / "proposal").exists() == (method == "repulse")
    return results


@pytest.mark.parametrize("identifier", [name for name in COMMANDS if name.endswith("-1") and name != EXACT])
def test_one_update(identifier, paths, tmp_path, monkeypatch):
    """Of commands that differ in numbers alone, one; of the toy's exact evaluations, which take seconds, only what they are asked."""
    asked = []

    def ask(model, prompt_ids, bad_token_ids, max_completion_length, eos_token_ids, batch_size):
        assert model.config.vocab_size == 50257
        asked.append((prompt_ids, list(bad_token_ids), max_completion_length, list(eos_token_ids)))
        return torch.tensor([-1.0])

    monkeypatch.setattr(exact_tracking, "exact_log_prob_bad", ask)
    results = check(identifier, paths, tmp_path)
    if identifier.startswith("toy"):
        evaluations = 4 if COMMANDS[identifier]["method"] == "repulse" else 2
        assert asked == [([[0, 1, 2, 3]], TOY_BAD, 2, [50256])] * evaluations
        assert results["final"] == {"log_prob_bad": -1.0}
    else:
        assert not asked


def test_one_update_with_its_exact_evaluations(paths, tmp_path):
    results = check(EXACT, paths, tmp_path)
    assert results["initial"]["log_prob_bad"] < 0
    assert results["final"]["log_prob_bad"] != results["initial"]["log_prob_bad"]


def test_the_scripts_are_those_of_the_commands():
    assert set(METHODS) == set(SCRIPTS) == {command["method"] for command in COMMANDS.values()}
