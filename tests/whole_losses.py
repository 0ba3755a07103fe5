"""Losses on whole groups, each in one call, as the paper and the golden values have them. Trainers make coefficients first."""

from trl_repulse.math.objective import (
    WeightedSamples,
    compute_advantages,
    kl_token_rewards,
    negative_coefficients,
    negative_reinforce_coefficients,
    policy_gradient_loss,
    repulse_loss,
)
from trl_repulse.math.proposal_losses import ctl_coefficients, log_ratio_loss


def reinforce_loss(log_p, mask, returns, baseline="leave_one_out", constant=0.0, reduction="mean"):
    """The mean over P·N of −A·ℓ, the first term of Eq. 4."""
    return policy_gradient_loss(log_p, mask, compute_advantages(returns, baseline, constant), reduction)


def negative_loss(log_p, mask, normalized_w, alpha_normalization="samples", reduction="mean"):
    """The second term of Eq. 4 without its α: w·ℓ of proposal samples."""
    return policy_gradient_loss(log_p, mask, negative_coefficients(normalized_w, 1.0, alpha_normalization), reduction)


def eq_4(
    log_p, mask, returns, log_p_neg, mask_neg, normalized_w, alpha, alpha_normalization="samples", reduction="mean"
):
    """[`repulse_loss`] from returns and weights."""
    own = WeightedSamples(log_p, mask, compute_advantages(returns))
    coefficients = negative_coefficients(normalized_w, alpha, alpha_normalization)
    return repulse_loss(own, WeightedSamples(log_p_neg, mask_neg, coefficients), reduction)


def negative_reinforce_loss(log_p, mask, normalized_w, returns, baseline="none"):
    """−w·(R − b)·ℓ of proposal samples, without α."""
    coefficients = negative_reinforce_coefficients(normalized_w, returns, 1.0, baseline)
    return policy_gradient_loss(log_p, mask, coefficients)


def ctl_loss(now, log_q, log_p, normalized_w, mask, second_term=True, parameterization="token", reduction="mean"):
    """Contrastive twist learning, Eq. 6."""
    coefficients = ctl_coefficients(now, log_q, log_p, normalized_w, mask, second_term, parameterization)
    return log_ratio_loss(now, log_p, coefficients, mask, parameterization, reduction)


def kl_penalized_returns(log_p, log_ref, reward, kl_coefficient, mask):
    """Reward less coefficient · Σ_t (log p − log p_0)."""
    return kl_token_rewards(log_p, log_ref, reward * 0, kl_coefficient, mask).sum(dim=-1) + reward
