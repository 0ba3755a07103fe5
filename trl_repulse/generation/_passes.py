"""
Passes over a few short texts: predictions, expected predictions, and the difference that rounding may make.

Axis letters: B rows, L tokens of a row, S sampled tokens, V vocabulary (or features of a hidden state).
"""

import math
from collections.abc import Callable

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from ..models._vocabulary import vocab_size
from ._cache import growing_cache, with_cache
from ._defaults import without_generation_defaults


PROMPTS = (3, 8, 6)  # tokens of each row's prompt
EQUAL = (8, 8, 8)
_WIDTH = 12  # width after padding; every prompt is padded
_SAMPLED = 6  # S
# Rounding depends on the shape of a batch. Correct passes differ by up to 3 times what one rounding of the embeddings changes,
# wrong ones by 13 times and more, in tiny models of all causal architectures of transformers (5.23), in float32 and bfloat16;
# correct ones with 2 to 48 layers by at most 1.2 times
ROUNDINGS = 8.0


class _Forced(LogitsProcessor):
    """Records the scores that `generate` samples from, and forces given tokens."""

    def __init__(self, tokens: torch.Tensor):
        self._tokens = tokens  # (B, S)
        self.logits: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self._tokens[:, len(self.logits), None]
        self.logits.append(scores.float())
        return torch.full_like(scores, -math.inf).scatter(1, token, 0.0)


class Passes:
    """Passes over a few rows of tokens. Methods return predictions (B, S, V) of S tokens after each prompt, and what
    they should be."""

    def __init__(self, model: nn.Module, read: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]):
        self._model, self._read = model, read
        size, device = vocab_size(model), next(model.parameters()).device
        count, length = len(EQUAL), max(EQUAL) + _SAMPLED
        # All different if the vocabulary allows; the first and last ids are often unused
        ids = torch.arange(count * length, device=device) * max(1, size // 97) + size // 3
        self._ids = (ids % size).view(count, length)  # (B, L)
        self._alone = self._one_by_one(self._ids)  # (B, L, V)
        self._tolerance = ROUNDINGS * rounding(model, lambda: self._one_by_one(self._ids), self._alone)

    def agree(self, passes: Callable[[], tuple[torch.Tensor, torch.Tensor]], share: float = 0.5) -> bool:
        """Whether at least this share of predictions is as expected; `False` if the pass fails."""
        # Single tokens exceed the tolerance of a median
        tolerance = self._tolerance if share == 0.5 else 4 * self._tolerance
        return holds(lambda: distance(*passes(), share) <= tolerance)

    def together(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows in one pass."""
        return self._read(self._ids, torch.ones_like(self._ids)), self._alone

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows in one pass, with padding before the prompts and after one completion."""
        ids, mask, tokens = self._behind_padding(PROMPTS)
        ids, mask = torch.cat([ids, tokens], dim=1), torch.cat([mask, torch.ones_like(tokens)], dim=1)
        mask[0, -1] = 0
        return self._read(ids, mask)[:, _WIDTH - 1 : -1], self._expected(PROMPTS)

    def generated(
        self, lengths: tuple[int, ...], config: GenerationConfig, use_cache: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows through `generate`, padded if their prompts are unequal."""
        return self._forced(*self._behind_padding(lengths), config, use_cache), self._expected(lengths)

    def _forced(
        self, ids: torch.Tensor, mask: torch.Tensor, tokens: torch.Tensor, config: GenerationConfig, use_cache: bool
    ) -> torch.Tensor:
        """Log-probabilities (B, S, V) from which `generate` samples `tokens` (B, S) after prompts (B, W)."""
        forced = _Forced(tokens)
        settings = GenerationConfig(
            max_new_tokens=_SAMPLED,
            do_sample=False,
            pad_token_id=0,
            use_cache=use_cache,
            cache_implementation=config.cache_implementation,
            disable_compile=True,
        )
        with without_generation_defaults(self._model) as config:
            config.eos_token_id = None  # nothing ends the rows
            self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=settings,
                logits_processor=LogitsProcessorList([forced]),
                synced_gpus=False,  # one process may probe alone
            )
        return torch.stack(forced.logits, dim=1).log_softmax(dim=-1)

    def repeated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Several completions of the first row's prompt, which is read once."""
        prompt, tokens = self._ids[:1, : EQUAL[0]], self._after(self._ids, EQUAL)
        ids = torch.cat([prompt.expand(len(tokens), -1), tokens], dim=1)
        alone = self._one_by_one(ids)
        cache = growing_cache(self._model)
        options = with_cache(self._model, cache)
        logits = [self._model(input_ids=prompt, **options).logits[:, -1].expand(len(tokens), -1)]
        cache.batch_repeat_interleave(len(tokens))
        for token in tokens[:, :-1].T:
            logits.append(self._model(input_ids=token[:, None], **options).logits[:, -1])
        found = torch.stack(logits, dim=1).float().log_softmax(dim=-1)
        return found, self._after(alone, [length - 1 for length in EQUAL])

    def in_rows(self, read_rows: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Completions of unequal prompts, those of a prompt in one row."""
        prompts, mask, completions, expected = self._completed()
        real = torch.ones_like(completions)
        real[0, 0, -1] = 0
        return read_rows(prompts, mask, completions, real), expected

    def repeatedly_generated(self, config: GenerationConfig) -> tuple[torch.Tensor, torch.Tensor]:
        """The same completions through `generate`."""
        prompts, mask, completions, expected = self._completed()
        rows = (x.repeat_interleave(completions.size(1), 0) for x in (prompts, mask))
        return self._forced(*rows, completions.flatten(0, 1), config, True), expected

    def _completed(self) -> tuple[torch.Tensor, ...]:
        """Left-padded prompts (B, W), their mask, n completions (B, n, S) and the expected predictions (B·n, S, V)."""
        prompts, mask, _ = self._behind_padding(PROMPTS)
        tokens = self._after(self._ids, EQUAL)  # (n, S)
        expected = []
        for ids, length in zip(self._ids, PROMPTS, strict=True):
            alone = self._one_by_one(torch.cat([ids[:length].expand(len(tokens), -1), tokens], dim=1))
            expected.append(self._after(alone, [length - 1] * len(tokens)))
        return prompts, mask, tokens.expand(len(prompts), -1, -1), torch.cat(expected)

    def _one_by_one(self, ids: torch.Tensor) -> torch.Tensor:
        """Predictions for each row on its own, without mask and positions."""
        return torch.cat([self._read(row[None], None) for row in ids])

    def _behind_padding(self, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Prompts (left-padded if unequal), their mask, and the S tokens after each."""
        width = _WIDTH if len(set(lengths)) > 1 else lengths[0]
        ids, mask = torch.full_like(self._ids[:, :1], 5).repeat(1, width), self._ids.new_zeros(len(lengths), width)
        for row, length in enumerate(lengths):
            ids[row, width - length :], mask[row, width - length :] = self._ids[row, :length], 1
        return ids, mask, self._after(self._ids, lengths)

    def _expected(self, lengths: tuple[int, ...]) -> torch.Tensor:
        return self._after(self._alone, [length - 1 for length in lengths])

    @staticmethod
    def _after(rows: torch.Tensor, starts) -> torch.Tensor:
        return torch.stack([row[start : start + _SAMPLED] for row, start in zip(rows, starts, strict=True)])


def holds(check: Callable[[], bool]) -> bool:
    """The result of a check; `False` if it fails with an error other than lack of memory."""
    try:
        return check()
    except Exception as error:  # models may fail in any way on masks and caches
        if should_reduce_batch_size(error):
            raise
        return False


def rounding(model: nn.Module, read: Callable[[], torch.Tensor], expected: torch.Tensor) -> float:
    """How far one rounding of the embeddings, or of the predictions, moves the predictions."""

    def rounded(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        sign = torch.arange(output.numel(), device=output.device).view_as(output) * 7 % 11 % 2 * 2 - 1
        return output * (1 + sign * _rounding(model, output)).to(output.dtype)

    handle = model.get_input_embeddings().register_forward_hook(rounded)
    try:
        moved = distance(read(), expected)
    finally:
        handle.remove()
    # Small weights hardly pass on a change of the embeddings
    return max(moved, distance(expected * (1 + torch.finfo(torch.float32).eps), expected))


def _rounding(model: nn.Module, values: torch.Tensor) -> float:
    """Relative rounding error of the model's numbers."""
    if getattr(model, "is_quantized", False):
        return 2**-7  # activations may have 8 bits, scaled over a batch
    if values.is_cuda and values.dtype == torch.float32:
        eps = 2**-10  # TF32, which convolutions use by default
    else:
        eps = torch.finfo(values.dtype).eps
        if values.dtype == torch.float64:
            eps = torch.finfo(torch.float32).eps  # parts of layers and the comparison use float32
    device = values.device.type
    if torch.is_autocast_enabled(device):
        eps = max(eps, torch.finfo(torch.get_autocast_dtype(device)).eps)
    return eps


def distance(found: torch.Tensor, expected: torch.Tensor, share: float = 0.5) -> float:
    """Root mean square over the vocabulary that a share of positions stays within; infinite if only `found` has
    NaN."""
    gap = found.clamp(min=-1e4) - expected.clamp(min=-1e4)  # -inf for excluded tokens
    gap = gap.masked_fill(found.isnan() & expected.isnan(), 0.0).nan_to_num(nan=math.inf)
    distances = gap.square().mean(dim=-1).sqrt()
    return (distances.median() if share == 0.5 else distances.flatten().quantile(share)).item()
