"""Configuration of [`~trl_repulse.RePULSeTrainer`]."""

from dataclasses import dataclass, field

from ._checks import check_repulse_config, require
from .negative_term_config import NegativeTermConfig
from .reinforce_config import ReinforceConfig


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

    beta: float = field(default=0.2, metadata={"help": "Coefficient of the KL penalty, which is part of the return."})
    num_generations: int | None = field(
        default=4, metadata={"help": "Number of completions a prompt, at least 2, whose returns are compared."}
    )

    def __post_init__(self):
        super().__post_init__()
        check_repulse_config(self)
        if self.max_bad_probability is not None and self.alpha > 0:
            remedy = "contradicts `max_bad_probability`, which moves `alpha` from the value it has; leave it unset"
            require(self, self.alpha_start is None, "alpha_start", remedy)

    @property
    def charges_bad(self) -> bool:
        return super().charges_bad and self.alpha == 0  # else the constraint moves `alpha`
