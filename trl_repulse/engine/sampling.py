"""Batches in units: drawing completions from any of a trainer's models, scoring them, and prompts that are cut apart.

Axis letters: P prompts, N completions per prompt, B rows of a generation batch, L prompt tokens, T completion tokens. U units
of a buffer that TRL shuffles and splits into micro-batches, each of n of a prompt's completions: all of them (n = N) where a
micro-batch holds whole prompts, a single one (n = 1) where it does not. R rows of a pass.

A set of completions in a batch has `{name}_ids` and `{name}_mask`, which is 1 at the tokens that *the model wrote*: these count, in whatever
is made of log-probabilities. Where a tool or an environment wrote into completions, `{name}_attended` is 1 at their tokens too, and
only the passes over models read it. Where an environment began otherwise than for the policy's sample, the set has prompts of its own,
`{name}_prompt_ids` and `{name}_prompt_mask`, one for each completion. `{name}_by_sampler` are log-probabilities by another sampler.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..data._checks import check_rows
from ..generation._samplers import POLICY, JointDraw, Sampler
from ..math.importance import effective_sample_size, log_z_estimate, max_weight_share, sequence_log_prob
from ..math.losses import policy_gradient_loss
from ..models._adapters import base_of
from ..models._layout import Layout
from .base_trainer import BaseTrainer
from .metrics import Moments, lowest, mean
from .records import record_samples
from .scoring import CompletionSets, Scores, needed_rows, sampler_log_probs, takes_bias, token_log_probs
from .second_model import PROPOSAL_FOLDER
from .trl_bridge import disable_gradient_checkpointing, pad, sampling_from, use_reference


@dataclass
class Samples:
    """Completions drawn for the B local rows of a generation batch, with their rewards."""

    prompts: list  # text or messages, one a row
    completions: list  # in the same form
    prompt_ids: torch.Tensor  # (B, L), left-padded
    prompt_mask: torch.Tensor  # (B, L)
    completion_ids: torch.Tensor  # (B, T), right-padded
    completion_mask: torch.Tensor  # (B, T): 1 at the tokens that the model wrote
    rewards: torch.Tensor  # (B,), weighted; NaN where no reward function gave one
    rewards_per_func: torch.Tensor  # (B_all, F), of all processes' rows
    engine_log_p: torch.Tensor | None = None  # (B, T), nats, by a vLLM engine, to be compared, not used
    attended: torch.Tensor | None = None  # (B, T), mask of all tokens, where tools may have written some

    def in_units(self, n: int, prefix: str = "") -> dict[str, torch.Tensor]:
        """Completions in units of n neighbouring rows, by name: tokens `(U, n, T)`, rewards `(U, n)`."""
        named = {
            "completion_ids": self.completion_ids,
            "completion_mask": self.completion_mask,
            "completion_attended": self.attended,
            "rewards": self.rewards,
            "completion_engine_log_p": self.engine_log_p,
        }
        return {f"{prefix}{name}": x.unflatten(0, (-1, n)) for name, x in named.items() if x is not None}


class SetScores(NamedTuple):
    """What a model makes of sets of completions, of n completions of T tokens each in units."""

    log_p: list[torch.Tensor]  # (U, n, T) of each set: log-probabilities (nats) of all tokens that are attended to
    entropy: torch.Tensor | None  # (U, n, T), nats: of the first set's tokens, with gradient through the policy alone
    aux_loss: torch.Tensor | None  # of a mixture-of-experts model
    by_sampler: dict[str, torch.Tensor]  # `{name}_by_sampler`: log-probabilities by another sampler, detached


class UnitSampling(BaseTrainer):
    """Mixin before a TRL trainer: completions drawn and scored in units, on which a negative term stands."""

    _joint_draw: JointDraw | None = None  # while the policy's samples and others are drawn in one call

    # Sampling

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any):
        joint = self._joint_draw
        if joint is not None and not joint.is_drawn:
            rows, others = joint.widened(prompt_ids)
            drawn = super()._generate_single_turn(rows, *args, drawn_by=(others, joint.sampler), **kwargs)
            return joint.split(rows, drawn)
        if joint is not None and (kept := joint.take(prompt_ids)) is not None:
            return kept
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _draw(self, inputs: list[dict[str, Any]]) -> Samples:
        """Draws one completion a row, scores it, and logs rewards."""
        mode = "train" if self.model.training else "eval"
        device = self.accelerator.device
        check_rows(inputs, self.train_dataset.features)
        prompts = [row["prompt"] for row in inputs]
        prompt_ids, completion_ids, tool_mask, completions, log_probs, *_ = self._generate(prompts)
        engine_log_p = self.vllm_generation.log_probs if self.use_vllm else []  # a reward function may draw too
        if tool_mask is not None and self.use_vllm:
            engine_log_p = log_probs  # of all turns
        rewards_per_func = self._calculate_rewards(inputs, prompts, completions, completion_ids)
        rewards = self._weigh_rewards(rewards_per_func)

        def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
            ids = [torch.tensor(row, dtype=torch.long) for row in rows]
            both = []
            for each, value in ((ids, self._tokenizer.pad_token_id), ([torch.ones_like(row) for row in ids], 0)):
                x = pad(each, value, side, self.pad_to_multiple_of).to(device)
                if side == "right" and self._unit_size(mode) == 1:  # tokens of one prompt meet over processes
                    x = self.accelerator.pad_across_processes(x, dim=1, pad_index=value)
                both.append(x)
            return both[0], both[1]

        samples = Samples(
            prompts,
            completions,
            *padded(prompt_ids, "left"),
            *padded(completion_ids, "right"),
            rewards[self._local_rows(len(inputs))],
            rewards_per_func,
        )
        if self.use_vllm:
            samples.engine_log_p = torch.full(samples.completion_mask.shape, torch.nan, device=device)
            for row, values in zip(samples.engine_log_p, engine_log_p, strict=True):
                row[: len(values)] = torch.tensor([torch.nan if value is None else value for value in values])
            self._metrics[mode]["sampling/weights_version"].append(self.vllm_generation.version)
        if self.mask_truncated_completions:
            ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]
            complete = torch.tensor([row[-1] in ends for row in completion_ids], device=device)
            samples.completion_mask = samples.completion_mask * complete.unsqueeze(1)
        samples.completion_mask = samples.completion_mask * self._are_real(len(inputs)).unsqueeze(1)
        if tool_mask is not None:
            samples.attended = samples.completion_mask
            samples.completion_mask = samples.attended * padded(tool_mask, "right")[0]
        return samples

    def _acting(self, rows: list[dict[str, Any]]) -> contextlib.AbstractContextManager[list[dict[str, Any]]]:
        """Context in which [`_draw`] draws for a negative term, with the rows to give it."""
        return contextlib.nullcontext(rows)

    def _num_generations(self, mode: str) -> int:
        return self.num_generations if mode == "train" else self.num_generations_eval

    def _unit_size(self, mode: str) -> int:
        """n: all N completions of a prompt where each micro-batch of each process holds whole prompts, else 1."""
        n = self._num_generations(mode)
        return n if self._micro_batch_size() % n == 0 else 1

    def _local_rows(self, rows: int) -> slice:
        return slice(self.accelerator.process_index * rows, (self.accelerator.process_index + 1) * rows)

    def _to_prompts(self, units: torch.Tensor, generations: int) -> torch.Tensor:
        """(U, n, ...) of this process to (P, N, ...), over all processes where prompts are cut into units of one."""
        if units.size(1) == generations:
            return units
        rows = self.accelerator.gather(units.flatten(0, 1))
        return rows.view(-1, generations, *rows.shape[1:])

    def _to_units(self, prompts: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The inverse of [`_to_prompts`]: (P, N, ...) to this process's (U, n, ...), (U, n) being the shape of `like`."""
        if prompts.size(1) == like.size(1):
            return prompts
        local = prompts.flatten(0, 1)[self._local_rows(like.numel())]
        return local.view(*like.shape, *prompts.shape[2:])

    # Scoring

    def _score(
        self,
        model: torch.nn.Module,
        batch: dict[str, torch.Tensor],
        names: tuple[str, ...] = ("completion",),
        gradient: bool = True,
        by_sampler: tuple[Sampler, dict[str, torch.Tensor]] | None = None,
        needed: dict[str, torch.Tensor] | None = None,
    ) -> SetScores:
        """
        Per-token log-probabilities of sets of completions to the same prompts, in one forward pass.

        Args:
            model (`torch.nn.Module`): Model to score with.
            batch (`dict[str, torch.Tensor]`): `prompt_ids` and `prompt_mask` of shape `(U, L)`; for each name, `{name}_ids` and
                `{name}_mask` of shape `(U, n, T)`, where n and T may differ from name to name, and what else a set may have (above).
            names (`tuple[str, ...]`): Sets of completions to score.
            gradient (`bool`): Whether the pass carries gradient. Without, there are several, as for micro-batches of their own.
            by_sampler (`tuple[Sampler, dict[str, torch.Tensor]]`, *optional*): Another sampler by which to have log-probabilities as
                well, and for each name a mask `(U, n)` of the completions to have them of; they are 0 of others.
            needed (`dict[str, torch.Tensor]`, *optional*): For a name, a mask `(U, n)` of the completions that are needed; those of
                other names are. Others are not read, but for one where nothing is needed, and their scores are 0.
        """
        pad_token_id = self._tokenizer.pad_token_id
        sampler, wanted = by_sampler or (None, None)
        sets = CompletionSets.of(batch, names, pad_token_id, needed or {}, wanted)
        prompts = [self._prompts_of(batch, names, *kind) for kind in (("ids", pad_token_id), ("mask", 0))]
        length, shared = prompts[0].size(1), len(prompts[0]) == len(sets.ids)  # or a prompt for each completion
        # Of a micro-batch, with what is drawn beside the policy's samples
        size = self._micro_batch_size() * sets.completions // min(n for n, _ in sets.shapes)
        if not self._whole("train" if self.model.training else "eval"):
            units = prompts if shared else None
            joint = self._neighbours(units, sets.width, sets.completions, None if gradient else size)
            if joint > 1:
                prompts = [x[::joint] for x in prompts]
                sets.join(joint)
        layout = Layout(length, sets.width, 1)
        if shared and not needed:
            layout = self._layout(length, sets.width, sets.completions)
        elif shared:
            layout, slots = self._layout_for(length, sets.width, sets.read)
            sets.keep_needed(slots)
        rows = sets.rows(layout, prompts)
        reader = self._reader(model, layout, bool(needed), sampler, gradient)
        if gradient:
            log_p, entropy, aux_loss, other_log_p = self._by_length(reader, *rows)
        else:
            with torch.no_grad(), disable_gradient_checkpointing(model, self.args.gradient_checkpointing_kwargs):
                log_p, _, _, other_log_p = self._in_passes(reader, layout, len(sets.ids), size, *rows)
            entropy = aux_loss = None
        others = {}
        if other_log_p is not None:
            others = {f"{name}_by_sampler": x for name, x in zip(names, sets.split(other_log_p), strict=True)}
        return SetScores(sets.split(log_p), None if entropy is None else sets.split(entropy)[0], aux_loss, others)

    def _reader(
        self, model: torch.nn.Module, layout: Layout, leave_out: bool, sampler: Sampler | None, gradient: bool
    ) -> Callable[..., tuple[torch.Tensor | None, ...]]:
        """
        A function that scores what [`CompletionSets.rows`] returns, with one pass of the model. With `leave_out`, it skips completions
        that are not needed if each has a row of its own.
        """
        aux_loss = gradient and self.aux_loss_enabled

        def log_probs(ids: torch.Tensor, mask: torch.Tensor, *asked: torch.Tensor) -> Scores:
            cut = replace(layout, prompt=ids.size(1) - layout.count * layout.width)
            if sampler is not None and self._guard.fused_head:
                other = sampler, asked[0].flatten()
                return token_log_probs(model, self.accelerator, ids, mask, cut, aux_loss, *other)
            scores = token_log_probs(model, self.accelerator, ids, mask, cut, aux_loss)
            if sampler is None:
                return scores
            return scores._replace(by_sampler=sampler_log_probs(model, self.accelerator, ids, mask, cut, sampler))

        def of_rows(ids: torch.Tensor, mask: torch.Tensor, needed: torch.Tensor, *asked: torch.Tensor) -> tuple:
            if not leave_out or layout.count > 1:
                return log_probs(ids, mask, *asked)
            return needed_rows(log_probs, needed.squeeze(1), ids, mask, *asked)

        return of_rows

    def _prompts_of(
        self, batch: dict[str, torch.Tensor], names: tuple[str, ...], kind: str, value: int
    ) -> torch.Tensor:
        """`ids` or `mask` of the prompts of sets: (U, L), or where a set has its own, one for each completion, (U·Σn, L)."""
        shared = batch[f"prompt_{kind}"]
        if not any(f"{name}_prompt_{kind}" in batch for name in names):
            return shared
        sizes = [batch[f"{name}_ids"].size(1) for name in names]
        parts = [
            batch.get(f"{name}_prompt_{kind}", shared.unsqueeze(1).expand(-1, n, -1))
            for name, n in zip(names, sizes, strict=True)
        ]
        length = max(part.size(2) for part in parts)
        parts = [F.pad(part, (length - part.size(2), 0), value=value) for part in parts]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def _reference_log_prob(self, batch: dict[str, torch.Tensor], name: str = "completion") -> torch.Tensor:
        """Log-probability of each completion under the reference model, shape (U, n), nats."""
        if self.ref_model is not None:
            (log_ref,) = self._score(self.ref_model, batch, (name,), gradient=False).log_p
        else:  # an adapter over the reference, or beside a frozen copy of itself
            model = self.accelerator.unwrap_model(self.model)
            with use_reference(model):
                (log_ref,) = self._score(self.model, batch, (name,), gradient=False).log_p
        return sequence_log_prob(log_ref, batch[f"{name}_mask"])

    # Loss

    @property
    def _on_policy(self) -> bool:
        """Whether every update is made with generations of the current policy: no ratio, no second pass."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) == 0

    def _whole(self, mode: str) -> bool:
        """Whether a unit holds all of the policy's samples of its prompt."""
        return self._unit_size(mode) == self._num_generations(mode)

    def _weighs_early(self, mode: str) -> bool:
        """Whether weights are made as samples are drawn, and not from the pass that carries the gradient."""
        return (mode == "train" and not self._on_policy) or not self._whole(mode)

    def _policy_loss(
        self,
        log_p: torch.Tensor,
        mask: torch.Tensor,
        coefficients: torch.Tensor,
        old_log_p: torch.Tensor | None,
    ) -> torch.Tensor:
        """Σ −c·ℓ over samples (U, n, T), a mean over them; clipped against `old_log_p` where that is given."""
        return policy_gradient_loss(
            log_p,
            mask,
            coefficients,
            reduction=self.args.logprob_reduction,
            old_log_p=old_log_p,
            epsilon_low=self.epsilon_low,
            epsilon_high=self.epsilon_high,
        )


class Scorer:
    """
    Draws, scores and logs for a negative term: all that such a term may ask of its trainer, beyond what every TRL trainer has
    (`args`, `model`, `accelerator`, `state`). All processes call each method.
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
        Logs diagnostics of importance weights, with names that begin with `prefix`. `log_w` and `scored`, (P, N), are log-weights, −inf for
        samples without a reward, and which samples have one.
        """
        known = scored.any(dim=1)  # (P,)
        self.log_statistics({f"{prefix}/ess": mean, f"{prefix}/ess_min": lowest}, effective_sample_size(log_w)[known])
        self.log(f"{prefix}/max_weight", max_weight_share(log_w)[known])
        log_z = log_z_estimate(log_w, scored)
        self.log(f"{prefix}/log_z", torch.where(log_z.isinf(), torch.nan, log_z))

    def log_engine(self, batch: dict[str, torch.Tensor], name: str, log_p: torch.Tensor) -> None:
        """Logs how far the engine's log-probabilities of a set are from those of what drew it, where an engine drew."""
        self.trainer._log_engine(batch, name, log_p, f"{PROPOSAL_FOLDER}/")
