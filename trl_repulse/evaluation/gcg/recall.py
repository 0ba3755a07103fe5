"""
What the losses of single swaps tell about swaps that were not tried, and the candidates that follow from it.

Axis letters: S tokens of the suffix, B candidates, V vocabulary.
"""

import torch


class SwapMemory:
    """
    Remembers what every token tried did to the loss at its position, and guesses what the others would do.

    The guess is a sum: what a position costs on average, and what a token was better or worse than that at the positions
    where it was tried, shrunk towards nothing (as if it had been average at one more). Effects of swaps at different
    positions are taken to add up. It is a guess only: what it proposes is scored like any other candidate.

    Args:
        ids (`torch.Tensor` of shape `(S,)`):
            The first suffix; effects are counted from it.
        allowed (`torch.Tensor` of shape `(V,)`):
            `True` for tokens that may be proposed.
    """

    def __init__(self, ids: torch.Tensor, allowed: torch.Tensor):
        self._places = torch.arange(len(ids))
        self._effects = torch.zeros(len(ids), len(allowed))  # (S, V), in nats
        self._tried = torch.zeros_like(self._effects, dtype=torch.bool)
        self._tried[self._places, ids] = True
        self._proposed = ~allowed.cpu().repeat(len(ids), 1)  # or never to be
        self._visited: set[tuple[int, ...]] = set()

    def visit(self, ids: torch.Tensor) -> None:
        """
        Takes note of a suffix that the search has moved to.

        Args:
            ids (`torch.Tensor` of shape `(S,)`):
                The suffix.
        """
        self._visited.add(tuple(ids.tolist()))

    def unvisited(self, candidates: torch.Tensor) -> torch.Tensor:
        """
        Those of several suffixes that the search has not been at, so that it does not go in circles.

        Args:
            candidates (`torch.Tensor` of shape `(B, S)`):
                Suffixes.

        Returns:
            `torch.Tensor` of shape `(B', S)`
        """
        return candidates[[tuple(row) not in self._visited for row in candidates.tolist()]]

    def record(self, ids: torch.Tensor, loss: float, candidates: torch.Tensor, losses: torch.Tensor) -> None:
        """
        Takes in the losses of candidates. Those that change no token, or several, are left out.

        Args:
            ids (`torch.Tensor` of shape `(S,)`):
                The suffix that they were made from.
            loss (`float`):
                Its loss.
            candidates (`torch.Tensor` of shape `(B, S)`):
                Candidates.
            losses (`torch.Tensor` of shape `(B,)`):
                Their losses.
        """
        changed = candidates != ids
        single = changed.sum(dim=1) == 1
        rows, places = changed[single].nonzero(as_tuple=True)
        tokens = candidates[single][rows, places]
        current = self._guess()[self._places, ids]  # (S,)
        self._effects[places, tokens] = losses[single] - loss + current[places]
        self._tried[places, tokens] = True

    def propose(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        """
        The swaps that promise most, of those that were neither tried nor proposed before.

        Args:
            ids (`torch.Tensor` of shape `(S,)`):
                The suffix to change.
            count (`int`):
                B, at most.

        Returns:
            `torch.Tensor` of shape `(B, S)`: candidates with one token changed each; none before anything is recorded.
        """
        if self._tried.sum() == len(ids):
            return ids.new_empty((0, len(ids)))
        guess = self._guess()
        gain = guess[self._places, ids][:, None] - guess  # (S, V)
        gain[self._tried | self._proposed] = -torch.inf
        best = gain.flatten().topk(min(count, int(gain.isfinite().sum()))).indices
        places, tokens = best // gain.shape[1], best % gain.shape[1]
        self._proposed[places, tokens] = True  # some do not survive the round trip and are never tried
        return ids.repeat(len(best), 1).scatter_(1, places[:, None], tokens[:, None])

    def _guess(self) -> torch.Tensor:
        """Effect of each token at each position, (S, V): what was measured, or what is guessed."""
        of_place = self._effects.sum(dim=1, keepdim=True) / self._tried.sum(dim=1, keepdim=True)
        rest = (self._effects - of_place).where(self._tried, 0)
        of_token = rest.sum(dim=0) / (self._tried.sum(dim=0) + 1)
        return torch.where(self._tried, self._effects, of_place + of_token)
