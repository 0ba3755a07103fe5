"""Signs that a proposal no longer draws what it is trained for: the policy's own low-reward outputs.

Axis letters: U units of n policy samples and m proposal samples, P prompts, N policy samples and K proposal samples of a
prompt, T completion tokens.
"""

from collections import deque

import torch
from accelerate.logging import get_logger

from ..importance import distinct_share, log_z_estimate, rank_among, sequence_log_prob
from ._metrics import mean
from ._negative_term import NegativeTerm


logger = get_logger(__name__)

BATCHES = 20  # that a warning looks back on
LARGEST_GAP = 3.0  # nats, mean over these batches


class CollapseWatch:
    """
    Logs how a proposal's samples compare with the policy's, and warns once if they are the worse ones.

    The effective sample size cannot tell: where all samples of a prompt are the same, or all as improbable under the policy,
    their weights are equal and it is as large as can be. But the policy's own samples bound log Z from below as well, and a
    proposal whose samples put it lower than that finds less of the target than no proposal at all.

    Args:
        part ([`NegativeTerm`]):
            What draws the samples.
    """

    def __init__(self, part: NegativeTerm):
        self._part = part
        self._gaps: deque[float] = deque(maxlen=BATCHES)
        self._warned = False

    def look(
        self, batch: dict[str, torch.Tensor], log_w: torch.Tensor, log_p: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """
        Logs `distinct`, `log_z_gap` and `log_p_rank`. A collective call.

        Args:
            batch (`dict[str, torch.Tensor]`):
                Units with `rewards` of shape `(U, n)`, `proposal_rewards` of shape `(U, m)`, `proposal_completion_ids` of shape
                `(U, m, T)`, and `old_log_p`, the policy's log-probabilities (nats) of its own samples, of shape `(U, n, T)` with
                their `completion_mask`.
            log_w (`torch.Tensor` of shape `(P, K)`):
                Log-weights of the proposal's samples, −inf for those without a reward.
            log_p, mask (`torch.Tensor` of shape `(P, K, T)`):
                Log-probabilities (nats) of the proposal's samples under the policy, and their mask.
        """
        trainer = self._part.trainer
        mode = "train" if trainer.model.training else "eval"
        size, proposals = trainer._num_generations(mode), self._part.size(mode)
        scored = ~trainer._to_prompts(batch["proposal_rewards"], proposals).isnan()  # (P, K)
        known = scored.any(dim=1)  # (P,); other prompts may only fill up a batch
        distinct = distinct_share(trainer._to_prompts(batch["proposal_completion_ids"], proposals), mask)
        distinct = trainer._gathered_moments(distinct[known])
        trainer._record({"proposal/distinct": mean}, distinct)

        log_potential = trainer._to_prompts(self._part.log_potential(batch["rewards"]), size)  # (P, N)
        bound = torch.where(log_potential.isnan(), -torch.inf, log_potential)
        gap = log_z_estimate(bound, ~log_potential.isnan()) - log_z_estimate(log_w, scored)
        gap = trainer._gathered_moments(torch.where(gap.isinf(), torch.nan, gap))
        trainer._record({"proposal/log_z_gap": mean}, gap)

        others = trainer._to_prompts(sequence_log_prob(batch["old_log_p"], batch["completion_mask"]), size)
        trainer._log_mean("proposal/log_p_rank", rank_among(sequence_log_prob(log_p, mask), others)[known])
        if mode == "train" and gap.count:
            self._warn(gap.mean, distinct.mean * proposals)

    def _warn(self, gap: float, distinct: float) -> None:
        self._gaps.append(gap)
        average = sum(self._gaps) / len(self._gaps)
        if self._warned or len(self._gaps) < BATCHES or average <= LARGEST_GAP:
            return
        self._warned = True
        logger.warning(
            "The proposal does not draw the policy's bad outputs: over the last %d batches its samples put log Z %.1f nats lower "
            "than the policy's own samples do (`proposal/log_z_gap`), and in the last one %.1f of a prompt's samples were "
            "distinct. `proposal/ess` does not show this. Lower `proposal_learning_rate`, make `target_dist_beta` less "
            "negative, or go back to a checkpoint from before.",
            BATCHES,
            average,
            distinct,
        )
