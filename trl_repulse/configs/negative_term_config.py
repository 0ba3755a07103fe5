"""Options for the negative term, for all trainers that have one."""

from dataclasses import dataclass, field
from typing import Literal

from ._checks import check_target_is_used
from ._fields import KnownFields


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


@dataclass
class NegativeTermConfig(KnownFields):
    r"""
    Options for the negative term and the proposal, whose samples it pushes down; not a configuration by itself.

    Parameters:
        > Parameters that control the target distribution

        target_dist_beta (`float`, *optional*):
            Inverse temperature β of the target, per unit of reward: below 0 for `potential="tilted"`, above 0 for
            `"class"` (a multiplier of the class's log-probability), unused for `"indicator"`. If `None`, -10.
        target_dist_beta_start (`float`, *optional*):
            If set, β moves geometrically from this value to `target_dist_beta` over all updates.
        potential (`str`, *optional*):
            Weight of a completion of reward r in the target: `"tilted"`: exp(β·min(r, `reward_cap`)). `"indicator"`:
            1[r < `bad_reward_threshold`] (+ 1e-16). `"class"`: P(`target_class` | r)^β, with r a classifier's logit.
            If `None`, `"indicator"` with `proposal="hot_policy"`, else `"tilted"`.
        target_class (`int`, *optional*, defaults to `1`):
            Class of the `"class"` potential: 1 seeks high logits, 0 low ones.
        reward_cap (`float`, *optional*):
            Upper limit of rewards in the tilted potential.

        > Parameters that control the negative term

        alpha (`float`, *optional*):
            Weight of the negative term, in units of the policy's advantages. With 0 there is no negative term and no
            proposal. If `None`, 1 with `proposal="hot_policy"`, else 0.1; for GRPO see [`RePULSeGRPOConfig`].
        alpha_start (`float`, *optional*):
            If set, α moves geometrically from this value to `alpha` over all updates.
        alpha_normalization (`str`, *optional*):
            `"samples"`: the convention of the published α, the paper's Eq. 4 with α / N (N proposal samples a prompt).
            `"none"`: Eq. 4 itself, whose fixed point does not depend on N. If `None`, `"none"` with
            `proposal="hot_policy"`, else `"samples"`; for GRPO with `alpha` unset, `"samples"`.
        negative_loss (`str`, *optional*, defaults to `"push_down"`):
            Loss on the weighted proposal samples: `"push_down"` lowers their log-probability, `"reinforce"` applies
            REINFORCE to them (harmful according to the paper).
        negative_baseline (`str`, *optional*, defaults to `"none"`):
            Baseline of `negative_loss="reinforce"`: `"none"`, the mean return of the prompt's other proposal samples
            (`"proposal"`) or of its policy samples (`"policy"`).

        > Parameters that control the proposal

        proposal (`str`, *optional*, defaults to `"hot_policy"`):
            What finds the policy's bad outputs. `"hot_policy"`: the policy draws `num_proposal_generations` further
            completions a prompt so that more are bad. These *hot* samples and its own are weighted against their
            mixture, and those with a reward below `bad_reward_threshold` are pushed down. `"learned"`: a second model
            that learns to draw them, as in the paper. `"policy"`: the policy's own samples, weighted by the potential
            alone, without a second sampling. The defaults of `alpha`, `alpha_normalization` and `potential` depend on
            it.
        proposal_temperature (`float`, *optional*):
            Temperature of hot samples, above 1; at most 2 with vLLM. If `None`, the run chooses, by what finds bad outputs most
            often: the policy at temperature 1, 1.3, 1.6 or 2, or the policy with raised logits of tokens that lower the reward.
        proposal_learning_rate (`float`, *optional*):
            Learning rate of the proposal. If `None`, `learning_rate`.
        proposal_loss (`str`, *optional*, defaults to `"ctl"`):
            Contrastive twist learning (`"ctl"`, Eq. 6), the same without its second term (`"ctl_no_second_term"`),
            `"dpg"` (second term as an exact sum over the vocabulary; needs another policy pass and full logits),
            `"sixo"`, or trajectory balance in its variance form (`"vargrad"`).
        proposal_parameterization (`str`, *optional*, defaults to `"token"`):
            Twist of CTL: from each token's log-ratio (`"token"`, Eq. 7) or from the prefix's (`"prefix"`).
        num_proposal_generations (`int`, *optional*):
            Proposal samples a prompt, at least 2. If `None`, `num_generations`.
        proposal_updates_per_step (`int`, *optional*, defaults to `1`):
            Proposal updates for each generation batch, each with new samples. The last samples also serve the policy,
            and the last update is repeated with each policy update on the batch. Above 1, `steps_per_generation` must
            be a multiple of `gradient_accumulation_steps`, as by default.
        proposal_update_order (`str`, *optional*, defaults to `"before"`):
            Whether the proposal learns from the policy `"before"` its update (no extra pass) or `"after"`.
        push_proposal_to_hub (`bool`, *optional*, defaults to `False`):
            Whether `push_to_hub` also pushes the final proposal, to a **private** repository of its own; an existing
            public one is refused.
        hub_proposal_model_id (`str`, *optional*):
            Name of that repository. If `None`, the policy's name followed by `-proposal`.
        proposal_vllm_server_base_url (`str`, *optional*):
            Server for the proposal with `vllm_mode="server"`. If `None`, both models take turns on the policy's.
        proposal_vllm_group_port (`int`, *optional*, defaults to `51217`):
            Port for sending weights to the proposal's server.
    """

    target_dist_beta: float | None = field(
        default=None,
        metadata={
            "help": "Inverse temperature of the target distribution (the paper's beta with its sign): below 0 for the "
            "tilted potential. Not the KL coefficient, which is `beta`. If unset, -10."
        },
    )
    target_dist_beta_start: float | None = field(
        default=None,
        metadata={"help": "If set, target_dist_beta moves geometrically from this value over all updates."},
    )
    potential: Literal["tilted", "indicator", "class"] | None = field(
        default=None,
        metadata={
            "help": "How the target weighs a completion: `tilted`, `indicator` or `class` potential. If unset, `indicator` with "
            "`proposal='hot_policy'`, else `tilted`."
        },
    )
    target_class: Literal[0, 1] = field(default=1, metadata={"help": "Class of the `class` potential, 0 or 1."})
    reward_cap: float | None = field(
        default=None, metadata={"help": "Rewards above the cap count as the cap in the tilted potential."}
    )
    alpha: float | None = field(
        default=None,
        metadata={
            "help": "Weight of the negative term. 0 leaves it out, and there is no proposal. If unset, 1 with "
            "`proposal='hot_policy'`, else 0.1; on GRPO 0.1, with tokens counted as in `loss_type`."
        },
    )
    alpha_start: float | None = field(
        default=None, metadata={"help": "If set, alpha moves geometrically from this value over all updates."}
    )
    alpha_normalization: Literal["samples", "none"] | None = field(
        default=None,
        metadata={
            "help": "`samples`: alpha is divided by N, as in the published runs. `none`: Eq. 4 of the paper. If unset, `none` "
            "with `proposal='hot_policy'`, else `samples`; on GRPO with `alpha` unset `samples`."
        },
    )
    negative_loss: Literal["push_down", "reinforce"] = field(
        default="push_down",
        metadata={"help": "What the policy does with weighted proposal samples: `push_down` or `reinforce`."},
    )
    negative_baseline: Literal["none", "proposal", "policy"] = field(
        default="none", metadata={"help": "Baseline of `negative_loss='reinforce'`: `none`, `proposal` or `policy`."}
    )
    proposal: Literal["hot_policy", "learned", "policy"] = field(
        default="hot_policy",
        metadata={
            "help": "What finds the policy's bad outputs: the policy, drawn so that more of them come (`hot_policy`), a second model that "
            "learns to (`learned`, as in the paper), or the policy's own samples, reweighted (`policy`)."
        },
    )
    proposal_temperature: float | None = field(
        default=None,
        metadata={"help": "One temperature, above 1, for the hot policy's extra samples. If unset, the run chooses."},
    )
    proposal_learning_rate: float | None = field(
        default=None, metadata={"help": "Learning rate of the proposal. If `None`, `learning_rate`."}
    )
    proposal_loss: Literal["ctl", "ctl_no_second_term", "dpg", "sixo", "vargrad"] = field(
        default="ctl",
        metadata={"help": "Loss of the proposal: `ctl`, `ctl_no_second_term`, `dpg`, `sixo` or `vargrad`."},
    )
    proposal_parameterization: Literal["token", "prefix"] = field(
        default="token", metadata={"help": "Twist of CTL: from each token's log-ratio or from the prefix's."}
    )
    num_proposal_generations: int | None = field(
        default=None, metadata={"help": "Proposal samples a prompt, at least 2. If `None`, `num_generations`."}
    )
    proposal_updates_per_step: int = field(
        default=1, metadata={"help": "Proposal updates for each batch of generations, each on fresh proposal samples."}
    )
    proposal_update_order: Literal["before", "after"] = field(
        default="before",
        metadata={"help": "Whether the proposal learns from the policy `before` or `after` the policy's update."},
    )
    push_proposal_to_hub: bool = field(
        default=False,
        metadata={"help": "Whether to push the proposal with the final policy, to a private repository of its own."},
    )
    hub_proposal_model_id: str | None = field(
        default=None,
        metadata={
            "help": "Private repository of the proposal. If `None`, the policy's name with `-proposal` behind it."
        },
    )
    proposal_vllm_server_base_url: str | None = field(
        default=None,
        metadata={"help": "With `vllm_mode='server'`, a server for the proposal. If `None`, it shares the policy's."},
    )
    proposal_vllm_group_port: int = field(
        default=51217, metadata={"help": "Port over which the proposal's vLLM server gets its weights."}
    )

    def __post_init__(self):
        check_target_is_used(self)
        defaults = _HOT_DEFAULTS if self.proposal == "hot_policy" else _PAPERS_DEFAULTS
        for name, default in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        super().__post_init__()  # type: ignore[misc]  # of the other base class

    @property
    def has_proposal(self) -> bool:
        """Whether a second model is built."""
        return bool(self.alpha) and self.proposal == "learned"

    @property
    def draws_hot(self) -> bool:
        """Whether the policy itself draws the samples of the proposal."""
        return bool(self.alpha) and self.proposal == "hot_policy"

    @property
    def draws_twice(self) -> bool:
        """Whether a second set of completions is drawn."""
        return self.has_proposal or self.draws_hot
