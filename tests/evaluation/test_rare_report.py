"""Reports of rare events, and the command and the example that print them."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import rare_events
from examples.worlds import two_tokens
from examples.worlds.log_z_bounds import log_z_bounds
from trl_repulse.cli.main import main
from trl_repulse.evaluation.rare.estimates import cvar, prob_bad
from trl_repulse.evaluation.rare.mixture import MixtureSample
from trl_repulse.evaluation.rare.report import format_report, rare_event_report

from ..conftest import WORDS, build_model, build_tokenizer
from ..evaluation_support import write_inputs


ROOT = Path(__file__).parents[2]


@pytest.fixture
def sample():
    generator = torch.Generator().manual_seed(0)
    log_density = -3 + torch.randn(2, 400, 2, generator=generator)
    return MixtureSample(torch.randn(2, 400, generator=generator), log_density, (200, 200))


@pytest.fixture
def command(tmp_path, model_dirs, tokenizer):
    """Arguments of the command: a policy, a proposal, an adapter over the policy, prompts, a reward."""
    proposal = tmp_path / "proposal"
    build_model("gpt2", len(tokenizer), seed=1).save_pretrained(proposal)
    base = build_model("gpt2", len(tokenizer))
    base.name_or_path = model_dirs["gpt2"]
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    inputs = write_inputs(tmp_path, "[-3.0 * c.count('bad') for c in completions]")
    arguments = ["rare-events", model_dirs["gpt2"], "--proposal", str(proposal), str(tmp_path / "adapter")]
    return [*arguments, *inputs, "--num_samples", "60", "--num_proposal_samples", "40"]


def test_report_holds_what_the_functions_return(sample):
    report = rare_event_report(sample, [-1.0, -50.0], [0.1])
    assert report["prob_bad"][0]["value"] == prob_bad(sample, -1.0).value
    assert report["cvar"][0]["per_prompt"][1]["low"] == cvar(sample.prompt(1), 0.1).low
    assert report["prob_bad"][1]["reliable"] is False and report["prob_bad"][1]["value"] == 0
    text = format_report(report)
    assert "P(r < -1)" in text and "UNRELIABLE" in text
    assert report["prob_bad"][1]["reasons"][-1] in text


def test_command_refuses_a_proposal_of_other_tokens(command, tmp_path, capsys):
    build_tokenizer(WORDS[::-1]).save_pretrained(tmp_path / "proposal")
    assert main([*command, "--threshold", "0"]) == 1
    assert "has a tokenizer of its own, with 'bad' for the policy's token 3" in capsys.readouterr().err


def test_command(command, tmp_path, capsys):
    output = tmp_path / "new" / "report.json"
    assert main([*command, "--threshold", "-1", "--level", "0.1", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report["counts"] == [60, 40, 40, 40, 40] and len(report["prob_bad"][0]["per_prompt"]) == 2
    assert 0 < report["prob_bad"][0]["low"] < report["prob_bad"][0]["value"] < report["prob_bad"][0]["high"] < 1
    assert report["prob_bad"][0]["diagnostics"]["normalization_error"] < 4  # each model was scored as itself
    assert report["settings"]["seed"] == 0
    names = report["components"]
    assert names[0] == "policy" and [" at temperature " in name for name in names] == [False, False, True, False, True]
    assert all(float(name.split(" at temperature ")[1]) > 1 for name in names[2::2])
    assert report["settings"]["divergence"] == 2
    assert "P(r < -1)" in capsys.readouterr().out
    assert list(output.parent.iterdir()) == [output]


def test_command_takes_a_policy_that_is_an_adapter(command, tmp_path, model_dirs, tokenizer):
    """Two folders of adapters over one base; the same adapter as its own proposal has weights of 1 throughout."""
    tokenizer.save_pretrained(tmp_path / "adapter")
    output, adapter = tmp_path / "report.json", str(tmp_path / "adapter")
    rest = command[command.index("--prompts") :]
    command = ["rare-events", adapter, "--proposal", adapter, "--divergence", "0", *rest]
    assert main([*command, "--threshold", "-1", "--output", str(output)]) == 0
    found = json.loads(output.read_text())["prob_bad"][0]["diagnostics"]
    assert found["ess"] == pytest.approx(found["tail_samples"]) and found["normalization_error"] < 1e-3
    command[command.index(adapter, 2)] = model_dirs["gpt2"]  # negative control: the base is another model
    assert main([*command, "--threshold", "100", "--output", str(output)]) == 0
    assert json.loads(output.read_text())["prob_bad"][0]["diagnostics"]["ess"] < 199.9


@pytest.mark.thorough
@pytest.mark.trainer
def test_example(tmp_path, monkeypatch, capsys):
    """On an untrained pair; its estimate holds the truth that the example prints beside it."""
    AutoTokenizer.from_pretrained(two_tokens.policy_path()).save_pretrained(tmp_path)
    for folder in (tmp_path, tmp_path / "proposal"):
        AutoModelForCausalLM.from_pretrained(two_tokens.policy_path()).save_pretrained(folder)
    monkeypatch.setattr("sys.argv", ["rare_events.py", "--output_dir", str(tmp_path), "--num_samples", "1000"])
    bounds = []
    monkeypatch.setattr(rare_events, "log_z_bounds", lambda *args: bounds.extend(log_z_bounds(*args)) or bounds)
    rare_events.main()
    printed = capsys.readouterr().out
    row = next(line.split() for line in printed.splitlines() if line.startswith("P(r < -5)"))
    lower, upper = float(row[4]), float(row[6])
    truth = float(printed.split("P(r < -5) = ")[1].split()[0])
    assert lower < truth < upper and math.isclose(truth, 0.0064, rel_tol=0.1)
    shown = [line.strip().split(", truth ") for line in printed.splitlines() if ", truth " in line]
    assert [ends for ends, _ in shown] == [f"{bound.lower_end:.3f} to {bound.upper_end:.3f}" for bound in bounds]
    assert all(b.lower_end < float(truth) < b.upper_end for b, (_, truth) in zip(bounds, shown, strict=True))


def test_examples_without_a_model_end_in_one_line(tmp_path, monkeypatch):
    for name, flag in (("rare_events", "--output_dir"), ("evaluate", "--model")):
        path = ROOT / "examples" / f"{name}.py"
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(path.parent)  # as for a script
        monkeypatch.setattr("sys.argv", [path.name, flag, str(tmp_path / "none")])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(str(path), run_name="__main__")
        message = exit_.value.code
        assert message.startswith("error: ") and str(tmp_path / "none") in message and "\n" not in message
