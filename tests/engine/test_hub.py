"""What leaves for the Hub: every file that is sent, seen by a stand-in for its HTTP interface."""

import inspect
import json
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import integration_utils

from examples.worlds import two_tokens
from trl_repulse import PPOTrainer, ReinforceConfig, ReinforceTrainer, RePULSeConfig, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.configs import _checks

from ..conftest import same_parameters
from ..hub_server import Repository
from .test_adapters import lora


pytestmark = pytest.mark.trainer

TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
FULL = {"config.json", "generation_config.json", "model.safetensors", *TOKENIZER}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors", *TOKENIZER}
CARD = {"README.md"}
LOG = {"trainer_state.json"}  # of the whole run


@pytest.fixture
def push(hub, make):
    """Trains two updates, saving each, and pushes; returns the trainer."""

    def push(*args, **kwargs):
        settings = {"push_to_hub": True, "hub_model_id": "me/out", "hub_token": "hf_secret"}
        settings |= {"save_strategy": "steps", "save_steps": 1, "hub_always_push": True}
        trainer = make(*args, **(settings | kwargs))
        trainer.train()
        trainer.push_to_hub()
        assert hub.tokens == {"Bearer hf_secret"}
        sent = [content for repository in hub.repositories.values() for content in repository.files.values()]
        assert b"hf_secret" not in b"".join(sent)
        return trainer

    return push


def checkpoint_files(strategy, files):
    """The files of the checkpoints that a strategy uploads, in the repository."""
    folders = {"checkpoint": ["last-checkpoint"], "all_checkpoints": ["checkpoint-1", "checkpoint-2"]}
    return {f"{folder}/{name}" for folder in folders.get(strategy, []) for name in files}


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_only_the_policy_leaves(hub, push, strategy, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "negatives.jsonl").write_text("{}\n")  # an earlier run's
    trainer = push(hub_strategy=strategy, save_negatives=True, bad_reward_threshold=-1.0)
    kept_names = ("proposal/model.safetensors", "negatives.jsonl", "negatives-1.jsonl")
    for kept in (*kept_names, "checkpoint-2/proposal/optimizer.safetensors"):
        assert (out / kept).is_file()
    assert set(hub.repositories) == {"me/out"}
    repository = hub.repositories["me/out"]
    assert set(repository.files) == FULL | CARD | LOG | checkpoint_files(strategy, FULL | {"trainer_state.json"})
    folder = repository.download(tmp_path / "fetched")
    assert same_parameters(AutoModelForCausalLM.from_pretrained(folder), trainer.model)
    assert AutoTokenizer.from_pretrained(folder)("the cat")["input_ids"]
    if strategy == "all_checkpoints":
        fetched = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-1")
        assert same_parameters(fetched, AutoModelForCausalLM.from_pretrained(out / "checkpoint-1"))
        assert not same_parameters(fetched, trainer.model)


def test_without_the_filter_all_would_leave(hub, push, monkeypatch):
    """Negative control: the stand-in sees what is sent."""
    monkeypatch.setattr(RePULSeTrainer, "_withheld", ())
    with pytest.raises(AssertionError, match="hf_secret"):
        push(hub_strategy="checkpoint", save_negatives=True, bad_reward_threshold=1.0)
    state = {"optimizer.pt", "proposal/model.safetensors", "proposal/optimizer.safetensors"}
    assert set(hub.repositories["me/out"].files) >= {
        *("negatives.jsonl", "proposal/model.safetensors", "training_args.bin"),
        *checkpoint_files("checkpoint", state),
    }


@pytest.mark.parametrize("strategy", ["end", "all_checkpoints"])
def test_of_two_adapters_only_the_policys_leaves(hub, push, strategy, tmp_path):
    trainer = push(extra={"peft_config": lora()}, hub_strategy=strategy)
    assert (tmp_path / "out" / "proposal" / "adapter_model.safetensors").is_file()
    assert set(hub.repositories) == {"me/out"}
    repository = hub.repositories["me/out"]
    in_checkpoints = ADAPTER | CARD | {"trainer_state.json"}
    assert set(repository.files) == ADAPTER | CARD | LOG | checkpoint_files(strategy, in_checkpoints)
    fetched = AutoPeftModelForCausalLM.from_pretrained(repository.download(tmp_path / "fetched"))
    ids = torch.arange(4, 10).view(1, -1)
    assert list(fetched.peft_config) == ["default"]
    with torch.no_grad():
        assert torch.equal(fetched(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize("trainer_cls", [PPOTrainer, RePULSePPOTrainer, ReinforceTrainer, RePULSeTrainer])
def test_second_models_and_tables_of_the_policys_completions_stay(hub, push, tmp_path, trainer_cls):
    for folder in ("out/proposal", "out/value", "out/checkpoint-2/proposal"):  # an earlier run's
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.safetensors").write_bytes(b"weights")
    trainer = push(trainer_cls, hub_strategy="all_checkpoints", log_completions=True)
    last = pd.read_parquet(max((tmp_path / "out" / "completions").glob("*.parquet")))
    assert list(last["completion"]) == list(trainer._logs["completion"]) and not last["advantage"].isna().any()
    repository = hub.repositories["me/out"]
    in_checkpoints = FULL | {"trainer_state.json"}
    if trainer_cls is ReinforceTrainer:  # without a second model, it can resume from the Hub as in TRL
        in_checkpoints |= {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    assert set(repository.files) == FULL | CARD | LOG | checkpoint_files("all_checkpoints", in_checkpoints)
    assert same_parameters(AutoModelForCausalLM.from_pretrained(repository.download(tmp_path / "in")), trainer.model)


@pytest.mark.thorough
@pytest.mark.parametrize("trainer_cls", [RePULSeTrainer, RePULSePPOTrainer])
@pytest.mark.parametrize(("adapters", "name"), [(False, None), (True, "me/hunter")])
def test_the_proposal_goes_to_a_private_repository_of_its_own(hub, push, tmp_path, adapters, name, trainer_cls):
    extra = {"peft_config": lora()} if adapters else None
    settings = {"hub_strategy": "all_checkpoints", "push_proposal_to_hub": True, "hub_proposal_model_id": name}
    trainer = push(trainer_cls, extra=extra, **settings)
    name = name or "me/out-proposal"
    assert set(hub.repositories) == {"me/out", name}
    assert not [file for file in hub.repositories["me/out"].files if "proposal" in file]
    repository = hub.repositories[name]
    assert repository.private and not hub.repositories["me/out"].private
    assert len(repository.commits) == 1  # at the end; nothing with the checkpoints
    assert set(repository.files) == (ADAPTER if adapters else FULL) | CARD
    folder = repository.download(tmp_path / "fetched")
    card = ModelCard.load(folder / "README.md")
    assert "Do not deploy" in card.text and {"not-for-deployment", "not-for-all-audiences"} <= set(card.data.tags)
    loader = AutoPeftModelForCausalLM if adapters else AutoModelForCausalLM
    ids = torch.arange(4, 10).view(1, -1)
    with torch.no_grad():
        expected = trainer.proposal.module(input_ids=ids).logits
        assert torch.equal(loader.from_pretrained(folder)(input_ids=ids).logits, expected)


def test_a_public_repository_is_refused_before_training(hub, make):
    hub.repositories["me/out-proposal"] = Repository(private=False)
    with pytest.raises(ValueError, match="me/out-proposal is not private.*hub_proposal_model_id"):
        make(push_to_hub=True, hub_model_id="me/out", push_proposal_to_hub=True)
    assert not hub.repositories["me/out-proposal"].commits


def test_a_repository_that_was_opened_meanwhile_is_refused(hub, make):
    trainer = make(push_to_hub=True, hub_model_id="me/out", push_proposal_to_hub=True)
    hub.repositories["me/out-proposal"].private = False
    with pytest.raises(ValueError, match="is not private"):
        trainer.push_to_hub()
    assert not hub.repositories["me/out-proposal"].commits


@pytest.mark.parametrize("name", ["out", "me/out", "me/Out"])
def test_the_policys_repository_is_refused(hub, make, name):
    hub.repositories["me/Out"] = Repository(private=True)
    with pytest.raises(ValueError, match="is the policy's repository"):
        make(push_to_hub=True, hub_model_id="me/out", push_proposal_to_hub=True, hub_proposal_model_id=name)
    assert not any(repository.commits for repository in hub.repositories.values())


def test_without_a_proposal_there_is_no_second_repository(hub, push):
    push(alpha=0.0, push_proposal_to_hub=True)
    assert set(hub.repositories) == {"me/out"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"push_proposal_to_hub": True}, "set `push_to_hub=True`"),
        ({"hub_proposal_model_id": "me/hunter"}, "set `push_proposal_to_hub=True`"),
        (
            {"push_to_hub": True, "push_proposal_to_hub": True, "hub_proposal_model_id": "out"},
            "`hub_proposal_model_id='out'` is the policy's repository",
        ),
        ({"proposal": "policy", "push_proposal_to_hub": True}, "builds no second model"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RePULSeConfig(output_dir="out", use_cpu=True, bf16=False, **({"proposal": "learned"} | settings))


@pytest.mark.parametrize(
    ("tracker", "variable", "value"),
    [
        ("wandb", "WANDB_LOG_MODEL", "checkpoint"),
        ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "TRUE"),
        ("dagshub", "HF_MLFLOW_LOG_ARTIFACTS", "1"),
        ("clearml", "CLEARML_LOG_MODEL", None),  # uploads unless told otherwise
    ],
)
def test_trackers_that_would_upload_checkpoints_are_refused(monkeypatch, tracker, variable, value):
    settings = {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": [tracker], "proposal": "learned"}
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        RePULSeConfig(**settings)
        monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"set {variable}=false"):
        RePULSeConfig(**settings)
    RePULSeConfig(**settings, alpha=0.0)
    RePULSeConfig(**(settings | {"report_to": "none"}))
    monkeypatch.setenv(variable, "false")
    RePULSeConfig(**settings)


def test_the_trainer_looks_at_trackers_again(make, monkeypatch):
    monkeypatch.delenv("WANDB_LOG_MODEL", raising=False)
    trainer = make()
    for changed in (["wandb"], "wandb"):
        trainer.args.report_to = changed
        with monkeypatch.context() as environment:
            environment.setenv("WANDB_LOG_MODEL", "checkpoint")
            with pytest.raises(ValueError, match="set WANDB_LOG_MODEL=false"):
                trainer.train()
            with pytest.raises(ValueError, match="set WANDB_LOG_MODEL=false"):
                RePULSeTrainer(trainer.model, trainer.reward_funcs, trainer.args, trainer.train_dataset)
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    trainer.args.report_to = []
    trainer.train()


def test_what_tells_trackers_to_upload_is_still_called_so():
    source = inspect.getsource(integration_utils)
    variables = {variable for _, variable, _, _ in _checks._CHECKPOINT_UPLOADS}
    assert len(variables) == 6 and all(f'"{variable}"' in source for variable in variables)


@pytest.mark.parametrize("proposal", ["learned", "hot_policy"])
@pytest.mark.parametrize(
    "public", [{"report_to": "trackio", "push_to_hub": True}, {"log_completions_hub_repo": "me/out-logs"}]
)
def test_public_completions_are_refused(public, proposal):
    settings = {"output_dir": "out", "use_cpu": True, "proposal": proposal, "log_completions": True} | public
    with pytest.raises(ValueError, match="trackio_static_space_id=False|log_completions_hub_repo='me/out-logs'"):
        RePULSeConfig(**settings)
    RePULSeConfig(**settings, hub_private_repo=True)
    ReinforceConfig(**{name: value for name, value in settings.items() if name != "proposal"})


def test_trackers_that_upload_the_folder_are_refused_where_it_has_bad_completions(monkeypatch):
    """Also without a second model; those that upload checkpoints are not, which then hold none."""
    common = {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": ["comet_ml", "wandb"]}
    bad = {"save_negatives": True, "bad_reward_threshold": 0.0}
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    RePULSeConfig(**common, **bad, log_completions=True)
    monkeypatch.setenv("COMET_LOG_ASSETS", "true")
    for config, settings in ((ReinforceConfig, bad), (RePULSeConfig, bad), (RePULSeConfig, {"log_completions": True})):
        with pytest.raises(
            ValueError, match="uploads `output_dir`, with its bad completions; set COMET_LOG_ASSETS=false"
        ):
            config(**common, **settings)
    ReinforceConfig(**common, log_completions=True)
    RePULSeConfig(**common)


def test_trackios_copy_is_refused_where_the_policy_is_pushed_by_hand(hub, make):
    trainer = make(log_completions=True, hub_model_id="me/out", hub_token="hf_secret")
    trainer.args.report_to = ["trackio"]
    with pytest.raises(ValueError, match="trackio_static_space_id=False"):
        trainer.push_to_hub()
    assert not hub.repositories
    trainer.args.trackio_static_space_id = False
    trainer.push_to_hub()
    assert set(hub.repositories) == {"me/out"}


def test_the_policys_card(push, tmp_path, monkeypatch):
    push(hub_strategy="end")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert {"trl", "trl-repulse", "repulse"} <= set(card.data.tags)
    for said in (
        "trained with RePULSe, a method introduced in [Reducing the Probability of Undesirable Outputs",
        "https://huggingface.co/papers/2510.21184",
        "fine-tuned version of a local model.",
        "The proposal is not part of this repository.",
        'prompt = "The weather is"\n',
        "output = generator(prompt, max_new",
        "### Model\n\n- Base model: `",
        "### Limits\n\nThe rewards alone said",
        "- Rewards: `word_reward`\n- Rows of prompts: 4\n- Updates: 2\n",
        "| `target_dist_beta` | -2.0 |",
        "eprint    = {arXiv:2510.21184}",
        "@software{vonwerra2020trl",
    ):
        assert said in card.text
    for absent in ("### Measured", "question", "None", "reward_transform_", "SchedulerType"):
        assert absent not in card.text


def test_what_was_measured_is_on_the_card(hub, make, tmp_path):
    trainer = make(ReinforceTrainer, push_to_hub=True, hub_model_id="me/out", bad_reward_threshold=-1.0)
    trainer.tail_report = "P(bad) = 1e-4 (95 %: 5e-5 to 2e-4), 100,000 samples"
    trainer.measured = {"p_bad": np.float64(1e-4), "missing": float("nan"), "unknown": None}
    trainer.push_to_hub(dataset_name="me/prompts")
    card = ModelCard(hub.repositories["me/out"].files["README.md"].decode())
    assert f"### Measured\n\n{trainer.tail_report}\n\n### Model" in card.text
    assert "bad_reward_threshold` | -1.0" in card.text
    assert card.data.datasets == "me/prompts" and "The proposal" not in card.text
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_type) == ("p_bad", 1e-4, "me/prompts")
    assert card.data.model_name == "out" and card.data.library_name == "transformers"


def test_the_example_pushes_what_it_measured(hub, tmp_path):
    script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "repulse.py"))
    flags = [*two_tokens.flags("repulse"), "--output_dir", str(tmp_path / "out")]
    flags += ["--max_steps", "2", "--max_completion_length", "1"]
    script["main"]([*flags, "--push_to_hub", "true", "--hub_model_id", "me/out", "--push_proposal_to_hub", "true"])
    policy = hub.repositories["me/out"]
    results = json.loads(policy.files["results.json"])
    card = policy.files["README.md"].decode()
    assert "### Measured\n\nExact values" in card and f"{results['final']['log_prob_bad']:.4f}" in card
    found = {each.metric_type: each.metric_value for each in ModelCard(card).data.eval_results}
    assert set(results["final"]) == {"expected_reward", "log_prob_bad", "kl"}
    assert results["final"].items() <= found.items()
    assert not [name for name in policy.files if "proposal" in name or "completions" in name]
    assert (tmp_path / "out" / "completions" / "before_after.md").exists()
    assert hub.repositories["me/out-proposal"].private


def test_an_adapters_cards(make, tmp_path):
    """They name PEFT, as the Hub needs, and of bases only those that are on the Hub; PEFT's own would name a path here."""
    out = tmp_path / "out"
    for base, proposal in (("me/base", "learned"), (None, "hot_policy")):
        trainer = make(extra={"peft_config": lora()}, proposal=proposal, bad_reward_threshold=-1.0)
        if base:  # as if it had been loaded from there
            trainer.model.get_base_model().config._name_or_path = base
            for config in trainer.model.peft_config.values():
                config.base_model_name_or_path = base
        trainer.save_model()
        for folder in [out, out / "proposal"] if proposal == "learned" else [out]:
            card = ModelCard.load(folder / "README.md")
            assert (card.data.library_name, card.data.base_model) == ("peft", base)
            assert str(tmp_path) not in card.content and "None" not in card.text
            assert f"- Base model: `{base or ''}" in card.text and f"- Adapter: LORA, rank {lora().r}\n" in card.text
            assert ('model="out"' in card.text) == (folder == out)
            assert {"trl", "trl-repulse"} <= set(card.data.tags)


def test_the_cards_numbers_are_those_of_the_results(tmp_path, model_dirs):
    script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "repulse.py"))
    (tmp_path / "mine.py").write_text("def reward(completions, **kwargs): return [float(len(x)) for x in completions]")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "fish"}\n')
    flags = ["--output_dir", str(tmp_path), "--max_steps", "2", "--max_completion_length", "3"]
    flags += ["--model_name_or_path", model_dirs["gpt2"], "--reward_type", f"{tmp_path / 'mine.py'}:reward"]
    flags += ["--dataset_name", str(tmp_path / "prompts.jsonl"), "--bad_reward_threshold", "0", "--beta", "0.1"]
    script["main"]([*flags, "--per_device_train_batch_size", "8", "--num_generations", "4"])
    results, card = json.loads((tmp_path / "results.json").read_text()), ModelCard.load(tmp_path / "README.md")
    found = {each.metric_type: each.metric_value for each in card.data.eval_results}
    kl = results["metrics"]["kl"] * results["metrics"]["completions/mean_length"]
    assert kl != results["metrics"]["kl"]
    assert found == {name: results["metrics"][name] for name in found} | {"kl": kl}
    assert {"reward", "kl", "bad_fraction"} <= set(found)
    assert "kl, nats per completion" in [each.metric_name for each in card.data.eval_results]
    assert card.data.model_name == tmp_path.name and card.data.library_name == "transformers"
    assert card.data.to_dict()["model-index"][0]["results"][0]["task"]["type"] == "text-generation"


def test_a_folder_of_prompts_and_a_resumed_run_on_the_card(hub, tmp_path):
    script = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "reinforce.py"))
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "train.jsonl").write_text('{"prompt": "the "}\n')
    flags = [*two_tokens.flags("reinforce"), "--output_dir", str(tmp_path / "out"), "--save_strategy", "steps"]
    flags += ["--max_completion_length", "1"]
    flags += ["--save_steps", "1", "--dataset_name", str(tmp_path / "prompts"), "--hub_model_id", "me/out"]
    flags += ["--push_to_hub", "true"]
    script["main"]([*flags, "--max_steps", "1"])
    first = hub.repositories["me/out"].files["README.md"].decode()
    script["main"]([*flags, "--max_steps", "2", "--resume_from_checkpoint", "true"])
    second = hub.repositories["me/out"].files["README.md"].decode()
    assert "followed, at the start and at the end" in first
    assert "followed, at update 1, where training was resumed, and at the end" in second
    assert str(tmp_path) not in first + second
