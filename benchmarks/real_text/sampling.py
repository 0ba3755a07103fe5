"""
Samples of a policy by samplers with an exact density, and the densities of given completions.

Axis letters: N samples, T completion tokens, V vocabulary, S samplers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trl_repulse.generation.drawing import growing_cache, with_cache


@dataclass(frozen=True)
class Sampler:
    """
    A distribution of the next token.

    Args:
        name (`str`):
            For tables.
        log_probs (`Callable`):
            Log-probabilities (..., V) from logits (..., V) and the tokens' places in the completion, from 0, with shape (..., 1).
        model (`torch.nn.Module`, *optional*):
            Whose logits, where they are not the policy's.
    """

    name: str
    log_probs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    model: nn.Module | None = None


def at_temperature(temperature: float) -> Sampler:
    """The policy at a temperature."""
    return Sampler(f"temperature {temperature:g}", lambda logits, _: (logits / temperature).log_softmax(-1))


POLICY = at_temperature(1.0)


@torch.no_grad()
def sample(
    policy: nn.Module,
    prompts: list[list[int]],
    per_prompt: int,
    length: int,
    sampler: Sampler,
    seed: int,
    scored: Sequence[Sampler] = (),
    rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Completions of prompts, in their order, and the log-probabilities of each under the samplers of `scored`; `rows` are drawn at once.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Tokens (N, T) up to the first end token, padding behind it, with N = prompts ·
        `per_prompt`; log-probabilities (N, S), nats.
    """
    end, padding = policy.config.eos_token_id, policy.config.pad_token_id
    device = next(policy.parameters()).device
    rows = rows or (256 if device.type == "cpu" else 2048)
    generator = torch.Generator().manual_seed(seed)
    number = len(prompts) * per_prompt
    tokens = torch.full((number, length), padding)
    values = torch.zeros(number, len(scored), dtype=torch.double)
    for places in _of_one_length(prompts, per_prompt, rows):
        heads = torch.tensor([prompts[i // per_prompt] for i in places.tolist()], device=device)
        models = _Models(policy, [sampler, *scored])
        logits = models.read(heads)
        for step in range(length):
            place = torch.tensor([step], device=device)
            probs = sampler.log_probs(logits[sampler.model], place).exp()
            chosen = _choose(probs, generator)
            for column, other in enumerate(scored):
                log_probs = other.log_probs(logits[other.model], place)
                values[places, column] += log_probs.gather(1, chosen).squeeze(1).double().cpu()
            tokens[places, step] = chosen.squeeze(1).cpu()
            goes_on = chosen.squeeze(1) != end
            if step == length - 1 or not goes_on.any():
                break
            if not goes_on.all():
                places, chosen = places[goes_on.cpu()], chosen[goes_on]
                models.keep(torch.where(goes_on)[0])
            logits = models.read(chosen)
    return tokens, values


@torch.no_grad()
def densities(
    policy: nn.Module,
    prompts: list[list[int]],
    owners: torch.Tensor,
    tokens: torch.Tensor,
    samplers: Sequence[Sampler],
    rows: int | None = None,
) -> torch.Tensor:
    """Log-probabilities (N, S) of completions (N, T), of the prompts at `owners` (N,), under samplers: nats, the end token included."""
    device = next(policy.parameters()).device
    rows = rows or (64 if device.type == "cpu" else 512)
    ended = (tokens == policy.config.eos_token_id).long()
    counted = ended.cumsum(dim=1) - ended == 0  # up to the first end token
    values = torch.zeros(len(tokens), len(samplers), dtype=torch.double)
    for chosen in _of_one_length([prompts[i] for i in owners.tolist()], 1, rows):
        heads = torch.tensor([prompts[i] for i in owners[chosen].tolist()], device=device)
        part = tokens[chosen].to(device)
        logits = _Models(policy, samplers).read(torch.cat([heads, part[:, :-1]], dim=1), keep=part.size(1))
        places = torch.arange(part.size(1), device=device).unsqueeze(1)
        for column, sampler in enumerate(samplers):
            found = sampler.log_probs(logits[sampler.model], places).gather(2, part.unsqueeze(2)).squeeze(2)
            values[chosen, column] = found.double().cpu().masked_fill(~counted[chosen], 0).sum(dim=1)
    return values


class _Models:
    """The models of some samplers, and what they have read."""

    def __init__(self, policy: nn.Module, samplers: Sequence[Sampler]):
        self.models = {sampler.model: sampler.model or policy for sampler in samplers}
        self.caches = {key: growing_cache(model) for key, model in self.models.items()}

    def read(self, ids: torch.Tensor, keep: int = 0) -> dict[nn.Module | None, torch.Tensor]:
        """Logits behind the last of more tokens (N, T), shape (N, V), or behind each of the last `keep` ones, shape (N, `keep`, V)."""
        found = {}
        for key, model in self.models.items():
            cache = with_cache(model, self.caches[key])
            logits = model(input_ids=ids, logits_to_keep=max(keep, 1), **cache).logits.float()
            found[key] = logits if keep else logits[:, -1]
        return found

    def keep(self, rows: torch.Tensor) -> None:
        for cache in self.caches.values():
            cache.batch_select_indices(rows)


def _of_one_length(prompts: list[list[int]], per_prompt: int, rows: int) -> Iterator[torch.Tensor]:
    """Places of samples, at most `rows` at once, whose prompts are equally long."""
    lengths = torch.tensor([len(prompt) for prompt in prompts]).repeat_interleave(per_prompt)
    for length in lengths.unique():
        yield from torch.where(lengths == length)[0].split(rows)


def _choose(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A token (N, 1) of each row of probabilities (N, V); sums in double precision, since the tail of the vocabulary counts."""
    sums = probs.double().cumsum(dim=1)
    u = torch.rand(len(probs), 1, generator=generator, dtype=torch.double).to(sums) * sums[:, -1:]
    return torch.searchsorted(sums, u, right=True).clamp(max=probs.size(1) - 1)
