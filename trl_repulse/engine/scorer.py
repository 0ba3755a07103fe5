"""What a trainer does for the negative term that it has."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from ..generation._samplers import POLICY, JointDraw, Sampler
from ..math.importance import effective_sample_size, log_z_estimate, max_weight_share
from ..models._adapters import base_of
from .metrics import Moments, lowest, mean
from .records import record_samples
from .sampling import Samples, SetScores, UnitSampling
from .scoring import takes_bias
from .second_model import PROPOSAL_FOLDER
from .trl_bridge import sampling_from


class Scorer:
    """
    Draws, scores and logs for a negative term: all that such a term may ask of its trainer, beyond what every TRL trainer has
    (`args`, `model`, `accelerator`, `state`).

    Axis letters: U units of n completions of a prompt, P prompts of N completions over all processes, T tokens. All processes call
    each method.

    Args:
        trainer ([`UnitSampling`]):
            Trainer of the policy.
    """

    def __init__(self, trainer: UnitSampling):
        self.trainer = trainer

    # The batch

    @property
    def mode(self) -> str:
        """`"train"` or `"eval"`."""
        return "train" if self.trainer.model.training else "eval"

    @property
    def num_generations(self) -> int:
        """N, of the policy's samples."""
        return self.trainer._num_generations(self.mode)

    @property
    def unit_size(self) -> int:
        """n, of the policy's samples."""
        return self.trainer._unit_size(self.mode)

    @property
    def holds_whole_prompts(self) -> bool:
        """Whether every unit is a whole prompt."""
        return self.trainer._whole(self.mode)

    @property
    def weighs_early(self) -> bool:
        """Whether samples are weighed as they are drawn, and not in the pass that carries the gradient."""
        return self.trainer._weighs_early(self.mode)

    def by_prompt(self, units: torch.Tensor, size: int) -> torch.Tensor:
        """(U, n, ...) as (P, size, ...)."""
        return self.trainer._to_prompts(units, size)

    def by_unit(self, prompts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """(P, N, ...) as this process's (U, n, ...), (U, n) being the shape of `like`."""
        return self.trainer._to_units(prompts, like)

    @property
    def bad_reward_threshold(self) -> float | None:
        """Reward under which a sample is bad, if it is known."""
        return self.trainer.bad_reward_threshold

    @property
    def constraint(self) -> Any:
        """The constraint on P(bad), if the trainer has one."""
        return self.trainer._constraint

    # Drawing

    @property
    def takes_bias(self) -> bool:
        """Whether the policy can be drawn and scored with a bias of its logits."""
        trainer, args = self.trainer, self.trainer.args
        served = args.use_transformers_continuous_batching or (args.use_vllm and args.vllm_mode == "server")
        policy = base_of(trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False))
        return not served and (takes_bias(policy) or not trainer._guard.fused_head)

    def draw_jointly(self, own: int, others: int, sampler: Sampler) -> None:
        """Has the next draw of the policy's samples draw others too, for [`draw`], where one call of `generate` can; `own` and `others` of a prompt."""
        trainer = self.trainer
        # Continuous batching has no temperature of a row; where prompts are drawn one length at a time rows change places
        separate = trainer.args.use_transformers_continuous_batching or trainer._guard.sample_by_length
        # Environments may begin otherwise for each trajectory: what was drawn for the policy's prompts would be dropped
        separate = separate or trainer.use_vllm or trainer.environment_factories is not None
        trainer._joint_draw = None if separate else JointDraw(own, others, sampler)

    def end_joint_draw(self) -> None:
        """Drops what was drawn jointly and not taken."""
        self.trainer._joint_draw = None

    def draw(
        self,
        rows: list[dict[str, Any]],
        size: int,
        logs: dict[str, Any],
        engine: Any = None,
        sampler: Sampler = POLICY,
    ) -> Samples:
        """One completion for each row, `size` of a prompt, of the policy or of another `engine`, with their rewards; they join `logs`."""
        trainer = self.trainer
        with sampling_from(trainer, engine, PROPOSAL_FOLDER, size, sampler):
            with trainer._acting(rows) as rows:
                samples = trainer._draw(rows)
        record_samples(trainer, samples, logs, "proposal")
        return samples

    # Scoring

    def score(self, model: Any, batch: dict[str, torch.Tensor], names: tuple[str, ...], **options: Any) -> SetScores:
        """Log-probabilities (nats) of sets of completions under a model, as [`UnitSampling._score`]."""
        return self.trainer._score(model, batch, names, **options)

    def score_rows(self, score: Callable[..., tuple], ids: torch.Tensor, mask: torch.Tensor) -> tuple:
        """What `score` makes of rows, in passes that the model reads rightly."""
        return self.trainer._by_length(score, ids, mask)

    def reference_log_prob(self, batch: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        """Log-probabilities (nats) of completions under the reference, (U, n)."""
        return self.trainer._reference_log_prob(batch, name)

    def returns(self, batch: dict[str, torch.Tensor], log_p: torch.Tensor, prefix: str) -> torch.Tensor:
        """Transformed rewards less the KL penalty, (U, n)."""
        return self.trainer._returns(batch, log_p, prefix)

    def step(self, advance_schedule: bool) -> None:
        """Steps the proposal's optimizer."""
        self.trainer._update_second(PROPOSAL_FOLDER, advance_schedule)

    # Logging

    def new_table(self) -> dict[str, Any]:
        """An empty table of completions."""
        return copy.deepcopy(self.trainer._logs)  # as TRL's is at first

    def log(self, name: str, values: torch.Tensor) -> None:
        """Logs the mean of values of all processes; NaN is left out."""
        self.trainer._log_mean(name, values)

    def log_statistics(self, statistics: dict[str, Callable[[Moments], float]], values: torch.Tensor) -> Moments:
        """Logs several statistics of values of all processes, and returns their moments."""
        moments = self.trainer._gathered_moments(values)
        self.trainer._record(statistics, moments)
        return moments

    def log_value(self, name: str, value: float) -> None:
        """Logs, in training, a number that all processes have."""
        self.trainer._metrics["train"][name].append(value)

    def log_importance(self, prefix: str, log_w: torch.Tensor, scored: torch.Tensor) -> None:
        """
        Logs the diagnostics of importance weights.

        Args:
            prefix (`str`): What their names begin with: `"proposal"`, or `"negative"` for the policy as its own proposal.
            log_w, scored (`torch.Tensor` of shape `(P, N)`): Log-weights, −inf for samples without a reward, and which samples have one.
        """
        known = scored.any(dim=1)  # (P,)
        self.log_statistics({f"{prefix}/ess": mean, f"{prefix}/ess_min": lowest}, effective_sample_size(log_w)[known])
        self.log(f"{prefix}/max_weight", max_weight_share(log_w)[known])
        log_z = log_z_estimate(log_w, scored)
        self.log(f"{prefix}/log_z", torch.where(log_z.isinf(), torch.nan, log_z))

    def log_engine(self, batch: dict[str, torch.Tensor], name: str, log_p: torch.Tensor) -> None:
        """Logs how far the engine's log-probabilities of a set are from those of what drew it, where an engine drew."""
        self.trainer._log_engine(batch, name, log_p, f"{PROPOSAL_FOLDER}/")
