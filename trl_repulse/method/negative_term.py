"""The negative term of a policy's loss: weighted samples of the policy's bad outputs, which are pushed down.

A trainer of units has one, whatever the rest of its loss is, and calls:

- `drawing()`: a context around the policy's own sampling, in which vLLM can draw for both;
- `sample(rows, batch)` for each generation batch: draws samples, and weighs them where that cannot wait;
- `learn(inputs, log_p, log_p_negative)` for each micro-batch: gives the coefficients that are still missing; a proposal learns here;
- `end_of_micro_batch()` once the gradient is there.

The policy's pass with gradient scores the sets in `completions`, and what `by_sampler` adds. The trainer adds them to its loss with
`own_negative_coefficients` and `negative_coefficients`.

Axis letters: U units of n policy samples and m others, P prompts, N policy samples and K others of a prompt, T completion tokens.
"""

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F

from ..engine.sampling import Samples, Scorer, UnitSampling
from ..engine.second_model import PROPOSAL_FOLDER
from ..generation._samplers import POLICY, Sampler
from ..math.importance import normalize_weights
from ..math.losses import negative_coefficients, negative_reinforce_coefficients
from ..rewards.transforms import class_log_potential, geometric_schedule, indicator_log_potential, tilted_log_potential


OWN, NEGATIVE = "completion", "proposal_completion"
# Names of the coefficients of each set's samples in the loss
COEFFICIENTS = {OWN: "own_negative_coefficients", NEGATIVE: "negative_coefficients"}


def own_prompts(samples: Samples, batch: dict[str, torch.Tensor], m: int) -> dict[str, torch.Tensor]:
    """
    `prompt_ids` and `prompt_mask` of samples, m for each unit, one row a sample, if they differ from those of the units.

    Prompts differ where an environment does not always begin in the same way.
    """
    found = [(samples.prompt_ids, samples.prompt_mask), (batch["prompt_ids"], batch["prompt_mask"])]
    length = max(ids.size(1) for ids, _ in found)
    own, units = (F.pad(ids.masked_fill(mask == 0, -1), (length - ids.size(1), 0), value=-1) for ids, mask in found)
    if torch.equal(own, units.repeat_interleave(m, 0)):
        return {}
    return {"prompt_ids": samples.prompt_ids, "prompt_mask": samples.prompt_mask}


class NegativeTerm:
    """
    The negative term of a policy that is its own proposal: its samples, weighed by the potential alone.

    Args:
        trainer ([`UnitSampling`]):
            Trainer of the policy.
    """

    completions: tuple[str, ...] = (OWN,)
    engine: Any = None  # model that other samples are drawn from; the policy if `None`

    def __init__(self, trainer: UnitSampling):
        self.scorer = Scorer(trainer)
        self.trainer: Any = trainer
        self.logs = self.scorer.new_table()

    # The calls of a trainer

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the policy's samples are drawn."""
        return contextlib.nullcontext()

    def sample(self, rows: list[dict[str, Any]], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """
        Samples and coefficients that are added to a generation batch.

        Args:
            rows (`list[dict]`):
                This process's rows of the dataset, one a policy sample.
            batch (`dict[str, torch.Tensor]`):
                Their units: `prompt_ids` and `prompt_mask` of shape `(U, L)`, `completion_ids` and `completion_mask` of shape
                `(U, n, T)`, `rewards` of shape `(U, n)` and, where there are some, `old_log_p` (nats, under the sampling-time
                policy) of shape `(U, n, T)` and `returns` of shape `(U, n)`.

        Returns:
            `dict[str, torch.Tensor]`: Samples and, if they are weighed now, their coefficients, with U first.
        """
        return self.weigh(batch) if self.scorer.weighs_early else {}

    def learn(
        self, inputs: dict[str, torch.Tensor], log_p: torch.Tensor | None, log_p_negative: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """
        Coefficients that a micro-batch does not have yet.

        Args:
            inputs (`dict[str, torch.Tensor]`):
                Its units.
            log_p, log_p_negative (`torch.Tensor` of shape `(U, n, T)` and `(U, m, T)`, *optional*):
                Log-probabilities (nats) under the policy, detached: of its own samples at sampling time, and of the others now.
                Not needed if samples were weighed as they were drawn.
        """
        made = COEFFICIENTS[self.completions[-1]] in inputs
        return {} if made else self.weigh(inputs, log_p, log_p_negative)

    def end_of_micro_batch(self) -> None:
        """Updates a proposal, once the gradient of an update is complete."""

    def by_sampler(self, batch: dict[str, torch.Tensor]) -> tuple[Sampler, dict[str, torch.Tensor]] | None:
        """Another sampler under which the policy's pass gives log-probabilities too, and of which samples."""
        return None

    def needed(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The completions that the policy's pass has to score, by set, where these are not all: those that have a weight."""
        return {NEGATIVE: batch[COEFFICIENTS[NEGATIVE]] != 0} if COEFFICIENTS[NEGATIVE] in batch else {}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, for JSON."""
        return {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that a checkpoint keeps as well."""
        return {}

    def load_state(self, state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Restores what [`state`] and [`tensors`] gave."""

    # Sampling

    @property
    def mode(self) -> str:
        return self.scorer.mode

    @property
    def sampler(self) -> Sampler:
        """What draws the other samples from the model's logits."""
        return POLICY

    @property
    def size(self) -> int:
        """K: the number of other samples of a prompt."""
        configured = self.trainer.args.num_proposal_generations
        return configured if self.mode == "train" and configured is not None else self.scorer.num_generations

    @property
    def unit_sizes(self) -> tuple[int, int]:
        """n and m: the numbers of the policy's and of other samples in a unit."""
        n = self.scorer.unit_size
        return n, self.size * n // self.scorer.num_generations

    def draw(self, rows: list[dict[str, Any]], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Samples for the prompts of a generation batch, in the units of its policy samples."""
        n, m = self.unit_sizes
        if m != n:
            rows = [row for row in rows[::n] for _ in range(m)]
        samples = self.scorer.draw(rows, self.size, self.logs, self.engine, self.sampler)
        units = samples.in_units(m, "proposal_")
        units |= {f"{NEGATIVE}_{name}": x.unflatten(0, (-1, m)) for name, x in own_prompts(samples, batch, m).items()}
        return {name: batch[name] for name in ("prompt_ids", "prompt_mask")} | units

    # Weights

    def scheduled(self, name: str) -> float:
        """`alpha` or `target_dist_beta` at this update."""
        args, state, constraint = self.trainer.args, self.trainer.state, self.scorer.constraint
        if name == "alpha" and constraint is not None:
            return constraint.multiplier
        start, end = getattr(args, f"{name}_start"), getattr(args, name)
        if start is None:
            return end
        last = max(state.max_steps - 1, 1)
        return geometric_schedule(start, end, min(state.global_step / last, 1.0))

    def log_potential(self, rewards: torch.Tensor) -> torch.Tensor:
        """log φ (nats) of each sample, from raw rewards, not transformed ones."""
        args, beta = self.trainer.args, self.scheduled("target_dist_beta")
        if args.potential == "indicator":
            threshold = self.scorer.bad_reward_threshold
            return indicator_log_potential(rewards, -math.inf if threshold is None else threshold)
        if args.potential == "class":
            return class_log_potential(rewards, beta, args.target_class)
        return tilted_log_potential(rewards, beta, args.reward_cap)

    def coefficients(
        self, log_w: torch.Tensor, returns_negative: torch.Tensor | None, returns: torch.Tensor | None
    ) -> torch.Tensor:
        """
        Coefficients of weighted samples in the policy loss, of shape `(P, K)`.

        Args:
            log_w (`torch.Tensor` of shape `(P, K)`):
                Log-weights, −inf for samples without a reward.
            returns_negative, returns (`torch.Tensor` of shape `(P, K)` and `(P, N)`, *optional*):
                Returns of these samples and of the policy's, which `negative_loss="reinforce"` needs.
        """
        args, alpha = self.trainer.args, self.scheduled("alpha")
        normalized_w = normalize_weights(log_w)
        if args.negative_loss == "push_down":
            return negative_coefficients(normalized_w, alpha, args.alpha_normalization)
        baseline: Any = args.negative_baseline if log_w.size(1) > 1 else "none"  # one sample: only in evaluation
        return negative_reinforce_coefficients(
            normalized_w, returns_negative, alpha, baseline, returns, args.alpha_normalization
        )

    def weigh(
        self,
        batch: dict[str, torch.Tensor],
        log_p: torch.Tensor | None = None,
        log_p_negative: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """
        Weighs the samples of the negative term; here the policy's own, whose log-probabilities are not needed.

        Args:
            batch (`dict[str, torch.Tensor]`):
                Units with `rewards` of shape `(U, n)` and, for `negative_loss="reinforce"`, `returns` of the same shape.
            log_p, log_p_negative (`torch.Tensor` of shape `(U, n, T)` and `(U, m, T)`, *optional*):
                Log-probabilities (nats) of the policy's own samples and of the others under the sampling-time policy, detached.

        Returns:
            `dict[str, torch.Tensor]`: The [`COEFFICIENTS`] of each set that has weights.
        """
        scorer, args, rewards = self.scorer, self.trainer.args, batch["rewards"]
        size = scorer.num_generations
        log_w = scorer.by_prompt(self.log_potential(rewards), size)  # (P, N)
        scored = ~log_w.isnan()
        log_w = torch.where(scored, log_w, -torch.inf)
        scorer.log_importance("negative", log_w, scored)
        returns = scorer.by_prompt(batch["returns"], size) if args.negative_loss == "reinforce" else None
        return {COEFFICIENTS[OWN]: scorer.by_unit(self.coefficients(log_w, returns, returns), rewards)}


class DrawnTerm(NegativeTerm):
    """A negative term of samples that are drawn for it, in addition to the policy's own."""

    completions = (OWN, NEGATIVE)
    drawn_log_p: str  # name of the samples' log-probabilities under what drew them, in batches that are weighed early

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """As [`NegativeTerm.drawing`]; vLLM draws the others in the same call, if it can."""
        if not self.trainer.use_vllm:
            return contextlib.nullcontext()
        name = "policy" if self.engine is None else PROPOSAL_FOLDER
        return self.trainer.vllm_generation.together(name, self.unit_sizes, self.sampler)

    def sample(self, rows: list[dict[str, Any]], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        drawn = self.draw(rows, batch)
        if not self.scorer.weighs_early:
            return drawn
        batch = batch | drawn
        by_sampler, needed = self.by_sampler(batch), self.needed(batch)
        names = (NEGATIVE,) if "old_log_p" in batch and by_sampler is None else (NEGATIVE, OWN)
        if "old_log_p" in batch and by_sampler is not None:
            needed[OWN] = by_sampler[1][OWN]
        options = {"gradient": False, "by_sampler": by_sampler, "needed": needed}
        scores = self.scorer.score(self.trainer.model, batch, names, **options)
        log_p = dict(zip(names, scores.log_p, strict=True))
        own_log_p = batch["old_log_p"] if "old_log_p" in batch else log_p[OWN]
        early = self.weigh_early(batch | scores.by_sampler, own_log_p, log_p[NEGATIVE])
        return drawn | {"proposal_old_log_p": log_p[NEGATIVE]} | early  # (U, m, T)

    def weigh_early(
        self, batch: dict[str, torch.Tensor], log_p: torch.Tensor, log_p_negative: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Coefficients of samples that were just drawn, and what else [`learn`] needs of them."""
        return self.weigh(batch, log_p, log_p_negative)
