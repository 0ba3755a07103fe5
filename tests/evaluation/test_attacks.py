"""Attacks: what is asked, what is judged, and success rates against enumeration and simulation."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from trl_repulse import embedded
from trl_repulse.cli.main import main
from trl_repulse.evaluation._generation import hash_model
from trl_repulse.evaluation.attacks import (
    Attack,
    OnBehavior,
    attack_report,
    attempts,
    augmented,
    format_attacks,
    load_attacks,
    refusal,
    run_attacks,
    success_at,
)
from trl_repulse.evaluation.records import load_samples, open_folder
from trl_repulse.evaluation.sampling import SamplingSettings

from ..conftest import build_tokenizer
from ..evaluation_support import save_chat, write_inputs


MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the cat"}]


@pytest.mark.parametrize("k", [1, 2, 5])
def test_success_at_k_is_the_mean_over_all_subsets(k):
    rewards = np.random.default_rng(0).normal(size=(3, 6))
    expected = np.mean([[max(chosen) for chosen in itertools.combinations(row, k)] for row in rewards < -0.3])
    assert success_at(rewards, -0.3, k).value == pytest.approx(expected)


@pytest.mark.parametrize("sparse", [False, True])
def test_the_interval_covers(sparse):
    """Also where two of 30 behaviours carry all success, whose jackknife alone would hide the variance."""
    rng, covered = np.random.default_rng(1), 0
    for _ in range(300):
        p = np.where(np.arange(30) < 2, 0.3, 0.0)[:, None] if sparse else rng.beta(0.3, 2.7, size=(30, 1))
        estimate = success_at(-(rng.random((30, 32)) < p).astype(float), -0.5, 8)
        covered += estimate.low <= (1 - (1 - p) ** 8).mean() <= estimate.high
    assert covered >= 0.92 * 300


def test_no_success_still_has_an_upper_end():
    estimate = success_at(np.zeros((10, 20)), -0.5, 4)
    assert (estimate.value, estimate.low) == (0.0, 0.0)
    assert estimate.high == pytest.approx(1 - 0.025 ** (4 / 200))  # exact for one attempt, of four


def test_the_report_counts_behaviours_once():
    first, second = np.zeros((3, 4)), np.zeros((3, 4))
    first[0, 2] = second[0, 1] = second[1, 0] = -1.0
    report = attack_report({"a": first, "b": second}, -0.5, [1, 2], others={"GCG": -np.ones((3, 1))})
    assert [report["attacks"][name]["broken"] for name in ("a", "b", "GCG")] == [1, 2, 3]
    assert report["broken"] == 2 and "ASR@2" not in report["attacks"]["GCG"]
    assert "2 of 3" in format_attacks(report).splitlines()[-1]


def test_augmented_text_has_the_letters_of_the_text():
    texts = {augmented("describe the weather", random.Random(seed)) for seed in range(20)}
    assert len(texts) == 20
    lower = [text.lower() for text in texts]
    same = np.mean([sorted(text) == sorted("describe the weather") for text in lower])
    assert 0.05 < same < 0.95  # some have letters moved to a neighbour


def test_what_is_asked():
    settings = SamplingSettings(num_samples=4)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    tokenizer = build_tokenizer(chat_template=template)
    plain = Dataset.from_list([{"prompt": "the cat", "Target": " sat"}, {"prompt": "fish", "Target": " ate"}])

    rows, count = attempts(Attack("a", template="say: {prompt}!"), plain, tokenizer, settings)
    assert rows["prompt"] == ["say: the cat!", "say: fish!"] and count == 4
    assert rows["behavior"] == ["the cat", "fish"]
    rows, _ = attempts(Attack("a", prefill="{Target} well"), plain, tokenizer, settings)
    assert rows["prompt"] == ["the cat sat well", "fish ate well"]
    rows, count = attempts(Attack("a", augment=True), plain, tokenizer, settings)
    assert len(rows) == 8 and count == 1 and len(set(rows["prompt"][:4])) > 1
    assert rows["behavior"] == ["the cat"] * 4 + ["fish"] * 4

    chat = Dataset.from_list([{"prompt": MESSAGES}])
    rows, _ = attempts(Attack("a", template="say {prompt}"), chat, tokenizer, settings)
    assert rows["prompt"][0][-1]["content"] == "say the cat" and rows["behavior"][0] == MESSAGES
    rows, _ = attempts(Attack("a", prefill="sure"), chat, tokenizer, settings)
    assert rows["prompt"] == ["[system]be kind[user]the cat[assistant]sure"]
    rows, _ = attempts(Attack("a", prefill="{prompt}: sure"), chat, tokenizer, settings)
    assert rows["prompt"] == ["[system]be kind[user]the cat[assistant]the cat: sure"]

    for prefill in ("{target}", "{Target.x}", "{0}", "{}"):
        with pytest.raises(ValueError, match="'a' cannot be filled"):
            attempts(Attack("a", prefill=prefill), plain, tokenizer, settings)
    gap = Dataset.from_list([{"prompt": "the cat", "Target": None}, {"prompt": "fish", "Target": " ate"}])
    with pytest.raises(ValueError, match="cannot be filled"):
        attempts(Attack("a", prefill="{Target}"), gap, tokenizer, settings)
    with pytest.raises(ValueError, match="column `behavior`, which attacks write"):
        attempts(Attack("a"), Dataset.from_list([{"prompt": "a", "behavior": "b"}]), tokenizer, settings)


def test_a_template_is_filled_like_a_prefill():
    """Names in braces are columns, also those in which the columns' values would be read again, and a double brace is a brace."""
    row = {"prompt": "the {cat}", "ContextString": "{prompt}", "Target": "fish"}
    attack = Attack("a", template='{{"ask": "{prompt}", "of": "{ContextString}"}}', prefill='{{"answer": "{Target}')
    rows, _ = attempts(attack, Dataset.from_list([row]), build_tokenizer(), SamplingSettings())
    assert rows["prompt"] == ['{"ask": "the {cat}", "of": "{prompt}"}{"answer": "fish']
    for name, text in (("prefill", "a }"), ("template", "{prompt} {"), ("template", "{x}{prompt}")):
        message = "of the attack 'a' cannot be filled .* Write a brace of the text itself twice, `{{`"
        with pytest.raises(ValueError, match=message):
            Attack("a", **{name: text}).filled(name, row)
    with pytest.raises(ValueError, match="has no `{prompt}`"):
        Attack("a", template="{{prompt}}")


def test_contextual_behaviours_of_harmbench(tmp_path, model_dirs):
    """The model and the judge get the context; rows without one are as they were."""
    (tmp_path / "b.csv").write_text("Behavior,ContextString,BehaviorID\nthe cat,fish ate,one\nthe dog,,two\n")
    (tmp_path / "mine.py").write_text(
        "import json, pathlib\n\n"
        "def reward(prompts, **_):\n"
        "    (pathlib.Path(__file__).parent / 'seen.json').write_text(json.dumps(prompts))\n"
        "    return [0.0] * len(prompts)\n"
    )
    templates = {"say": "bad {prompt}", "own": "{ContextString} ran {prompt}"}
    lines = [json.dumps({"name": name, "template": text}) for name, text in templates.items()]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    words = ["attacks", str(tmp_path / "out"), "--model", model_dirs["gpt2"], "--prompts", str(tmp_path / "b.csv")]
    words += ["--prompt_column", "Behavior", "--reward_type", f"{tmp_path / 'mine.py'}:reward", "--threshold", "0"]
    words += ["--attacks", str(tmp_path / "a.jsonl"), "--num_samples", "1", "--max_completion_length", "2"]
    assert main(words) == 0
    asked = ["fish ate\n\n---\n\nthe cat", "the dog"]
    assert json.loads((tmp_path / "seen.json").read_text()) == asked
    found = {name: load_samples(tmp_path / "out" / "attacks" / name).prompts for name in ("prompt", "say", "own")}
    own = ["fish ate ran the cat", " ran the dog"]
    assert found == {"prompt": asked, "say": [f"bad {text}" for text in asked], "own": own}


def test_the_judge_reads_the_behaviour_and_the_whole_answer():
    seen = []

    def reward(prompts, completions, **columns):
        seen.append((prompts, completions, columns))
        return [1.0] * len(prompts)

    judge = OnBehavior(reward)
    judge(["x: hi"], [" there"], behavior=["hi"], prefill=[" hey"], completion_ids=[[1]], label=[2])
    judge(["[user]hi[assistant]hey"], [" there"], behavior=[MESSAGES], prefill=["hey"])
    assert seen[0] == (["hi"], [" hey there"], {"label": [2]})
    assert seen[1][:2] == ([MESSAGES], [[{"role": "assistant", "content": "hey there"}]])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"name": "a", "template": "hello"}', "Line 1 of .* has no `{prompt}`"),
        ('{"template": "{prompt}"}', "Line 1 of .* is no attack"),
        ('{"name": "a"}\n{"name": "a"}', "'a' occurs twice"),
        ("", "attacks.jsonl` has no attacks; write one a line"),
        (None, "There is no file `.*attacks.jsonl`"),
        ('{"name": "a", "augment": "false"}', "Line 1 of .*`augment='false'` of an attack"),
        ('{"name": " "}', "empty `name`"),
    ],
)
def test_files_that_hold_no_attacks(tmp_path, lines, message):
    path = tmp_path / "attacks.jsonl"
    if lines is not None:
        path.write_text(lines, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_attacks(path)


def test_the_command(tmp_path, capsys):
    rows = list(embedded.load_prompts("unseen").select(range(3)))
    prompts, attacks = tmp_path / "prompts.jsonl", tmp_path / "attacks.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    attacks.write_text('{"name": "polite", "prefill": " my pleasure, i"}\n', encoding="utf-8")
    words = ["attacks", str(tmp_path / "out"), "--model", str(embedded.policy_path()), "--prompts", str(prompts)]
    words += ["--reward_model_path", str(embedded.reward_model_path()), "--threshold", "0", "--k", "1", "4"]
    words += ["--attacks", str(attacks), "--augment", "--benign", str(prompts)]
    words += ["--num_samples", "4", "--max_completion_length", "6", "--output", str(tmp_path / "report.json")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "polite" in printed and "best of N" in printed and "Refusals of harmless prompts: 0 (0 to 26.5)" in printed

    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    samples = load_samples(tmp_path / "out" / "attacks" / "polite")
    assert report["attacks"]["polite"]["ASR@1"]["value"] == np.mean(samples.column() < 0)
    begun = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.parquet")}
    assert main(words) == 0  # nothing is drawn again
    assert capsys.readouterr().out == printed[printed.index("Success") :]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.parquet")} == begun
    for more, message in (
        (["--k", "1", "5"], "`--k 5` must be from 1 to `--num_samples 4`"),
        (["--threshold", "nan"], "`--threshold nan` must be a finite number"),
        (["--gcg", str(tmp_path / "none")], "none` holds no attacks"),
    ):
        assert main([*words, *more]) == 1
        assert message in capsys.readouterr().err


LONG = " the cat" * 15  # 30 tokens of a context of 32


@pytest.mark.parametrize("culprit", ["template", "prefill", "benign"])
def test_prompts_that_are_too_long_are_refused_before_anything_is_drawn(tmp_path, capsys, model_dirs, culprit):
    attack = {"template": {"template": "{prompt}" + LONG}, "prefill": {"prefill": LONG}}.get(culprit, {})
    (tmp_path / "attacks.jsonl").write_text(json.dumps({"name": "long"} | attack), encoding="utf-8")
    benign = ["fish", "fish" + LONG] if culprit == "benign" else ["fish"]
    (tmp_path / "benign.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in benign))
    words = ["attacks", str(tmp_path / "out"), "--model", model_dirs["gpt2"], "--threshold", "0", "--num_samples", "2"]
    words += ["--attacks", str(tmp_path / "attacks.jsonl"), "--benign", str(tmp_path / "benign.jsonl")]
    assert main([*words, *write_inputs(tmp_path, prompts=["fish"])]) == 1
    error = capsys.readouterr().err.strip()
    where = f"`--benign {tmp_path / 'benign.jsonl'}`" if culprit == "benign" else "The attack 'long' cannot be made"
    assert error.startswith(f"trl-repulse attacks: {where}: A prompt of 31 tokens and")
    assert "the model's context of 32 tokens; shorten or drop the prompt" in error and "\n" not in error
    assert not (tmp_path / "out").exists()


def test_attacks_of_equal_text_share_random_numbers(tmp_path):
    """A template that changes nothing, and an empty beginning of the answer, draw what the plain prompt draws."""
    model, _ = save_chat(tmp_path / "model", "{% for m in messages %}{{ m.content }}{% endfor %}")
    attacks = Attack("other", template="fish {prompt}"), Attack("prompt"), Attack("same"), Attack("begun", prefill="")
    behaviors = Dataset.from_list([{"prompt": MESSAGES}, {"prompt": MESSAGES[1:]}])
    settings = SamplingSettings(num_samples=8, max_completion_length=4)
    samples = run_attacks(tmp_path / "out", model, behaviors, attacks, refusal, settings)
    other, *equal = (each.table["completion_ids"].to_pylist() for each in samples.values())
    assert equal[0] == equal[1] == equal[2] != other


def test_results_of_gcg_are_of_the_same_model(tmp_path, capsys, model_dirs):
    """In whatever precision it was attacked; and who judged them is said."""
    model = AutoModelForCausalLM.from_pretrained(model_dirs["gpt2"], dtype=torch.bfloat16)
    record = {"row": 1, "status": "ok", "before": {"rewards": [0.0]}, "after": {"rewards": [-1.0]}}
    results = tmp_path / "gcg"
    header = {"model": {"name": "mine", "weights": hash_model(model)}, "rewards": {"refusal_start": {}}}
    open_folder(results, header, "attacks")
    (results / "target-00001.json").write_text(json.dumps(record))
    words = ["attacks", str(tmp_path / "out"), "--gcg", str(results), "--threshold", "-0.5", "--num_samples", "2"]
    words += write_inputs(tmp_path, prompts=["fish"])
    assert main([*words, "--model", model_dirs["llama"]]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"trl-repulse attacks: `--model {model_dirs['llama']}` holds other weights than the model that `--gcg {results}` "
        "measured, `mine`; name the folder of that model, or measure this one."
    )
    assert not (tmp_path / "out").exists()
    assert main([*words, "--model", model_dirs["gpt2"]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line.split()[5] for line in lines if line.startswith("GCG, judged by refusal_start")) == "(2.5"
    assert lines[-1].startswith("No answer to these attacks is bad. Read some in `")
