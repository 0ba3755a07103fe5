"""Batches as rows that a model reads: how many completions share a row, and how many rows a pass takes."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..generation._batches import without_padding
from ..generation._probe import Guard
from ..models._deepspeed import zero_stage
from ..models._layout import Layout
from .scoring import in_chunks
from .trl_bridge import split_tensor_dict


class RowLayouts:
    """
    Mixin before [`~trl.GRPOTrainer`]: completions laid out in rows, as [`~trl_repulse.generation._probe.Guard`] allows.
    """

    _guard = Guard()  # what keeps sampling and scoring right for all models

    def _whole(self, mode: str) -> bool:
        """Whether a unit holds all of the policy's samples of its prompt."""
        return False

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """As TRL's; the rows of each update are sorted by prompt, or those of each micro-batch where that is what a loss is made of."""
        before, args = self._buffered_inputs, self.args
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before or not self._guard.share_prompts or self._whole("train"):
            return inputs
        # Of these losses, each micro-batch has a mean or a quantile of its own
        alone = args.loss_type == "bnpo" or args.top_entropy_quantile < 1
        alone = alone or self._entropy_bonus_enabled or self.aux_loss_enabled
        size = 1 if alone else math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        groups = [self._buffered_inputs[i : i + size] for i in range(0, args.steps_per_generation, size)]
        self._buffered_inputs = [batch for group in groups for batch in by_prompt(group)]
        return self._buffered_inputs[self._step % args.steps_per_generation]

    def _micro_batch_size(self) -> int:
        return self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size

    def _layout(self, prompt: int, width: int, completions: int) -> Layout:
        """How `completions` of `width` tokens to each prompt of `prompt` tokens are laid out in rows."""
        if not self._guard.share_prompts:
            return Layout(prompt, width, 1)
        return Layout.cheapest(prompt, width, completions, self._hidden_size, self._guard.longest_row)

    @property
    def _hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    def _layout_for(self, prompt: int, width: int, needed: torch.Tensor) -> tuple[Layout, int]:
        """
        The cheapest layout for the completions that are `needed`, a mask (U, n), and for how many completions of a unit it has room:
        as many as the most that a unit needs, or some more if these fill rows. All n where prompts are not shared.
        """
        most = needed.size(1)
        if not self._guard.share_prompts:
            return Layout(prompt, width, 1), most
        largest, average = torch.stack([needed.sum(dim=1).max(), needed.sum(dim=1).float().mean()]).tolist()
        size, longest = self._hidden_size, self._guard.longest_row

        def cost(found: tuple[Layout, int]) -> float:
            layout, slots = found
            return layout.cost(slots if layout.count > 1 else average, size)  # separate rows can be left out

        slots = range(max(1, int(largest)), most + 1)
        return min(((Layout.cheapest(prompt, width, k, size, longest), k) for k in slots), key=cost)

    def _neighbours(
        self, prompts: Sequence[torch.Tensor] | None, width: int, completions: int, in_passes: int | None
    ) -> int:
        """
        How many neighbouring units are read as one, since they have the same prompt: a number that divides each run of such units.

        A collective call where processes share weights, unless all is read in one pass.

        Args:
            prompts (`Sequence[torch.Tensor]`, *optional*):
                Tokens of the units' prompts and their mask, `(U, L)` each; `None` where completions of a unit have prompts of their own.
            width (`int`):
                T, tokens of a completion.
            completions (`int`):
                Of a unit.
            in_passes (`int`, *optional*):
                The size of the micro-batch that limits passes, as in [`_in_passes`]; `None` where all is read in one.
        """
        if not self._guard.share_prompts:
            return 1
        run = most = 1
        if prompts is not None:
            new = torch.stack([(x[1:] != x[:-1]).any(dim=1) for x in prompts]).any(dim=0)
            starts = [0, *(new.nonzero()[:, 0] + 1).tolist(), len(new) + 1]
            run = most = math.gcd(*(end - start for start, end in itertools.pairwise(starts)))
            if in_passes is not None:
                length = prompts[0].size(1)
                room = (in_passes * (length + width) - length) // max(width, 1)
                most = max(1, min(room, 2 * in_passes) // completions)
        if in_passes is not None and self._passes_together:
            found = self.accelerator.gather(torch.tensor([[run, most]], device=self.accelerator.device)).tolist()
            run, most = math.gcd(*(x for x, _ in found)), min(x for _, x in found)
        return max(count for count in range(1, min(run, most) + 1) if run % count == 0)

    def _in_passes(
        self,
        score: Callable[..., tuple[torch.Tensor | None, ...]],
        layout: Layout,
        units: int,
        size: int,
        *rows: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """
        What `score` makes of rows (R, ...) without gradient, in several passes. Where prompts are shared, each takes no more tokens than a
        micro-batch of `size` has in rows of single completions, and no more than twice its completions, which go onto the vocabulary; or
        one row. A collective call where processes share weights and so make the same number of passes: no more than they have `units`.
        """
        at_once = size
        if self._guard.share_prompts:
            tokens, row = size * (layout.prompt + layout.width), layout.prompt + layout.count * layout.width
            at_once = max(1, min(tokens // row, 2 * size // layout.count))
        passes = math.ceil(len(rows[0]) / at_once)
        if self._guard.share_prompts and self._passes_together:
            passes = torch.tensor([passes], device=self.accelerator.device)
            passes = min(int(self.accelerator.gather(passes).max()), units)
        return in_chunks(functools.partial(self._by_length, score), passes, *rows)

    @property
    def _passes_together(self) -> bool:
        """Whether processes share weights, so that all make the same passes."""
        return self.is_fsdp_enabled or zero_stage(self.accelerator) == 3

    def _in_rows(
        self,
        score: Callable[[torch.Tensor, torch.Tensor, Layout], tuple[torch.Tensor | None, ...]],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
        size: int | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """
        What `score` makes of completions (B, T) at the end of rows (B, L + T), of which neighbours may have the same prompt: in one pass,
        or in several as for micro-batches of `size`.
        """
        length = input_ids.size(1) - width
        prompts = [x[:, :length] for x in (input_ids, attention_mask)]
        n = self._neighbours(prompts, width, 1, size)
        layout = self._layout(length, width, n)
        completions = [x[:, length:].reshape(-1, n, width) for x in (input_ids, attention_mask)]
        rows = [layout.rows(x[::n], y) for x, y in zip(prompts, completions, strict=True)]

        def of_rows(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return score(ids, mask, replace(layout, prompt=ids.size(1) - layout.count * width))

        if size is None:
            return self._by_length(of_rows, *rows)
        return self._in_passes(of_rows, layout, len(input_ids) // n, size, *rows)

    def _by_length(
        self,
        score: Callable[..., tuple[torch.Tensor | None, ...]],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        *more: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """
        What `score` makes of rows (B, L + T), their mask and whatever else there is of each row: all at once, or by prompt length
        if a model reads padding.
        """
        if not self._guard.score_by_length:
            return score(input_ids, attention_mask, *more)
        if self.accelerator.num_processes > 1 and len(attention_mask.argmax(dim=1).unique()) > 1:
            raise ValueError(
                "Prompts of different lengths are scored in passes of their own, since the model reads padding, and several "
                "processes cannot make different numbers of passes; use prompts of one length, or one process."
            )
        return without_padding(score, input_ids, attention_mask, *more)


def by_prompt(batches: list[dict[str, torch.Tensor | None]]) -> list[dict[str, torch.Tensor | None]]:
    """The rows of micro-batches, those of a prompt next to each other, in as many micro-batches; what has no rows stays."""
    in_rows = [name for name, x in batches[0].items() if x is not None and x.dim() > 0]
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in in_rows}
    prompts = torch.stack([rows["prompt_ids"], rows["prompt_mask"]], dim=2)
    order = prompts.unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    return split_tensor_dict(batches[0] | {name: x[order] for name, x in rows.items()}, len(batches))
