"""
The published training commands: each has a configuration file that says the same, and can be run.

What a flag should have become is said here once more, flag by flag, independently of the files.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from examples.worlds.exact_tracking import ARGUMENTS
from trl_repulse import RePULSeConfig, embedded
from trl_repulse.cli import arguments
from trl_repulse.evaluation.gcg import GCGEvaluationConfig, GCGRunArguments


ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
COMMANDS = {
    command["id"]: command
    for command in json.loads((ROOT / "tests" / "experiments.json").read_text())
    if command["method"] != "gcg"
}
SCRIPTS = {name: name for name in ("repulse", "reinforce", "ppo")}
SCRIPTS |= {"policy_proposal": "repulse", "reinforce_transform": "reinforce"}
REWARD_TYPES = {
    "nicholasKluge/ToxicityModel": "toxicity",
    "OpenAssistant/reward-model-deberta-v3-large-v2": "sequence_pair",
    "Skywork/Skywork-Reward-V2-Llama-3.2-1B": "chat",
}
TOY_BAD = [5089, 9372, 20654, 25617, 30998, 31699, 34094, 46733, 21551, 40267]
TOY_BAD += [7510, 16211, 20041, 32574, 41356, 31030, 47209, 18185, 29836]


def parse(identifier, *flags):
    command = SCRIPTS[COMMANDS[identifier]["method"]]
    argv = ["--config", str(CONFIGS / f"{identifier}.yaml"), *flags]
    return arguments.parse(argv, ARGUMENTS[command], embedded.settings_path(command))


# What becomes of each flag: (field, value) pairs, from the flag's value, all flags and the method

TRAINS_PROPOSAL, NEGATIVE_TERM = ("repulse",), ("repulse", "policy_proposal")


def only_for(methods, name, convert=lambda value: value):
    return lambda value, flags, method: [(name, convert(value))] if method in methods else []


def as_is(name):
    return lambda value, flags, method: [(name, value)]


def nothing_but(*accepted):
    """A flag that has no counterpart, and the values for which none is needed."""

    def rule(value, flags, method):
        assert value in accepted, f"{value} has to be carried over"
        return []

    return rule


def passes(value, flags, method):
    return [("num_train_epochs", value * flags.get("fit_steps", 1))]


def episodes(value, flags, method):
    if method == "ppo":
        return passes(value, flags, method)
    return (
        [("proposal_updates_per_step", value)] if method in TRAINS_PROPOSAL else nothing_but(1)(value, flags, method)
    )


def alpha(value, flags, method):
    if method in NEGATIVE_TERM:
        return [("alpha", value), ("alpha_normalization", "samples")]
    if "reward_transform" in flags:
        return [("reward_transform_alpha", value)]
    return nothing_but(0)(value, flags, method)


def tilt(value, flags, method):
    if method in NEGATIVE_TERM:
        return [("target_dist_beta", value), ("potential", "tilted")]
    return [("reward_transform_beta", value)] if "reward_transform" in flags else []


def saved(value, flags, method):
    return [("save_strategy", "no")] if value == -1 else [("save_strategy", "steps"), ("save_steps", value)]


def betas(value, flags, method):
    first, second = map(float, value.split())
    return [("adam_beta1", first), ("adam_beta2", second)]


def actor_rate(value, flags, method):
    if method == "ppo":
        return [("learning_rate", value)]
    return [("proposal_learning_rate", value)] if method in TRAINS_PROPOSAL else []


RULES = {
    "pretrain": as_is("model_name_or_path"),
    "reward_pretrain": lambda value, *_: [("reward_model_path", value), ("reward_type", REWARD_TYPES[value])],
    "rm_type": nothing_but("rlhf"),
    "rm_max_len": lambda value, *_: [("reward_kwargs", {"max_length": value})],
    "prompt_data": as_is("dataset_name"),
    "input_key": as_is("prompt_column"),
    "apply_chat_template": as_is("apply_chat_template"),
    "new_custom_single_prompt": lambda value, *_: [("single_prompt", "This man is a")],
    "prompt_max_len": as_is("max_prompt_length"),
    "generate_max_len": as_is("max_completion_length"),
    "rollout_batch_size": lambda value, flags, _: [("train_batch_size", value * flags["duplicate_rollout_batch_by"])],
    "duplicate_rollout_batch_by": as_is("num_generations"),
    "train_batch_size": as_is("generation_batch_size"),
    "micro_train_batch_size": as_is("per_device_train_batch_size"),
    "micro_rollout_batch_size": nothing_but(1, 5, 50),  # TRL samples a whole generation batch at once
    "num_episodes": episodes,
    "harmlessness_training_num_episodes": passes,
    "fit_steps": nothing_but(50),  # a factor of the two above
    "init_kl_coef": as_is("beta"),
    "alpha": alpha,
    "target_dist_beta": tilt,
    "reward_transform": lambda value, *_: [("reward_transform", {"minus_alpha_exp_beta_r": "exponential"}[value])],
    "reinforce_baseline_type": lambda value, *_: [("baseline", {"expectation": "leave_one_out"}[value])],
    "actor_loss_type": only_for(TRAINS_PROPOSAL, "proposal_loss"),
    "parameterization": only_for(
        TRAINS_PROPOSAL, "proposal_parameterization", lambda value: {"policy_psi_q_p_s_t": "token"}[value]
    ),
    "harmlessness_training_loss_type": only_for(
        NEGATIVE_TERM, "negative_loss", lambda value: {"neg_training": "push_down"}[value]
    ),
    "use_base_as_proposal": lambda value, flags, method: [("proposal", "policy" if value else "learned")],
    "do_harmlessness_training": nothing_but(True),  # which script runs
    "base_actor_learning_rate": as_is("learning_rate"),
    "actor_learning_rate": actor_rate,
    "critic_learning_rate": only_for(("ppo",), "value_learning_rate"),
    "lr_scheduler": as_is("lr_scheduler_type"),
    "adam_betas": betas,
    "seed": as_is("seed"),
    "bf16": as_is("bf16"),
    "gradient_checkpointing": as_is("activation_checkpointing"),
    "zero_stage": nothing_but(2),  # how processes share memory, not what is computed
    "save_steps": lambda value, flags, method: saved(value, flags, method) if method == "ppo" else [],
    "save_steps_harmless": saved,
    "save_negdata": as_is("save_negatives"),
    "save_negdata_threshold": as_is("bad_reward_threshold"),
    "evaluate_heldout_sampling": nothing_but(True),
    "heldout_prompt_data": lambda value, *_: [("eval_dataset_name", value), ("dataset_test_split", "train")],
    "heldout_input_key": as_is("eval_prompt_column"),
    "analytic_bad_word_calc": lambda value, *_: [("bad_token_ids", TOY_BAD)],
}
# What no flag says: the research code's own settings
ALWAYS = {"weight_decay": 0.0, "warmup_steps": 0, "max_grad_norm": 1.0, "optim": "adamw_torch_fused"}
ALWAYS |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "disable_dropout": True, "dtype": "float32"}
UNSET = ("reward_kwargs", "single_prompt", "bad_token_ids", "eval_dataset_name", "reward_transform")
DEFAULTS = dict.fromkeys(("bf16", "apply_chat_template", "save_negatives"), False) | dict.fromkeys(UNSET)
OURS = {
    "ppo": {"num_iterations": 1, "epsilon": 0.2, "value_clip": 0.2, "gae_lambda": 0.95, "gamma": 1.0}
    | {"loss_type": "grpo", "whiten_advantages": True},
    "repulse": {"logprob_reduction": "mean", "proposal_update_order": "before", "proposal": "learned"},
    "policy_proposal": {"logprob_reduction": "mean", "has_proposal": False},
    "reinforce": {"logprob_reduction": "mean"},
    "reinforce_transform": {"logprob_reduction": "mean"},
}
# The user's, not the experiment's
FREE = {"output_dir", "logging_steps", "report_to", "tracking_every", "save_total_limit", "per_device_eval_batch_size"}


def expected_settings(command):
    flags, method = command["flags"], command["method"]
    settings = DEFAULTS | ALWAYS | OURS[method]
    if command["group"] == "llama":
        settings["bad_reward_threshold"] = -7.0
    for flag, value in flags.items():
        for name, converted in RULES[flag](value, flags, method):
            settings[name] = converted
    return settings


def found_settings(script_args, args, model_args):
    return vars(model_args) | vars(args) | vars(script_args) | {"has_proposal": getattr(args, "has_proposal", None)}


def test_there_is_a_file_for_each_command_and_no_other():
    assert len(COMMANDS) == 31
    paths = [path for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "two_tokens"]
    found = {str(path.relative_to(CONFIGS).with_suffix("")) for path in paths}
    assert found == set(COMMANDS) | {"gcg_eval/gcg-1"}  # the attack's is read in test_gcg_cli.py


@pytest.mark.parametrize("identifier", COMMANDS)
def test_the_file_says_what_the_command_says(identifier):
    command = COMMANDS[identifier]
    expected = expected_settings(command)
    found = found_settings(*parse(identifier))
    assert {name: found[name] for name in expected} == expected

    path = CONFIGS / f"{identifier}.yaml"
    assert set(yaml.safe_load(path.read_text())) <= set(expected) | FREE
    script = SCRIPTS[command["method"]]
    assert f"accelerate launch examples/{script}.py --config examples/configs/{identifier}.yaml" in path.read_text()


@pytest.mark.parametrize("processes, steps", [(1, 4), (2, 2), (4, 1)])
def test_an_update_is_the_same_on_any_number_of_processes(monkeypatch, processes, steps):
    monkeypatch.setattr(RePULSeConfig, "world_size", property(lambda self: processes))
    monkeypatch.setattr("accelerate.utils.get_int_from_env", lambda names, default: processes)
    args = parse("llama/repulse-1")[1]
    found = (args.gradient_accumulation_steps, args.steps_per_generation, args.generation_batch_size)
    assert found == (steps, steps, 80)
    monkeypatch.setattr(RePULSeConfig, "world_size", 3)
    with pytest.raises(ValueError, match="`train_batch_size` needs WORLD_SIZE=3 in the environment"):
        parse("llama/repulse-1", "--num_generations", "4", "--per_device_train_batch_size", "4")


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="`train_batch_size=81` is no multiple of the 20 completions of one pass"):
        parse("llama/repulse-1", "--train_batch_size", "81")


def names_in(cell):
    return re.findall(r"`(\w+)`", cell)


def migrations():
    """Rows of the tables of the migration page: flags -> names."""
    text = (ROOT / "docs" / "migration.md").read_text().partition("## Other commands")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    return [(names_in(row[0]), names_in(row[1])) for row in rows]


def test_the_migration_page_has_every_flag_of_the_commands():
    commands = json.loads((ROOT / "tests" / "experiments.json").read_text())
    flags = {flag for command in commands for flag in command["flags"]}
    assert flags <= {flag for row in migrations() for flag in row[0]}


def test_the_migration_page_names_what_exists():
    read = [each for script in ("repulse", "reinforce", "ppo") for each in parse(f"smollm/{script}-1")]
    found = {field.name for cls in (*read, GCGRunArguments, GCGEvaluationConfig) for field in dataclasses.fields(cls)}
    assert not {name for row in migrations() for name in row[1]} - found
