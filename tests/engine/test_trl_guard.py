"""What would happen if TRL changed: each change we could not live with is reported by method and version.

Signatures are compared by the bridge, for users too. What methods return, and what a trainer keeps, is looked at here,
on a trainer of TRL's own.
"""

import ast
import inspect
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from trl_repulse import ReinforceConfig, ReinforceTrainer, RePULSeGRPOTrainer, RePULSeTrainer, _trl
from trl_repulse.configs._checks import require_defaults
from trl_repulse.configs.reinforce_config import _GRPO_ONLY
from trl_repulse.trainers._grpo_loss import GRPOLossTrainer

from ..conftest import USE_CPU, build_accelerator, build_model, word_reward


VERSION = f"trl {trl.__version__}"
SOURCE = inspect.getsource(_trl)
IMPORTS = SOURCE[: SOURCE.index("except ImportError")]

# Signatures


def renamed(self, texts):
    raise AssertionError


def with_a_parameter_between(self, inputs, tools, prompts, completions, completion_ids_list):
    raise AssertionError


SIGNATURES = {
    "a renamed parameter": (GRPOTrainer, "_generate", renamed, "GRPOTrainer._generate takes (self, texts)"),
    "a new parameter": (
        GRPOTrainer,
        "_calculate_rewards",
        with_a_parameter_between,
        "GRPOTrainer._calculate_rewards takes (self, inputs, tools, prompts",
    ),
    "a parameter less": (
        GRPOTrainer,
        "_compute_loss",
        lambda self, inputs: None,
        "GRPOTrainer._compute_loss takes (self, inputs) and no longer (self, model, inputs, ...)",
    ),
    "no such method": (
        GRPOTrainer,
        "_generate_single_turn",
        None,
        "GRPOTrainer._generate_single_turn(self, prompt_ids) is gone",
    ),
    "a function": (trl_utils, "pad", lambda tensors, value: None, "pad takes (tensors, value) and no longer (tensors"),
}


def test_the_installed_packages_are_those_we_build_on():
    assert _trl.hook_changes() == []


def test_everything_taken_from_private_modules_is_a_hook():
    # from the source: a module's attributes also hold what another test made torch compile into it
    imports = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.ImportFrom)]
    taken = {name.name for node in imports if (node.module or "").startswith("trl.") for name in node.names}
    hooks = {hook.rpartition(":")[2] for hook in _trl.HOOKS}
    assert taken - hooks == {"vllm_generation", "is_vllm_available"}  # a module, and a function without parameters


def private_names(path):
    """What a module takes of TRL and transformers that is not one of their top-level names; `transformers.utils` is documented."""
    taken = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            package, _, module = node.module.partition(".")
            public = not module or (package, module) == ("transformers", "utils")
            names = [f"{node.module}.{alias.name}" for alias in node.names if not public or alias.name.startswith("_")]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if "." in alias.name]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            names = [ast.unparse(node)]  # `transformers.trainer.hf_api`
        else:
            continue
        taken += [name for name in names if name.partition(".")[0] in ("trl", "transformers")]
    return taken


def test_private_names_come_from_one_module(tmp_path):
    package = Path(_trl.__file__).parent
    found = {str(path): private_names(path) for path in package.rglob("*.py") if path.name != "_trl.py"}
    assert len(found) > 100 and not {path: names for path, names in found.items() if names}
    assert len(private_names(Path(_trl.__file__))) > 15
    control = tmp_path / "control.py"
    control.write_text(
        "import trl.trainer.utils\nimport transformers\nx = transformers.trainer.hf_api\nfrom transformers.utils import _x"
    )
    assert private_names(control) == ["trl.trainer.utils", "transformers.utils._x", "transformers.trainer.hf_api"]


@pytest.mark.parametrize("hook", _trl.HOOKS)
def test_a_hook_that_is_gone_is_named_with_both_versions(monkeypatch, hook):
    module, _, name = hook.partition(":")
    *path, last = name.split(".")
    owner = sys.modules[module]
    for part in path:
        owner = getattr(owner, part)
    defined_by = next((base for base in getattr(owner, "__mro__", ()) if last in vars(base)), owner)
    for base in {owner, defined_by, *getattr(owner, "__mro__", ())}:
        if last in vars(base):
            monkeypatch.delattr(base, last)
    advice = "Install a TRL that trl-repulse was tested with (1.15 to 1.16)"
    if f" {last}" in IMPORTS and not path:  # such names are missed as the module is imported
        with pytest.raises(ImportError) as raised:
            exec(compile(SOURCE, "again", "exec"), {"__name__": "again"})
    else:
        with pytest.raises(RuntimeError) as raised:
            _trl.require_hooks()
    package = module.partition(".")[0]
    message = str(raised.value)
    assert last in message and version(package) in message and advice in message


@pytest.mark.parametrize("installed, warns", [("1.16.3", False), ("1.17.0.dev0", True), ("1.19.0", True)])
def test_a_newer_trl_is_told_of_once(monkeypatch, installed, warns):
    said = []
    monkeypatch.setattr(_trl, "version", lambda package: installed)
    monkeypatch.setattr(_trl.logger.logger, "log", lambda level, message, *args, **kwargs: said.append(message))
    type(_trl.logger).warning_once.cache_clear()
    build_accelerator()
    for _ in range(2):
        _trl.require_hooks()
    assert len(said) == warns
    assert not warns or (
        installed in said[0] and "newer than 1.16, the newest that trl-repulse was tested with" in said[0]
    )


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_changed_signature_is_reported_by_method_and_version(monkeypatch, name):
    owner, attribute, changed, message = SIGNATURES[name]
    if changed is None:
        monkeypatch.delattr(owner, attribute)
    else:
        monkeypatch.setattr(owner, attribute, changed)
    (change,) = _trl.hook_changes()
    assert change.startswith(f"{VERSION}: {message}")


def test_an_option_that_only_a_newer_trl_has_is_refused():
    """As a mask of the tokens that an engine sampled from, which our own scoring would leave out without a word."""
    _trl.require_known_options({"batch_size": 4, "compute_entropy": True, "pixel_values": None})
    score, trainer = GRPOLossTrainer._get_per_token_logps_and_entropies, SimpleNamespace(_leaves_passes_to_trl=False)
    with pytest.raises(
        RuntimeError, match=f"TRL {version('trl')} asks for log-probabilities with sampling_mask, which"
    ):
        score(trainer, None, None, None, 1, batch_size=4, sampling_mask=[])


def test_a_field_that_a_newer_trl_has_dropped_is_not_missed(monkeypatch, tmp_path):
    fields = dict(ReinforceConfig.__dataclass_fields__)
    assert all(fields.pop(name) for names in _GRPO_ONLY.values() for name in names)
    monkeypatch.setattr(ReinforceConfig, "__dataclass_fields__", fields)
    require_defaults(ReinforceConfig(str(tmp_path), use_cpu=True), "{!r}", "loss_type")


def test_a_parameter_at_the_end_is_none_of_our_business(monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts, images=None: None)
    assert _trl.hook_changes() == []


@pytest.mark.trainer
@pytest.mark.parametrize("trainer_cls", [ReinforceTrainer, RePULSeTrainer])
def test_a_trainer_is_not_built_on_changed_methods(make, monkeypatch, trainer_cls):
    make(trainer_cls)
    monkeypatch.setattr(GRPOTrainer, "_generate", renamed)
    monkeypatch.delattr(Trainer, "_push_from_checkpoint")
    message = (
        rf"^Methods that .* {VERSION}: GRPOTrainer._generate takes \(self, texts\).*; transformers .*Trainer._push"
    )
    with pytest.raises(RuntimeError, match=message):
        make(trainer_cls)


# What methods return, and what a trainer keeps


@pytest.fixture
def grpo(tmp_path, model_dirs, prompts):
    """A trainer of TRL's, built and not trained."""
    sizes = {"num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 2}
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=USE_CPU, bf16=False, report_to="none", beta=0.0, **sizes)

    def sometimes(completions, **kwargs):
        return [None] + [1.0] * (len(completions) - 1)

    return GRPOTrainer(model_dirs["gpt2"], [word_reward, sometimes], args, prompts)


@pytest.mark.trainer
def test_the_installed_hooks_return_what_we_take(grpo):
    prompts = ["the cat", "fish"]
    rows = [{"prompt": prompt} for prompt in prompts]
    (tokenized, *_) = grpo._tokenize_prompts(prompts)
    generated = grpo._generate(prompts)
    assert isinstance(generated, tuple) and len(generated) == 8
    for ids in (tokenized, generated[0]):
        assert len(ids) == len(prompts) and all(isinstance(row, list) and isinstance(row[0], int) for row in ids)
    assert all(isinstance(text, str) for text in generated[3])  # the completions

    rewards = grpo._calculate_rewards(
        rows, prompts, [" fish", " bad"], [[17], [18]]
    )  # a column a function, NaN for None
    torch.testing.assert_close(rewards.cpu(), torch.tensor([[1.0, torch.nan], [-3.0, 1.0]]), equal_nan=True)

    # What TRL's own loss reads; ours replaces this dict, and TRL must go on shuffling and splitting it by rows
    batch = GRPOTrainer._generate_and_score_completions(grpo, [row for row in rows for _ in range(4)])
    assert {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"} <= set(batch)
    assert {"prompt", "completion", "rewards", "advantages", "extra"} <= set(grpo._logs)
    assert {"train", "eval"} <= set(grpo._metrics)
    kept = {"_pending_extra_logs", "_pending_metrics", "reward_func_names", "reward_weights", "model_wrapped"}
    assert kept <= set(vars(grpo))

    model = build_model("gpt2", 19)
    _trl.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids, labels = torch.tensor([[4, 5, 6]]), torch.tensor([[-100, 5, 6]])
    scores = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, fused_lm_head=True)
    assert {"log_probs", "entropy", "aux_loss"} <= set(vars(scores))
    assert inspect.getsource(Trainer._inner_training_loop).count("self._prepare_for_training(") == 1


def test_a_trl_that_scores_on_gpus_alone_is_reported(monkeypatch):
    """As 1.15 without Triton. With `alpha` above 0 scores come from the model's logits."""
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", None)
    grpo = SimpleNamespace(_leaves_passes_to_trl=True)
    with pytest.raises(ValueError, match="needs Triton and a GPU. Install TRL 1.16"):
        RePULSeGRPOTrainer._prepare_scoring(grpo)
