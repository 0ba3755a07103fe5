"""Configurations: defaults, and one clear message for each refused value."""

import dataclasses

import pytest
from accelerate.logging import MultiProcessAdapter
from transformers import HfArgumentParser
from trl import GRPOConfig, RLOOConfig, TrlParser

from trl_repulse import PPOConfig, ReinforceConfig, RePULSeConfig, RePULSeGRPOConfig, RePULSePPOConfig, embedded
from trl_repulse.cli.arguments import ARGUMENTS, parse
from trl_repulse.configs import NegativeTermConfig
from trl_repulse.configs.shared_config import documented, without_secrets


ALL = [ReinforceConfig, RePULSeConfig, PPOConfig, RePULSePPOConfig, RePULSeGRPOConfig]


@pytest.fixture
def make(tmp_path):
    def make(config_cls=RePULSeConfig, **kwargs):
        if issubclass(config_cls, NegativeTermConfig):
            kwargs = {"proposal": "learned"} | kwargs
        return config_cls(output_dir=str(tmp_path), use_cpu=True, bf16=False, **kwargs)

    return make


def test_defaults(make):
    """A field that is set alone gives the paper's method; without it, the one that does best on unseen prompts."""
    hot = make(proposal="hot_policy", bad_reward_threshold=-4.0)
    assert hot.draws_hot and not hot.has_proposal
    assert (hot.alpha, hot.alpha_normalization, hot.potential) == (1, "none", "indicator")
    assert hot.proposal_temperature is None  # chosen by the gain
    assert RePULSeConfig.__dataclass_fields__["proposal"].default == "hot_policy"
    assert make(proposal="hot_policy", bad_reward_threshold=-4.0, alpha=0.3, potential="tilted").alpha == 0.3

    config = make()
    assert config.has_proposal
    assert (config.alpha, config.target_dist_beta, config.potential) == (0.1, -10.0, "tilted")
    assert (config.beta, config.num_generations) == (0.2, 4)  # measured: docs/held_out.md
    reinforce, rloo = (kind(config.output_dir, use_cpu=True, bf16=False) for kind in (ReinforceConfig, RLOOConfig))
    assert (reinforce.beta, reinforce.num_generations) == (rloo.beta, rloo.num_generations)
    assert config.target_dist_beta < 0 < config.alpha
    assert config.alpha_normalization == "samples" and config.logprob_reduction == "mean"
    assert config.disable_dropout


@documented
@dataclasses.dataclass
class Documented(GRPOConfig):
    """
    A configuration.

    Parameters:
        share (`float`, *optional*, defaults to `0.1`):
            Share of 5 % that `"some"` of the rows have, as
            in [`~trl.RLOOConfig`].

        beta (`float`, *optional*, defaults to `0.0`):
            Of the base class, which has a text.

    > [!NOTE]
    > It ends here.
    """

    share: float = 0.1


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
@pytest.mark.parametrize("config", [Documented, *ALL])
def test_the_help_of_a_field_is_its_text_in_the_docstring(parser, config):
    """Also for a user's subclass, which has fields of its own."""
    base = GRPOConfig.__dataclass_fields__["beta"].metadata["help"]
    subclass = dataclasses.make_dataclass("Subclass", [("mine", int, 3)], bases=(config,))
    texts = {action.dest: action.help for action in parser(subclass)._actions}
    assert " ".join(parser(subclass).format_help().split())  # `%` is escaped
    if config is Documented:
        assert texts["share"] == "Share of 5 %% that `some` of the rows have, as in `RLOOConfig`."
        assert texts["beta"] == base
    else:
        threshold = texts["bad_reward_threshold"]
        assert threshold.startswith("Reward under which a completion") and threshold.endswith("until then.")
        assert all(texts[field.name] for field in dataclasses.fields(config))


@pytest.mark.parametrize(
    "kwargs", [{"alpha": 0.0}, {"alpha": 0.0, "proposal_learning_rate": 1e-4}, {"proposal": "policy"}]
)
def test_configurations_without_a_second_model(make, kwargs):
    assert not make(**kwargs).has_proposal


HOT = {"proposal": "hot_policy", "proposal_temperature": 1.5, "bad_reward_threshold": 0.0}
CUT = {"per_device_train_batch_size": 1, "num_generations": 8}  # prompts over several micro-batches
SERVERS = {"use_vllm": True, "vllm_mode": "server", "proposal_vllm_server_base_url": "http://localhost:8001"}
TRANSFORM = {"reward_transform": "indicator", "reward_transform_threshold": -3.0}
# Values that are refused by themselves
REFUSED_ALONE = {
    "target_dist_beta": [1.0, 0.0, float("nan")],
    "temperature": [0.7],
    "top_p": [0.9],
    "top_k": [50],
    "min_p": [0.1],
    "repetition_penalty": [1.1],
    "vllm_structured_outputs_regex": ["a+"],
    "neftune_noise_alpha": [5.0],
    "max_completion_length": [None],
    "report_to": [["flyte"]],
    "disable_dropout": [False],
    "mask_truncated_completions": [True],
    "alpha": [-0.1, float("nan"), float("inf")],
    "alpha_start": [-1.0, 0.0],
    "target_dist_beta_start": [5.0],
    "num_proposal_generations": [1],
    "proposal_temperature": [1.5],
    "proposal_updates_per_step": [0],
    "proposal_learning_rate": [-1.0],
    "proposal_loss": ["kl"],
    "proposal_update_order": ["during"],
    "proposal": ["best"],
    "vllm_sleep_level": [3, 1],
    "potential": ["linear"],
    "target_class": [2],
    "negative_loss": ["other"],
    "negative_baseline": ["policy"],
    "baseline": ["mean"],
    "baseline_constant": [1.0],
    "logprob_reduction": ["max"],
    "alpha_normalization": ["tokens"],
    "reward_transform": ["log"],
    "reward_transform_alpha": [2.0],
    "reward_clip_range": [(1.0, -1.0), [1.0]],
    "share_prompts": ["yes", None, 2, 0, 1],
}
REFUSED = [(name, {name: value}) for name, values in REFUSED_ALONE.items() for value in values]
REFUSED += [
    ("target_dist_beta", {"potential": "class"}),
    ("lr_scheduler_type", {"lr_scheduler_type": "reduce_lr_on_plateau", "do_eval": True, "eval_strategy": "steps"}),
    ("generation_kwargs", {"generation_kwargs": {"suppress_tokens": [1]}}),
    ("target_dist_beta_start", HOT | {"potential": "indicator", "target_dist_beta_start": -1.0}),
    ("num_proposal_generations", {"proposal": "policy", "num_proposal_generations": 4}),
    ("num_proposal_generations", HOT | {"num_proposal_generations": 1}),
    ("num_proposal_generations", HOT | CUT | {"num_proposal_generations": 4}),
    ("proposal_temperature", HOT | {"proposal_temperature": 0.9}),
    ("proposal_temperature", HOT | {"proposal_temperature": 2.5, "use_vllm": True}),
    ("proposal_temperature", HOT | {"proposal_temperature": float("nan")}),
    ("negative_loss", HOT | {"negative_loss": "reinforce"}),
    ("num_proposal_generations", CUT | {"num_proposal_generations": 4}),
    ("proposal_updates_per_step", {"proposal": "policy", "proposal_updates_per_step": 2}),
    (
        "proposal_updates_per_step",
        {"proposal_updates_per_step": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
    ),
    (
        "proposal_updates_per_step",
        {"proposal_updates_per_step": 2, "proposal_update_order": "after", "gradient_accumulation_steps": 2}
        | {"steps_per_generation": 3},
    ),
    ("proposal_vllm_group_port", {"proposal": "policy", "proposal_vllm_group_port": 51218}),
    ("proposal_loss", CUT | {"proposal_loss": "dpg"}),
    ("proposal_parameterization", {"proposal_parameterization": "prefix", "proposal_loss": "sixo"}),
    ("proposal_parameterization", {"proposal_parameterization": "prefix", "proposal_loss": "vargrad"}),
    ("num_proposal_generations", {"proposal_loss": "vargrad", "num_proposal_generations": 1}),
    ("target_dist_beta", {"proposal": "hot_policy", "bad_reward_threshold": 0.0, "target_dist_beta": -1.0}),
    ("proposal_vllm_server_base_url", {"proposal_vllm_server_base_url": "http://localhost:8001"}),
    ("proposal_vllm_group_port", SERVERS | {"proposal_vllm_group_port": 51216}),
    ("bad_reward_threshold", {"potential": "indicator"}),
    ("bad_reward_threshold", {"save_negatives": True}),
    ("reward_cap", {"reward_cap": 1.0, "potential": "class", "target_dist_beta": 1.0}),
    ("baseline_constant", {"baseline_constant": 1.0, "baseline": "group_mean"}),
    ("baseline", {"baseline": "constant", "baseline_constant": 1.0, "normalize_advantages": True}),
    ("reward_transform_alpha", {"reward_transform": "exponential", "reward_transform_alpha": -1.0}),
    ("reward_transform_beta", {"reward_transform": "exponential", "reward_transform_beta": 1.0}),
    ("reward_transform_threshold", {"reward_transform": "indicator"}),
    ("reward_transform_threshold", {"reward_transform": "exponential", "reward_transform_threshold": -3.0}),
    ("reward_transform_beta", TRANSFORM | {"reward_transform_beta": -0.5}),
]


# TRL's fields, whose bad values TRL takes
TRL_REFUSED = [
    ("beta", {"beta": -10.0}),
    ("beta", {"beta": float("nan")}),
    ("learning_rate", {"learning_rate": -1e-3}),
    ("temperature", {"temperature": 0.0, "alpha": 0.0}),
    ("num_iterations", {"num_iterations": 0}),
    ("num_generations_eval", {"num_generations_eval": -1}),
    ("epsilon", {"epsilon": -0.2}),
    ("epsilon_high", {"epsilon_high": -0.2}),
    ("reward_weights", {"reward_weights": [1.0, float("nan")]}),
    ("ref_model_mixup_alpha", {"sync_ref_model": True, "beta": 0.1, "ref_model_mixup_alpha": 3.0}),
    ("ref_model_sync_steps", {"sync_ref_model": True, "beta": 0.1, "ref_model_sync_steps": 0}),
    ("fp16_full_eval", {"fp16_full_eval": True}),
    ("bf16_full_eval", {"bf16_full_eval": True}),
]


@pytest.mark.parametrize("config_cls", [ReinforceConfig, RePULSeConfig, PPOConfig])
@pytest.mark.parametrize(
    ("name", "kwargs"), TRL_REFUSED, ids=[f"{name}-{i}" for i, (name, _) in enumerate(TRL_REFUSED)]
)
def test_values_of_trls_fields_that_train_something_else_are_refused(make, config_cls, name, kwargs):
    if config_cls is not RePULSeConfig:
        kwargs = {key: value for key, value in kwargs.items() if key != "alpha"}
    with pytest.raises(ValueError) as error:
        make(config_cls, **kwargs)
    message = str(error.value)
    assert message.startswith(f"`{name}=") and "\n" not in message
    assert name != "beta" or "`target_dist_beta`" in message


def test_limits_of_the_reward_as_a_flag():
    embedded_run = [ARGUMENTS["reinforce"], embedded.settings_path("reinforce")]
    _, args, _ = parse(["--reward_clip_range", "-5", "5"], *embedded_run)
    assert args.reward_clip_range == [-5.0, 5.0]


@pytest.mark.parametrize("config_cls", ALL)
def test_a_default_batch_of_evaluation_holds_whole_prompts(make, config_cls):
    size = {"per_device_train_batch_size": 30}
    for number, expected in ((2, 30), (4, 28), (7, 28), (40, 40)):
        if 30 % number == 0:
            assert make(config_cls, num_generations=number, **size).per_device_eval_batch_size == expected
        found = make(config_cls, num_generations=2, num_generations_eval=number, **size)
        assert found.per_device_eval_batch_size == expected
    assert make(config_cls, num_generations=2, per_device_train_batch_size=2).per_device_eval_batch_size == 8
    assert make(config_cls, num_generations=5, per_device_eval_batch_size=8, **size).per_device_eval_batch_size == 8


@pytest.mark.parametrize("proposal", ["hot_policy", "learned", "policy"])
@pytest.mark.parametrize(
    ("settings", "alpha", "normalization", "reduction"),
    [
        ({}, 0.1, "samples", "mean"),
        ({"alpha_normalization": "none"}, 0.1 / 8, "none", "mean"),
        ({"logprob_reduction": "sum"}, 0.1 / 20, "samples", "sum"),
        ({"loss_type": "dr_grpo"}, 0.1 / 20, "samples", "sum"),
        ({"loss_type": "dr_grpo", "logprob_reduction": "mean"}, 0.1 / 20, "samples", "mean"),
        ({"loss_type": "luspo", "importance_sampling_level": "sequence"}, 0.1, "samples", "sum"),
        ({"loss_type": "cispo"}, 0.1 * 0.2, "samples", "mean"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, 0.1, "samples", "mean"),
        ({"loss_type": "dr_grpo", "alpha": 0.3}, 0.3, None, "mean"),  # what is set stays
        ({"alpha": 0.0}, 0.0, None, "mean"),
    ],
)
def test_the_default_alpha_on_grpo_is_in_units_of_advantages(
    make, proposal, settings, alpha, normalization, reduction
):
    config = make(RePULSeGRPOConfig, proposal=proposal, num_generations=8, max_completion_length=20, **settings)
    found = config.alpha, config.alpha_normalization, config.logprob_reduction
    if normalization is None:
        normalization = "none" if proposal == "hot_policy" else "samples"
    assert found == (pytest.approx(alpha), normalization, reduction)


@pytest.mark.parametrize("config_cls", [RePULSeConfig, RePULSeGRPOConfig, ReinforceConfig])
@pytest.mark.parametrize("number", [1, 0, None])
def test_fewer_than_two_generations_are_refused_where_they_are_compared(make, config_cls, number):
    hot = {} if config_cls is ReinforceConfig else {"num_proposal_generations": 8}  # which do not count
    with pytest.raises(ValueError, match=f"`num_generations={number}` must be at least 2: .* own completions"):
        make(config_cls, num_generations=number, **hot)


def test_one_generation_is_enough_for_ppo_with_hot_samples(make):
    config = make(RePULSePPOConfig, proposal="hot_policy", num_generations=1, num_proposal_generations=8)
    assert config.num_generations == 1


# Values that are refused by themselves
PPO_REFUSED_ALONE = {
    "gamma": [1.1, -0.1],
    "max_completion_length": [None],
    "gae_lambda": [1.5, float("nan")],
    "value_learning_rate": [-1.0, float("inf")],
    "value_clip": [0.0, float("nan")],
    "value_warmup_steps": [-1],
    "beta": [-0.1],
    "num_generations": [0, None],
    "num_iterations": [0],
    "epsilon": [0.0],
    "epsilon_high": [-0.2],
    "loss_type": ["bnpo", "cispo"],
    "scale_rewards": ["group"],
    "multi_objective_aggregation": ["normalize_then_sum"],
    "importance_sampling_level": ["sequence"],
    "off_policy_mask_threshold": [0.1],
}
PPO_REFUSED = [(name, {name: value}) for name, values in PPO_REFUSED_ALONE.items() for value in values]
PPO_REFUSED += [
    ("lr_scheduler_type", {"lr_scheduler_type": "reduce_lr_on_plateau", "do_eval": True, "eval_strategy": "steps"}),
    *(("value_warmup_steps", {"value_warmup_steps": 1, "fp16": True, "max_grad_norm": x}) for x in (0.0, -1.0)),
]


PREFIXES_REFUSED = [("gae_lambda", {"gae_lambda": 0.9})] + [
    ("prefix_reward_steps", {"max_completion_length": 2, "prefix_reward_steps": steps}) for steps in (0, 2)
]
PREFIXES_REFUSED += [
    (next(iter(kwargs)), kwargs | {"prefix_reward_steps": 2})
    for kwargs in (
        {"baseline": "none"},
        {"normalize_advantages": True},
        {"num_iterations": 2},
        {"steps_per_generation": 2},
        {"gae_lambda": 1.5},
    )
]
# Where completions are batched one by one
ROWS_REFUSED = [
    ("negative_loss", {"negative_loss": "reinforce"}),
    ("proposal_updates_per_step", {"proposal_updates_per_step": 2}),
    ("proposal_update_order", {"proposal_update_order": "after"}),
    ("proposal_loss", {"proposal_loss": "dpg"}),
    ("num_proposal_generations", {"num_proposal_generations": 6, "num_generations": 4}),
    ("temperature", {"temperature": 0.7}),
    ("disable_dropout", {"disable_dropout": False}),
    ("target_dist_beta", {"target_dist_beta": 1.0}),
    ("logprob_reduction", {"logprob_reduction": "max"}),
]
REPULSE_PPO_REFUSED = [
    ("num_generations", {"num_generations": 1}),
    ("num_generations", {"num_generations": 1, "num_proposal_generations": 4, "proposal": "policy"}),
    ("loss_type", {"loss_type": "cispo"}),
]
GRPO_REFUSED = [
    ("reward_transform", {"reward_transform": "exponential"}),
    ("reward_transform", {"reward_transform": "exponential", "alpha": 0.0}),
]


@pytest.mark.parametrize(
    ("config_cls", "name", "kwargs"),
    [(RePULSeConfig, name, {"num_generations": 4} | kwargs) for name, kwargs in REFUSED]
    + [(ReinforceConfig, *case) for case in PREFIXES_REFUSED]
    + [(PPOConfig, *case) for case in PPO_REFUSED]
    + [(config_cls, *case) for config_cls in (RePULSePPOConfig, RePULSeGRPOConfig) for case in ROWS_REFUSED]
    + [(RePULSePPOConfig, *case) for case in REPULSE_PPO_REFUSED]
    + [(RePULSeGRPOConfig, *case) for case in GRPO_REFUSED],
)
def test_refused_values_name_the_field_in_one_line(make, config_cls, name, kwargs):
    if config_cls is RePULSeConfig and "per_device_train_batch_size" in kwargs:
        kwargs["gradient_accumulation_steps"] = kwargs["num_generations"]
    with pytest.raises(ValueError) as error:
        make(config_cls, **kwargs)
    message = str(error.value)
    assert message.startswith(f"`{name}=")
    assert "\n" not in message


def test_ppo_needs_no_group(make):
    """One completion a prompt, in batches that no other number divides; TRL itself still refuses it."""
    for size in (1, 7):
        config = make(PPOConfig, per_device_train_batch_size=size, do_eval=True, eval_strategy="steps")
        assert config.num_generations == 1 and type(config.num_generations) is int
        assert config.generation_batch_size == size
    with pytest.raises(ValueError, match="divisible by num_generations"):
        make(PPOConfig, per_device_train_batch_size=8, num_generations=3)
    with pytest.raises(ValueError, match="at least 2 generations"):  # if this fails, `_Single` can go
        make(GRPOConfig, num_generations=1)


# Fields of GRPO that REINFORCE does not read, with a value that GRPO takes
NOT_OF_REINFORCE = {
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "delta": 2.0,
    "use_bias_correction_kl": False,
    "off_policy_mask_threshold": 0.1,
    "sapo_temperature_neg": 1.1,
    "sapo_temperature_pos": 1.1,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
    "top_entropy_quantile": 0.5,
    "entropy_coef": 0.1,
    "use_adaptive_entropy": True,
    "entropy_target": 0.5,
    "entropy_coef_min": 0.1,
    "entropy_coef_max": 0.5,
    "entropy_coef_delta": 0.1,
    "scale_rewards": "batch",
    "multi_objective_aggregation": "normalize_then_sum",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_cap": 2.0,
    "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.1,
    "max_tool_calling_iterations": 2,
    "cast_lm_head_to_fp32": True,
}


@pytest.mark.parametrize("config_cls", [ReinforceConfig, RePULSeConfig])
@pytest.mark.parametrize("name", NOT_OF_REINFORCE)
def test_what_reinforce_does_not_read_is_refused(make, config_cls, name):
    with pytest.raises(ValueError, match=rf"^`{name}={NOT_OF_REINFORCE[name]!r}` .*; leave it at \S+\.$"):
        make(config_cls, **{name: NOT_OF_REINFORCE[name]})
    if "vllm" not in name:  # the others are GRPO's, and RePULSe's on it
        make(RePULSeGRPOConfig, **{name: NOT_OF_REINFORCE[name]})


def test_reinforce_reads_or_refuses_each_field_of_grpo_that_rloo_has_not():
    of_grpo, of_rloo, own = (
        {field.name: field for field in dataclasses.fields(each)} for each in (GRPOConfig, RLOOConfig, ReinforceConfig)
    )
    assert of_grpo.keys() - of_rloo.keys() - {"log_completions_hub_repo"} == NOT_OF_REINFORCE.keys()
    assert of_rloo.keys() - own.keys() == set()
    changed = {name for name in of_rloo if own[name].default != of_rloo[name].default}
    assert changed == {"disable_dropout", "learning_rate", "per_device_eval_batch_size"}


@pytest.mark.parametrize("config_cls", ALL)
def test_what_files_and_trackers_are_given_has_no_secret(config_cls):
    """`results.json` and a tracker's settings are made of `to_dict`."""
    secret = {"hub_token": "hf_hidden", "model_init_kwargs": {"token": "hf_hidden", "revision": "main"}}
    secret |= {"vllm_server_base_url": "http://hidden:hidden@host:8000/v1?key=hidden"}
    config = config_cls("out", use_cpu=True, bf16=False, **secret)
    shown = config.to_dict()
    assert "hidden" not in str(shown) and shown["model_init_kwargs"]["revision"] == "main"
    assert shown["vllm_server_base_url"] == "http://host:8000/v1"
    assert config.model_init_kwargs == secret["model_init_kwargs"]  # what the run uses is as it was
    of_trl = GRPOConfig("out", use_cpu=True, bf16=False, **secret).to_dict()
    assert "hidden" in str(of_trl) and "hidden" not in str(without_secrets(of_trl))


@pytest.mark.parametrize("config_cls", [*ALL, ARGUMENTS["grpo"][1]])
@pytest.mark.parametrize(
    ("launched", "own", "used"),
    [
        ("bf16", {"bf16": False}, "no"),
        ("fp8", {"bf16": False}, "no"),
        ("fp16", {"bf16": True}, "bf16"),
        ("bf16", {"bf16": True}, "bf16"),
        ("no", {"bf16": True}, "bf16"),
        ("no", {"bf16": False}, "no"),
    ],
)
def test_the_configurations_precision_wins_over_the_launchers(tmp_path, monkeypatch, config_cls, launched, own, used):
    said = []
    monkeypatch.setattr(MultiProcessAdapter, "warning_once", lambda self, text: said.append(text))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    assert config_cls(str(tmp_path), use_cpu=True, **own).mixed_precision == used
    assert len(said) == (launched not in ("no", used))  # names both
    assert all(f"`bf16={own['bf16']}`" in each and f"`mixed_precision: {launched}`" in each for each in said)
