"""What a pilot draws from, and how often; checked before torch is imported."""

from collections.abc import Sequence


# Ways of drawing from the policy: temperature, and number of the first tokens that it is for (all)
OF_POLICY = ((1.3, None), (1.6, None), (2.0, None), (2.0, 1), (4.0, 1), (2.0, 3))
OF_REFERENCE = ((0.5, 1.0), (1.0, 1.0), (0.5, 1.3), (1.0, 1.6))  # share of the reference, and temperature
TILTED = 3  # components with raised tokens, as many as [`~trl_repulse.math.importance.TILTS`]
FIRST, SECOND = 1 / 16, 1 / 4  # shares of the pilots


def pilot_counts(num_samples: int, others: int) -> tuple[int, list[int]]:
    """Completions of each prompt from each of the first pilot's two components, and from each of the second's: as many of the policy, which
    is first, as of all `others` (their number) together. Raises a `ValueError` if both pilots take more than half of `num_samples`."""
    first, per_other = max(2, round(num_samples * FIRST / 2)), max(2, round(num_samples * SECOND / (2 * others)))
    if 2 * first + 2 * per_other * others > num_samples / 2:
        raise ValueError(
            f"`num_samples={num_samples}` is too low for a pilot of {others + 1} components; give at least {10 * others} completions a "
            "prompt, or draw without a pilot and `--reference` (`--num_proposal_samples`; 0 is plain sampling)."
        )
    return first, [per_other * others, *[per_other] * others]


def check_counts(counts: Sequence[int]) -> None:
    """Raises `ValueError` unless each component, the policy first, drew none or at least 2 completions, and one drew some."""
    if any(n < 0 or n == 1 for n in counts) or not sum(counts):
        raise ValueError(f"`counts={tuple(counts)}` must be 0 or at least 2 for each component, and not all 0.")
