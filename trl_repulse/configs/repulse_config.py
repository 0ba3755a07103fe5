"""Configurations of the trainers that have a negative term, and its options."""

from dataclasses import dataclass
from typing import Literal

from trl import GRPOConfig

from ._checks import check_compared, check_repulse_config, require
from .ppo_config import PPOConfig
from .reinforce_config import ReinforceConfig
from .shared_config import SharedConfig, documented, option


# Chosen in held-out worlds: see docs/held_out.md
_HOT_DEFAULTS = {
    "potential": "indicator",
    "target_dist_beta": -10.0,
    "alpha": 1.0,
    "alpha_normalization": "none",
    "proposal_temperature": None,
}
_PAPERS_DEFAULTS = _HOT_DEFAULTS | {
    "potential": "tilted",
    "alpha": 0.1,
    "alpha_normalization": "samples",
    "proposal_temperature": 1.0,
}


@documented
@dataclass
class NegativeTermConfig:
    r"""
    Options for the negative term and the proposal, whose samples it pushes down; not a configuration by itself.

    Parameters:
        > Parameters that control the target distribution

        target_dist_beta (`float`, *optional*):
            Inverse temperature of the target distribution (the paper's β with its sign), per unit of reward: below 0
            for `potential="tilted"`, above 0 for `"class"` (a multiplier of the class's log-probability), unused for
            `"indicator"`. Not the KL coefficient, which is `beta`. If unset, -10.
        target_dist_beta_start (`float`, *optional*):
            If set, target_dist_beta moves geometrically from this value over all updates.
        potential (`str`, *optional*):
            How the target weighs a completion of reward r. `"tilted"`: exp(β·min(r, `reward_cap`)). `"indicator"`: 1[r
            < `bad_reward_threshold`] (+ 1e-16). `"class"`: P(`target_class` | r)^β, with r a classifier's logit. If
            unset, `"indicator"` with `proposal="hot_policy"`, else `"tilted"`.
        target_class (`int`, *optional*, defaults to `1`):
            Class of the `"class"` potential: 1 seeks high logits, 0 low ones.
        reward_cap (`float`, *optional*):
            Upper limit of rewards in the tilted potential.

        > Parameters that control the negative term

        alpha (`float`, *optional*):
            Weight of the negative term. 0 leaves it out, and there is no proposal. It is in units of the policy's
            advantages. If unset, 1 with `proposal="hot_policy"`, else 0.1; for GRPO see [`RePULSeGRPOConfig`].
        alpha_start (`float`, *optional*):
            If set, alpha moves geometrically from this value over all updates.
        alpha_normalization (`str`, *optional*):
            `"samples"`: alpha is divided by N, as in the published runs, with N proposal samples a prompt. `"none"`:
            Eq. 4 of the paper, whose fixed point does not depend on N. If unset, `"none"` with
            `proposal="hot_policy"`, else `"samples"`; for GRPO with `alpha` unset, `"samples"`.
        negative_loss (`str`, *optional*, defaults to `"push_down"`):
            What the policy does with weighted proposal samples: `"push_down"` lowers their log-probability,
            `"reinforce"` applies REINFORCE to them (harmful according to the paper).
        negative_baseline (`str`, *optional*, defaults to `"none"`):
            Baseline of `negative_loss="reinforce"`: `"none"`, the mean return of the prompt's other proposal samples
            (`"proposal"`) or of its policy samples (`"policy"`).

        > Parameters that control the proposal

        proposal (`str`, *optional*, defaults to `"hot_policy"`):
            What finds the policy's bad outputs. `"hot_policy"`: the policy draws `num_proposal_generations` further
            completions a prompt so that more are bad. These hot samples and its own are weighted against their
            mixture, and those with a reward below `bad_reward_threshold` are pushed down. `"learned"`: a second model
            that learns to draw them, as in the paper. `"policy"`: the policy's own samples, weighted by the potential
            alone, without a second sampling. The defaults of `alpha`, `alpha_normalization` and `potential` depend on
            it.
        proposal_temperature (`float`, *optional*):
            One temperature, above 1, for the hot policy's extra samples; at most 2 with vLLM. If unset, the run
            chooses, by what finds bad outputs most often: the policy at temperature 1, 1.3, 1.6 or 2, or the policy
            with raised logits of tokens that lower the reward.
        proposal_learning_rate (`float`, *optional*):
            Learning rate of the proposal. If `None`, `learning_rate`.
        proposal_loss (`str`, *optional*, defaults to `"ctl"`):
            Loss of the proposal: `"ctl"`, contrastive twist learning (Eq. 6), `"ctl_no_second_term"`, `"dpg"` (second
            term as an exact sum over the vocabulary; needs another policy pass and full logits), `"sixo"`, or
            `"vargrad"`, trajectory balance in its variance form.
        proposal_parameterization (`str`, *optional*, defaults to `"token"`):
            Twist of CTL: from each token's log-ratio (`"token"`, Eq. 7) or from the prefix's (`"prefix"`).
        num_proposal_generations (`int`, *optional*):
            Proposal samples a prompt, at least 2. If `None`, `num_generations`.
        proposal_updates_per_step (`int`, *optional*, defaults to `1`):
            Proposal updates for each batch of generations, each on fresh proposal samples. The last samples also serve
            the policy, and the last update is repeated with each policy update on the batch. Above 1,
            `steps_per_generation` must be a multiple of `gradient_accumulation_steps`, as by default.
        proposal_update_order (`str`, *optional*, defaults to `"before"`):
            Whether the proposal learns from the policy `"before"` its update (no extra pass) or `"after"`.
        push_proposal_to_hub (`bool`, *optional*, defaults to `False`):
            Whether `push_to_hub` also pushes the final proposal, to a private repository of its own; an existing
            public one is refused.
        hub_proposal_model_id (`str`, *optional*):
            Private repository of the proposal. If `None`, the policy's name followed by `-proposal`.
        proposal_vllm_server_base_url (`str`, *optional*):
            Server for the proposal with `vllm_mode="server"`. If `None`, both models take turns on the policy's.
        proposal_vllm_group_port (`int`, *optional*, defaults to `51217`):
            Port for sending weights to the proposal's server.
    """

    target_dist_beta: float | None = None
    target_dist_beta_start: float | None = None
    potential: Literal["tilted", "indicator", "class"] | None = None
    target_class: Literal[0, 1] = 1
    reward_cap: float | None = None
    alpha: float | None = None
    alpha_start: float | None = None
    alpha_normalization: Literal["samples", "none"] | None = None
    negative_loss: Literal["push_down", "reinforce"] = "push_down"
    negative_baseline: Literal["none", "proposal", "policy"] = "none"
    proposal: Literal["hot_policy", "learned", "policy"] = "hot_policy"
    proposal_temperature: float | None = None
    proposal_learning_rate: float | None = None
    proposal_loss: Literal["ctl", "ctl_no_second_term", "dpg", "sixo", "vargrad"] = "ctl"
    proposal_parameterization: Literal["token", "prefix"] = "token"
    num_proposal_generations: int | None = None
    proposal_updates_per_step: int = 1
    proposal_update_order: Literal["before", "after"] = "before"
    push_proposal_to_hub: bool = False
    hub_proposal_model_id: str | None = None
    proposal_vllm_server_base_url: str | None = None
    proposal_vllm_group_port: int = 51217

    def __post_init__(self):
        # A β that the hot policy's default potential ignores
        ignored = self.proposal == "hot_policy" and self.potential is None and self.alpha != 0
        remedy = (
            "has no effect on the hot policy, which pushes down what is under `bad_reward_threshold`; set "
            "`proposal='learned'` (the paper's), or leave it unset"
        )
        require(self, not ignored or self.target_dist_beta is None, "target_dist_beta", remedy)
        self.fill_in()
        super().__post_init__()  # type: ignore[misc]  # of the other base class

    def fill_in(self) -> None:
        """Gives unset fields the defaults that depend on `proposal`. Reads and writes attributes alone: any object with them will do."""
        for name, default in (_HOT_DEFAULTS if self.proposal == "hot_policy" else _PAPERS_DEFAULTS).items():
            if getattr(self, name) is None:
                setattr(self, name, default)

    @property
    def has_proposal(self) -> bool:
        """Whether a second model is built."""
        return bool(self.alpha) and self.proposal == "learned"

    @property
    def draws_hot(self) -> bool:
        """Whether the policy draws extra samples itself, by another sampler of its logits."""
        return bool(self.alpha) and self.proposal == "hot_policy"

    @property
    def draws_twice(self) -> bool:
        """Whether a second set of completions is drawn."""
        return self.has_proposal or self.draws_hot


@dataclass
class RePULSeConfig(NegativeTermConfig, ReinforceConfig):
    r"""
    Configuration class for the [`RePULSeTrainer`].

    > [!WARNING]
    > **`beta` is not RePULSe's β.** As everywhere in TRL, `beta` is the coefficient of the KL penalty to the reference
    > model (0.2 by default). The paper's β, the inverse temperature of the target σ ∝ policy · exp(β·reward), is
    > `target_dist_beta`, and it is **negative** here: σ seeks low rewards.

    Its arguments are those of [`~trl_repulse.configs.NegativeTermConfig`], [`ReinforceConfig`], [`~trl.GRPOConfig`]
    and [`~transformers.TrainingArguments`]. `learning_rate`, `max_grad_norm`, `optim`, the weight decay and the
    scheduler apply to each model separately; only the proposal's learning rate can differ.

    > [!NOTE]
    > These parameters have default values different from [`ReinforceConfig`]; they did best in two held-out worlds
    > (docs/held_out.md):
    > - `beta`: Defaults to `0.2` instead of `0.05`.
    > - `num_generations`: Defaults to `4` instead of `2`.
    """

    beta: float = option(0.2, "Coefficient of the KL penalty, which is part of the return.")
    num_generations: int | None = option(4, "Number of completions a prompt, at least 2, whose returns are compared.")

    def check(self) -> None:
        super().check()
        check_repulse_config(self)


@documented
@dataclass
class RePULSePPOConfig(NegativeTermConfig, PPOConfig):
    r"""
    Configuration class for the [`RePULSePPOTrainer`].

    Its arguments are those of [`~trl_repulse.configs.NegativeTermConfig`], [`PPOConfig`], [`~trl.GRPOConfig`] and
    [`~transformers.TrainingArguments`]. `beta` is the KL coefficient, and `target_dist_beta` the inverse temperature
    of the target distribution. `learning_rate`, `max_grad_norm`, `optim`, the weight decay and the scheduler apply to
    each model separately; the learning rates of value model and proposal can differ.

    Parameters:
        logprob_reduction (`str`, *optional*, defaults to `"mean"`):
            How token log-probabilities enter the negative term: their `"mean"` (the convention of the published
            `alpha`) or their `"sum"`. For PPO's own loss see `loss_type`.

    > [!NOTE]
    > These parameters have default values different from [`PPOConfig`]:
    > - `num_generations`: Defaults to `4` instead of `1`: importance weights compare a prompt's samples.
    """

    num_generations: int | None = option(
        4, "Number of completions a prompt. Importance weights compare a prompt's samples."
    )
    logprob_reduction: Literal["mean", "sum"] = "mean"

    def check(self) -> None:
        super().check()
        check_repulse_config(self, in_rows=True)


@documented
@dataclass
class RePULSeGRPOConfig(NegativeTermConfig, SharedConfig, GRPOConfig):
    r"""
    Configuration class for the [`RePULSeGRPOTrainer`].

    Its arguments are those of [`~trl_repulse.configs.NegativeTermConfig`], [`~trl_repulse.configs.SharedConfig`],
    [`~trl.GRPOConfig`] and [`~transformers.TrainingArguments`]. `beta` is the KL coefficient, and `target_dist_beta`
    the inverse temperature of the target distribution. `learning_rate`, `max_grad_norm`, `optim`, the weight decay and
    the scheduler apply to each model separately; only the proposal's learning rate can differ.

    Parameters:
        logprob_reduction (`str`, *optional*):
            How token log-probabilities enter the negative term: their `"mean"` (the convention of the published
            `alpha`) or their `"sum"`. For GRPO's own loss see `loss_type`. If unset, `"mean"`; with `alpha` unset and
            `loss_type` `"dr_grpo"` or `"luspo"`, `"sum"`, as in these losses.
        proposal_tools (`bool`, *optional*, defaults to `False`):
            Whether the proposal, or the hot policy, which seeks the policy's worst behaviour, may act with the
            trainer's `tools`, which take effect, and in environments of a `proposal_environment_factory`.

    > [!NOTE]
    > These parameters have default values different from [`~trl.GRPOConfig`] and
    > [`~trl_repulse.configs.NegativeTermConfig`]:
    > - `alpha`: Defaults to 0.1 with any `proposal`, and `alpha_normalization` to `"samples"`, in units of the advantages,
    >   which have a standard deviation of about 1 unless `scale_rewards="none"`. The default is divided by the number of
    >   proposal samples with `alpha_normalization="none"`, and by `max_completion_length` with `loss_type="dr_grpo"`, which
    >   divides by it too, or `logprob_reduction="sum"` (not with `loss_type="luspo"`, which is a sum itself). With
    >   `loss_type="cispo"` it is multiplied by `epsilon_high` if that is below 1, as the advantages are.
    > - `per_device_eval_batch_size`: Defaults to `None` instead of `8`: as large as training's, in whole prompts.
    > - `disable_dropout`: Defaults to `True` instead of `False`: dropout makes the log-probabilities of a completion
    >   differ from pass to pass.
    """

    logprob_reduction: Literal["mean", "sum"] | None = None
    proposal_tools: bool = False

    def __post_init__(self):
        check_compared(self)
        super().__post_init__()
        self.check()

    def check(self) -> None:
        super().check()
        remedy = "does not reach GRPO's advantages, which TRL makes of rewards; leave it at None"
        require(self, self.reward_transform is None, "reward_transform", remedy)
        check_repulse_config(self, in_rows=True)
        remedy = "is for completions that are drawn for the negative term; leave it False: the policy's own need none"
        own = self.alpha > 0 and not self.draws_twice
        require(self, not (own and self.proposal_tools), "proposal_tools", remedy)

    def fill_in(self) -> None:
        """Gives unset fields their defaults, as in [`NegativeTermConfig`]. Of `alpha` it is the published 0.1 in units of the advantages,
        with tokens counted as in GRPO's loss, which also decides `logprob_reduction`."""
        if self.alpha is None:
            if self.logprob_reduction is None and self.loss_type in ("dr_grpo", "luspo"):
                self.logprob_reduction = "sum"
            self.alpha = 0.1
            if self.alpha_normalization is None:
                self.alpha_normalization = "samples"
            elif self.alpha_normalization == "none":
                self.alpha /= self.num_proposal_generations or self.num_generations
            # Only LUSPO's loss is a sum; DR-GRPO divides sums by the greatest length
            if self.loss_type == "dr_grpo" or (self.logprob_reduction == "sum" and self.loss_type != "luspo"):
                self.alpha /= self.max_completion_length or 1  # 0 is refused later
            if self.loss_type == "cispo":  # the ratio, initially 1, is clipped there
                self.alpha *= min(self.epsilon if self.epsilon_high is None else self.epsilon_high, 1.0)
        if self.logprob_reduction is None:
            self.logprob_reduction = "mean"
        NegativeTermConfig.fill_in(self)
