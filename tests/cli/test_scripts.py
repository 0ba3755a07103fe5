"""What the training commands share, and those beside `repulse`: REINFORCE, GRPO and PPO."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from transformers import AutoTokenizer, Trainer

from examples.worlds import two_tokens
from examples.worlds.exact_tracking import ARGUMENTS, train
from trl_repulse import embedded
from trl_repulse._errors import describe_error, from_reward
from trl_repulse.cli import arguments, methods
from trl_repulse.cli import train as launcher
from trl_repulse.cli.scripts import load_data, main_or_exit
from trl_repulse.engine.reward_functions import with_checks


pytestmark = pytest.mark.trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ["--max_completion_length", "1", "--max_steps", "2", "--disable_tqdm", "true"]
OF_ONE_PROMPT = ["--single_prompt", "the ", "--model_name_or_path", "policy", "--reward_model_path", "judge"]


def parse(command, flags):
    return arguments.parse(flags, ARGUMENTS[command], embedded.settings_path(command))


def run(command, folder, *flags):
    world = two_tokens.paths() if "--config" in flags else two_tokens.flags(command)
    train(command, [*world, *QUICK, "--output_dir", str(folder), *flags])
    return json.loads((folder / "results.json").read_text())


# REINFORCE, GRPO, PPO


@pytest.mark.parametrize(
    "name, flags, method",
    [
        ("reinforce", [], "REINFORCE"),
        ("reinforce", ["--reward_transform", "exponential"], "REINFORCE (exponential transform)"),
        ("grpo", [], "GRPO"),
        ("grpo", ["--loss_type", "dr_grpo", "--scale_rewards", "none"], "Dr. GRPO"),
        ("grpo", ["--loss_type", "dapo"], "GRPO (dapo)"),
        ("ppo", [], "PPO"),
        ("repulse-ppo", [], "RePULSe on PPO"),
        ("repulse-ppo", ["--alpha", "0"], "PPO"),
        ("repulse-grpo", [], "RePULSe on GRPO"),
        ("repulse-grpo", ["--alpha", "0"], "GRPO"),
    ],
)
def test_the_methods_name_in_reports(name, flags, method):
    assert methods._title(name, parse(name, [*two_tokens.flags(name), *flags])[1]) == method


def test_embedded_settings_draw_the_same_number_of_completions_under_a_kl_penalty():
    """Without it a policy ends with one completion a prompt."""
    drawn, penalties = set(), {}
    for name, both in (("repulse", 2), ("repulse-ppo", 2), ("repulse-grpo", 2), ("reinforce", 1), ("grpo", 1)):
        args = parse(name, [])[1]
        drawn.add(args.max_steps * args.generation_batch_size * both)
        penalties[name] = args.beta
    assert len(drawn) == 1
    assert min(penalties.values()) > 0 and penalties["repulse-grpo"] == penalties["grpo"]


# Rewards, prompts, held-out prompts


def test_reward_kwargs(tmp_path):
    flags = ["--reward_type", "toxicity", "--reward_kwargs", '{"negate": true, "name": "rude"}']
    metrics = run("reinforce", tmp_path, *flags, "--logging_steps", "1")["metrics"]
    assert metrics["reward"] == metrics["rewards/rude/mean"]
    config = tmp_path / "own.yaml"
    config.write_text("reward_type: toxicity\nreward_kwargs:\n  negate: true\n")
    assert parse("reinforce", ["--config", str(config)])[0].reward_kwargs == {"negate": True}


def test_a_function_in_a_file_needs_no_model(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def length(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n")
    flags = [*QUICK, "--output_dir", str(tmp_path / "out"), "--reward_type", f"{path}:length", "--logging_steps", "1"]
    train("repulse", [*flags, "--num_final_samples", "0"])
    metrics = json.loads((tmp_path / "out" / "results.json").read_text())["metrics"]
    assert metrics["reward"] == metrics["rewards/length/mean"] > 0


def test_single_prompt_and_bad_tokens(tmp_path):
    flags = ["--single_prompt", "the ", "--bad_token_ids", "5", "6", "--reward_type", "toxicity"]
    results = run("reinforce", tmp_path, *flags)
    assert [set(entry["policy"]) for entry in results["history"]] == [{"log_prob_bad"}] * 2
    assert results["settings"]["num_generations"] == 32


def test_a_run_ends_with_p_bad_on_unseen_prompts(tmp_path, capsys):
    """In the embedded world, beside what is stored of other policies; the numbers are in the results and on the card."""
    (tmp_path / "few.jsonl").write_text("".join(Path(embedded.prompts_path("unseen")).open().readlines()[:3]))
    flags = ["--max_steps", "1", "--eval_dataset_name", str(tmp_path / "few.jsonl"), "--num_final_samples", "4"]
    train("repulse", [*flags, "--max_completion_length", "6", "--output_dir", str(tmp_path / "out")])
    metrics = json.loads((tmp_path / "out" / "results.json").read_text())["metrics"]
    assert metrics["eval_p_bad_low"] <= metrics["eval_p_bad"] <= metrics["eval_p_bad_high"]
    printed, card = capsys.readouterr().out, (tmp_path / "out" / "README.md").read_text()
    for text in (printed, card):
        assert all(name in text for name in ("initial policy", "REINFORCE", "95% interval", "stored results"))
    assert "trl-repulse diagnose" in printed and "eval_p_bad" in card


def test_a_models_p_bad_before_and_after_is_printed_and_on_the_card(tmp_path, capsys, hub, monkeypatch):
    """As measured, with intervals that the Hub's own reader finds."""
    logged, log = [], Trainer.log
    monkeypatch.setattr(Trainer, "log", lambda self, logs, *args: (logged.append(logs), log(self, logs, *args))[1])
    (tmp_path / "few.jsonl").write_text("".join(Path(embedded.prompts_path("unseen")).open().readlines()[:3]))
    flags = ["--max_steps", "1", "--eval_dataset_name", str(tmp_path / "few.jsonl"), "--num_final_samples", "4"]
    flags += ["--model_name_or_path", embedded.policy_path(), "--reward_model_path", embedded.reward_model_path()]
    flags += ["--dataset_name", str(tmp_path / "few.jsonl"), "--bad_reward_threshold", "0", "--bf16", "false"]
    flags += ["--dataset_streaming", "true", "--chat_template_kwargs", '{"unused": true}']
    flags += ["--push_to_hub", "true", "--hub_model_id", "me/out", "--hub_token", "t"]
    train("repulse", [*flags, "--max_completion_length", "6", "--output_dir", str(tmp_path / "out")])
    card = ModelCard(hub.repositories["me/out"].files["README.md"].decode())
    found = {each.metric_type: each for each in card.data.eval_results}
    for name in ("eval_p_bad", "initial_p_bad"):
        args = found[name].metric_args
        assert 0 <= args["low"] <= found[name].metric_value <= args["high"] and args["confidence"] == 0.95
        assert f"{name}_low" not in found
    metrics = json.loads((tmp_path / "out" / "results.json").read_text())["metrics"]
    assert found["eval_p_bad"].metric_value == metrics["eval_p_bad"]
    assert metrics["eval_p_bad"] in [logs.get("eval_p_bad") for logs in logged]  # as trackers have it
    for text in (capsys.readouterr().out, card.text):
        assert "initial policy" in text and "stored results" not in text
    for said in ("- Rewards: `reward_model`", "- Base model: `policy`", 'model="me/out"'):
        assert said in card.text


def test_stored_results_are_those_of_prompts_that_are_not_trained_on():
    stored, train_prompts = embedded.stored_results(), embedded.load_prompts()["prompt"][:]
    assert not set(train_prompts) & set(embedded.load_prompts("unseen")["prompt"][:])
    for values in stored.values():
        assert values["eval_p_bad_low"] < values["eval_p_bad"] < values["eval_p_bad_high"]
    assert stored["initial policy"]["samples"] == 0 < stored["REINFORCE"]["samples"]
    size = sum(path.stat().st_size for path in Path(embedded.policy_path()).parents[0].rglob("*") if path.is_file())
    assert size < 3e6


def test_a_run_goes_on_where_nobody_reads_it(tmp_path, poor_stdout):
    folder = tmp_path / "☕"
    flags = [*two_tokens.flags("reinforce"), *QUICK, "--logging_steps", "1", "--output_dir", str(folder)]
    with poor_stdout():
        main_or_exit(lambda: train("reinforce", flags))
    assert (folder / "results.json").is_file() and (folder / "completions" / "before_after.md").is_file()


@pytest.mark.parametrize("command", ["repulse", "grpo"])
def test_held_out_prompts_need_one_argument(tmp_path, caplog, command):
    """With 16 completions a prompt, and the column of the prompts that are trained on."""
    prompts = two_tokens.load_prompts()["prompt"]
    for name, rows in (("train", prompts), ("held_out", prompts[:3])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"question": text}) for text in rows))
    config = tmp_path / "config.yaml"
    settings = Path(two_tokens.config_path(command)).read_text()
    config.write_text(f"{settings}\neval_dataset_name: {tmp_path}/held_out.jsonl\nnum_final_samples: 2\n")
    flags = ["--config", str(config), "--dataset_name", f"{tmp_path}/train.jsonl", "--prompt_column", "question"]
    assert "eval_reward" in run(command, tmp_path / "out", *flags, "--num_generations", "16")["metrics"]
    assert ("under a `bad_reward_threshold`, and this run has none" in caplog.text) == (command == "grpo")
    with pytest.raises(ValueError, match="`per_device_eval_batch_size=8` on 1 processes is no multiple of the 16"):
        run(command, tmp_path / "out", *flags, "--num_generations", "16", "--per_device_eval_batch_size", "8")


@pytest.mark.parametrize("flag", ["--model_name_or_path=m", "--model-name-or-path=m"])
def test_settings_of_the_embedded_world_are_not_those_of_another_model(flag):
    _, args, model_args = parse("reinforce", [flag, "--dataset_name", "d", "--reward_model_path", "r"])
    assert model_args.model_name_or_path == "m" and args.max_completion_length != 24
    for other in ("--model_revision=main", "--learning_rate=1"):
        assert parse("reinforce", [other])[1].max_completion_length == 24  # the control
    with pytest.raises(ValueError, match="`--model_name` is no argument; .* Did you mean `--model_name_or_path`."):
        parse("reinforce", ["--model_name=m"])  # no abbreviations


def test_negative_numbers_are_no_flags():
    flags = ["--target_dist_beta", "-1e1", "--bad_reward_threshold", "-.5", "--reward_cap", "-1.5E-3"]
    args = parse("repulse", [*two_tokens.flags("repulse"), *flags])[1]
    assert (args.target_dist_beta, args.bad_reward_threshold, args.reward_cap) == (-10, -0.5, -0.0015)


def test_long_prompts_are_counted_with_the_templates_variables(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(two_tokens.policy_path())
    tokenizer.chat_template = "{{ messages[0]['content'] * (3 if long else 1) }}"
    tokenizer.save_pretrained(tmp_path)
    longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in two_tokens.load_prompts()["prompt"])
    flags = [*two_tokens.paths(), "--max_prompt_length", str(longest), "--apply_chat_template", "true"]
    script_args, args, _ = parse("repulse", flags)
    assert len(load_data(script_args, args, str(tmp_path))[0]) == len(two_tokens.load_prompts())
    args.chat_template_kwargs = {"long": True}
    with pytest.raises(ValueError, match="leaves out every prompt"):
        load_data(script_args, args, str(tmp_path))


def test_values_of_a_file_are_what_they_look_like(tmp_path):
    """YAML 1.1 would read dates, numbers in octal, and text and `no` in place of numbers."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "output_dir: 2024_01_15\nrun_name: 007\nmodel_revision: 0123456\nscale_rewards: false\nseed: 3\nbeta: 1e-2\n"
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-6, a: 5, b: -0.5}\n"
        "chat_template_kwargs: {date_string: 2024-07-26}\n"
    )
    script_args, args, model_args = parse("grpo", ["--config", str(file)])
    assert (args.output_dir, args.run_name, model_args.model_revision) == ("2024_01_15", "007", "0123456")
    assert (args.scale_rewards, args.seed, args.beta) == ("none", 3, 0.01)
    assert args.lr_scheduler_kwargs == {"min_lr": 1e-6, "a": 5, "b": -0.5}
    assert args.chat_template_kwargs == {"date_string": "2024-07-26"}


def test_the_passes_of_an_update_count_before_the_groups_are_checked():
    flags = ["--per_device_train_batch_size", "2", "--num_generations", "4", "--train_batch_size", "8"]
    for command in ("reinforce", "repulse", "grpo"):
        assert parse(command, flags)[1].gradient_accumulation_steps == 4


def test_settings_of_the_launcher_in_a_file():
    """`no` is false to YAML, and an empty value is the default."""
    args = launcher._parse_launch("p", [], {"mixed_precision": False, "main_process_port": None, "num_processes": 2})
    assert (args.mixed_precision, args.main_process_port, args.num_processes) == ("no", None, 2)


# Mistakes


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--reward_kwargs", "[1]"], "`reward_kwargs=[1]` must be an object"),
        (["--reward_kwargs", '{"negate": true}'], "`reward_kwargs` (negate) has no effect without `reward_type`"),
        (["--single_prompt", "the ", "--apply_chat_template", "true"], "`single_prompt` is plain text"),
        ([*OF_ONE_PROMPT, "--eval_strategy", "steps"], "`--eval_strategy` needs held-out prompts"),
        (["--apply_chat_template", "true"], "the tokenizer has no chat template"),
        (["--train_batch_size", "100"], "`train_batch_size=100` is no multiple of the 96 completions of one pass"),
        (["--single_prompt", "the ", "--bad_token_ids", "9999"], "9999"),
        (["--num_table_completions", "-1"], "`num_table_completions=-1` must be at least 0"),
        (["--num_final_samples", "1"], "`num_final_samples=1` must be 0, or at least 2"),
        ([*OF_ONE_PROMPT, "--num_final_samples", "4"], "`--num_final_samples` needs held-out prompts"),
        (["--resume_from_checkpoint", "none/checkpoint-9"], "There is no checkpoint `none/checkpoint-9`; name the"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(tmp_path, flags, words):
    with pytest.raises(SystemExit) as exit_:
        main_or_exit(lambda: train("reinforce", [*QUICK, "--output_dir", str(tmp_path), *flags]))
    message = exit_.value.code
    assert message.startswith("error: ") and "\n" not in message
    assert words in message


def test_errors_that_are_no_mistake_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        main_or_exit(lambda: 1 / 0)


def test_the_place_of_an_error():
    """The innermost line of the user's, not of a library; without one, or without a reward function, none."""

    def fails(**kwargs):
        json.loads("{")

    def gives_nan(**kwargs):
        return [float("nan")]

    def yields(**columns):
        yield fails(**columns)

    line = fails.__code__.co_firstlineno + 1
    for function, words in (
        (fails, f"(char 1). Raised by the reward function 'mine'. In {__file__}, line {line}."),
        (yields, f"(char 1). Raised by the reward function 'mine'. In {__file__}, line {line}."),
        (json.JSONDecoder, "got an unexpected keyword argument 'completions'. Raised by the reward function 'mine'."),
        (gives_nan, "or `None` to exclude the sample."),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            with_checks(function, "mine")(completions=["a"], x=1)
        assert describe_error(error.value).endswith(words)
        assert from_reward(error.value) == (function is not gives_nan)
    assert describe_error(OSError()) == "OSError" and not from_reward(OSError())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_stay_short(path):
    assert len(path.read_text().splitlines()) <= 120


# The schedule


@pytest.mark.parametrize("steps, expected", [(800, 200), (10, 2), (1, 1)])
def test_share_of_the_decay_follows_the_updates(steps, expected):
    _, args, _ = parse("repulse", [*two_tokens.flags("repulse"), "--max_steps", str(steps)])
    assert args.lr_scheduler_kwargs == {"decay_type": "linear", "num_decay_steps": expected}


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--lr_decay_ratio", "1.5"], "`lr_decay_ratio=1.5` must be from 0"),
        (["--lr_scheduler_type", "linear"], "`lr_decay_ratio=0.25` is a share of `max_steps` in"),
        (["--max_steps", "-1"], "`lr_decay_ratio=0.25` is a share of `max_steps` in"),
    ],
)
def test_share_of_the_decay_in_wrong_places(flags, words):
    with pytest.raises(ValueError, match=words):
        parse("repulse", [*two_tokens.flags("repulse"), *flags])


def test_results_and_card_have_the_precision_that_was_used(tmp_path, monkeypatch):
    """`bf16: false` of the settings wins over the launcher's: the run is the one without a launcher."""
    flags = ["--max_steps", "1", "--num_table_completions", "0"]
    expected = run("repulse-ppo", tmp_path / "plain", *flags)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    found = run("repulse-ppo", tmp_path / "launched", *flags)
    assert found["settings"]["bf16"] is False and found["settings"]["mixed_precision"] == "no"
    assert found["final"] == expected["final"]
    assert "| `mixed_precision` | no |" in (tmp_path / "launched" / "README.md").read_text()
