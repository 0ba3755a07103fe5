"""Trainers whose completions share rows and caches with their prompt, against trainers that read it with each of them; the rows themselves."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig

from benchmarks.architectures import build
from trl_repulse import PPOTrainer, ReinforceTrainer, RePULSeGRPOTrainer, RePULSePPOTrainer, RePULSeTrainer
from trl_repulse.engine import preparation as _set_up
from trl_repulse.engine.scoring import CompletionSets, Layout, Scoring, sorted_by_prompt
from trl_repulse.engine.units import OWN, CompletionSet, Units
from trl_repulse.generation.drawing import prompts_read_once
from trl_repulse.trainers import base_trainer

from ..conftest import USE_CPU, assert_same_logs, build_tokenizer
from ..distributed_support import with_fp16_on_cpu
from .test_layout import scored


UNEVEN = Dataset.from_dict({"prompt": ["the", "the cat", "the cat sat the dog", "a dog ate the fish the cat"]})
MODES = {
    "plain": {},
    "reference": {"beta": 0.1},
    "more proposals": {"num_proposal_generations": 8},
    "reused": {"num_iterations": 2, "max_steps": 4, "epsilon": 0.2},
    "in two micro-batches": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
    "cut apart": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
    "checkpointing": {"gradient_checkpointing": True},
    "dpg": {"proposal_loss": "dpg"},
    "sixo": {"proposal_loss": "sixo"},
    "vargrad": {"proposal_loss": "vargrad"},
    "after": {"proposal_update_order": "after"},
    "hot": {
        "proposal": "hot_policy",
        "proposal_temperature": 1.7,
        "bad_reward_threshold": 0.0,
        "potential": "indicator",
    },
    "own": {"proposal": "policy"},
    "adapters": {"beta": 0.1, "peft_config": LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")},
    "eager": {"model_init_kwargs": {"attn_implementation": "eager"}},
    "REINFORCE": {"trainer_cls": ReinforceTrainer, "beta": 0.1},
}
for _cls in (RePULSePPOTrainer, RePULSeGRPOTrainer):
    _settings = {"trainer_cls": _cls, "beta": 0.1, "steps_per_generation": 1}
    MODES |= {f"{_cls.__name__}, learned": _settings, f"{_cls.__name__}, hot": MODES["hot"] | _settings}


def assert_the_same(together, apart, logs=True):
    """Parameters of all models, and metrics."""
    assert together._guard.share_prompts and not apart._guard.share_prompts
    models = [
        [t.model, *(x.module for x in (getattr(t, "proposal", None), getattr(t, "value", None)) if x is not None)]
        for t in (together, apart)
    ]
    for one, other in zip(*models, strict=True):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5)
    if logs:
        assert_same_logs(together, apart)


def train(make, model, share, **kwargs):
    kwargs = copy.deepcopy(kwargs)  # PEFT writes into its configurations
    extra = {name: kwargs.pop(name) for name in ("peft_config", "processing_class") if name in kwargs}
    settings = {"max_completion_length": 4, "max_steps": 3, "optim": "sgd", "learning_rate": 0.3} | kwargs
    trainer = make(model=model, dataset=UNEVEN, extra=extra, share_prompts=share, **settings)
    trainer.train()
    return trainer


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize(
    ("architecture", "mode"),
    [*(("llama", mode) for mode in MODES), *(("gpt2", mode) for mode in ("plain", "reference", "hot", "adapters"))],
)
def test_training_is_the_same(make, architecture, mode):
    assert_the_same(*(train(make, architecture, share, **MODES[mode]) for share in (True, False)))


@pytest.mark.trainer
def test_a_head_that_is_padded(make, tokenizer):
    """More tokens in the model than in the tokenizer."""
    runs = []
    for share in (True, False):
        runs.append(train(make, build("llama", len(tokenizer) + 7), share, processing_class=tokenizer))
    assert_the_same(*runs)


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize("mode", ["plain", "hot", "PPO"])
def test_compiled_models_share_rows(make, request, mode):
    """Policy and reference, which TRL compiles before we see it, agree; all end as models that are not compiled."""
    request.addfinalizer(torch.compiler.reset)
    compile = {"torch_compile": True, "torch_compile_backend": "eager"} | ({} if USE_CPU else {"tf32": False})
    settings = ({"trainer_cls": PPOTrainer} if mode == "PPO" else MODES[mode]) | {"beta": 0.1, "max_steps": 2}
    compiled, plain = (train(make, "llama", share, **settings, **how) for share, how in ((True, compile), (False, {})))
    assert compiled._guard.repeat_cache and compiled.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert_the_same(compiled, plain, logs=False)


@pytest.mark.trainer
def test_draws_are_the_same(make, architecture):
    """To the token, of the policy and of the proposal: a prompt's cache, repeated, and prompts read with each completion."""
    drawn = {}
    for share in (True, False):
        sizes = {"max_completion_length": 6, "num_generations": 50, "per_device_train_batch_size": 200}
        trainer = make(model=architecture, dataset=UNEVEN, share_prompts=share, **sizes)
        assert trainer._guard.repeat_cache is share
        lengths = []
        hook = trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs, seen=lengths: seen.append(kwargs["input_ids"].shape), with_kwargs=True
        )
        trainer.model.train()
        torch.manual_seed(0)
        batch = trainer._generate_and_score_completions([row for row in UNEVEN for _ in range(50)])
        hook.remove()
        assert ((4, 6) in lengths) is share and ((200, 7) in lengths) is not share
        drawn[share] = [batch["completion_ids"], batch["proposal_completion_ids"]]
    assert all(torch.equal(one, other) for one, other in zip(drawn[True], drawn[False], strict=True))
    assert len(drawn[True][0].flatten(0, 1).unique(dim=0)) > 100


@pytest.mark.trainer
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(make, precision, monkeypatch):
    """Under autocast to half precision both differ from float32 alike."""
    monkeypatch.setattr(Accelerator, "__init__", with_fp16_on_cpu)
    settings = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_completion_length": 4}
    runs = {}
    for share, half in ((True, True), (False, True), (False, False)):
        trainer = make(model="llama", dataset=UNEVEN, share_prompts=share, **settings, **{precision: half})
        torch.manual_seed(0)
        prompts = torch.tensor([[0, 0, 3, 4], [3, 4, 5, 6]])
        sample = {
            "prompt_ids": prompts,
            "prompt_mask": (prompts != 0).long(),
            "completion_ids": torch.randint(3, 19, (2, 4, 4)),
            "completion_mask": torch.ones(2, 4, 4, dtype=torch.long),
            "rewards": torch.zeros(2, 4),
        }
        units = Units.of({name: x.to(trainer.accelerator.device) for name, x in sample.items()})
        runs[share, half] = trainer._scoring.score(trainer.model, units, trainer.shape, gradient=False).log_p[OWN]
    exact = runs[False, False]
    errors = [(runs[share, True] - exact).abs().mean().item() for share in (True, False)]
    assert 0 < errors[0] < 2 * errors[1] and (runs[True, True] - exact).abs().max() < 0.2


@pytest.mark.thorough
@pytest.mark.trainer
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bloom", "takes no positions"),
        ("mamba", "takes no positions"),
        ("falcon_h1", "not read as each would be"),
        ("moshi", "not read as each would be"),
    ],
)
def test_models_that_cannot(make, name, why, monkeypatch):
    tokenizer = build_tokenizer()
    tokenizer.bos_token = "<unk>"
    model = build(name, len(tokenizer))

    def trainer(share):
        return make(RePULSeTrainer, model=model, extra={"processing_class": tokenizer}, share_prompts=share)

    said = []
    monkeypatch.setattr(_set_up.logger, "warning_once", said.append)
    assert not trainer("auto")._guard.share_prompts
    said = [text for text in said if "cannot read a prompt once" in text]
    for role, text in zip(("policy", "proposal"), said, strict=True):
        assert f"the {role}, " in text and why in text
    with pytest.raises(ValueError, match=f"cannot read a prompt once.*{why}.*`share_prompts=False`"):
        trainer(True)
    trainer(False).train()


def test_beams_are_read_with_their_prompts(make):
    trainer = make(ReinforceTrainer, generation_kwargs={"num_beams": 2}, max_steps=1)
    assert trainer._guard.share_prompts and not trainer._guard.repeat_cache
    trainer.train()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_noise_does_not_hide_what_a_model_reads(make, dropout, tokenizer):
    """With dropout on, two passes in training mode differ by more than a wrong mask makes."""
    model = build("gpt_neo", len(tokenizer))  # with a window inside its layers, shorter than the texts of the check
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    extra = {"processing_class": tokenizer}
    assert not make(ReinforceTrainer, model=model, extra=extra, disable_dropout=dropout == 0.0)._guard.share_prompts


def test_generate_is_put_back(architecture):
    model = scored("llama")
    with prompts_read_once(model), prompts_read_once(model):
        pass
    assert "generate" not in vars(model)
    model.generate = own = lambda *args, **kwargs: None
    with prompts_read_once(model):
        assert model.generate is not own
    assert model.generate is own


# Rows: sets of completions, micro-batches sorted by prompt, neighbours that share a row, passes counted in tokens


LENGTH, WIDTH = 8, 2  # tokens of a prompt and of a completion
PROMPTS = Dataset.from_dict(
    {"prompt": [f"{first} cat sat a dog ate the fish" for first in ("the", "a", "cat", "dog")]}
)
HOT_ROWS = {"proposal": "hot_policy", "bad_reward_threshold": 0.0, "potential": "indicator", "target_dist_beta": None}
METHODS = {
    "PPO": (PPOTrainer, {}),
    "RePULSe on PPO": (RePULSePPOTrainer, HOT_ROWS),
    "RePULSe on PPO, learned": (RePULSePPOTrainer, {}),
    "RePULSe on GRPO": (RePULSeGRPOTrainer, HOT_ROWS),
    "RePULSe on GRPO, own": (RePULSeGRPOTrainer, {"proposal": "policy"}),
    "RePULSe, cut apart": (RePULSeTrainer, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}),
    "RePULSe on GRPO, learned": (RePULSeGRPOTrainer, {}),
    "REINFORCE, whole": (ReinforceTrainer, {}),
    "REINFORCE, cut apart": (ReinforceTrainer, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}),
}
SETTINGS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_completion_length": WIDTH}
SETTINGS |= {"beta": 0.1, "optim": "sgd", "learning_rate": 0.3}


def build_on_rows(make, method, **kwargs):
    trainer_cls, settings = METHODS[method]
    return make(trainer_cls, model="llama", **({"dataset": PROMPTS} | SETTINGS | settings | kwargs))


def watch(trainer):
    """Passes of the policy: whether with gradient, and the shape of the rows."""
    seen = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((torch.is_grad_enabled(), *kwargs["input_ids"].shape)),
        with_kwargs=True,
        prepend=True,
    )
    return seen


def test_prompts_with_other_masks_are_others():
    ids = torch.full((4, 2), 5)
    mask = torch.tensor([[1, 1], [0, 1], [1, 1], [0, 1]])
    (found,) = sorted_by_prompt([{"prompt_ids": ids, "prompt_mask": mask}])
    assert found["prompt_mask"][:, 0].tolist() == [0, 0, 1, 1]


def test_rows_of_a_prompt_come_together():
    ids = torch.tensor([[5, 6], [0, 6], [5, 6], [7, 8], [0, 6], [7, 8]])
    rows = {
        "prompt_ids": ids,
        "prompt_mask": (ids != 0).long(),
        "rewards": torch.arange(6.0),
        "num_items_in_batch": torch.tensor(9),
        "nothing": None,
    }
    batches = [{k: x[i : i + 2] if k in list(rows)[:3] else x for k, x in rows.items()} for i in (0, 2, 4)]
    found = sorted_by_prompt(batches)
    assert [batch["rewards"].tolist() for batch in found] == [[1, 4], [0, 2], [3, 5]]
    for batch in found:
        assert torch.equal(batch["prompt_ids"], ids[batch["rewards"].long()])
        assert len(batch["prompt_ids"].unique(dim=0)) == 1
        assert batch["num_items_in_batch"] == 9 and batch["nothing"] is None


@pytest.mark.trainer
@pytest.mark.parametrize("method", [method for method in METHODS if method != "REINFORCE, whole"])
def test_a_prompt_is_read_once(make, method, monkeypatch):
    """In a micro-batch, though TRL shuffles completions; updates and metrics are those of separate rows, and of rows not sorted."""
    together = build_on_rows(make, method, share_prompts=True)
    seen = watch(together)
    together.train()
    per_batch = together.args.per_device_train_batch_size
    rows = [shape for gradient, *shape in seen if gradient]
    assert len(rows) == 2 * together.args.gradient_accumulation_steps
    assert all(count == 1 and (length - LENGTH) // WIDTH >= per_batch for count, length in rows)
    assert_the_same(together, build_and_train(make, method, share_prompts=False))

    monkeypatch.setattr(base_trainer, "sorted_by_prompt", lambda batches: batches)
    shuffled = build_on_rows(make, method, share_prompts=True)
    seen = watch(shuffled)
    shuffled.train()
    assert max(count for gradient, count, _ in seen if gradient) > 1  # the control
    for p, q in zip(together.model.parameters(), shuffled.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5)


def build_and_train(make, method, **kwargs):
    trainer = build_on_rows(make, method, **kwargs)
    trainer.train()
    return trainer


class Rows(Scoring):
    """The choice of rows, with another process's answer, if there is one."""

    def __init__(self, other=None):
        accelerator = SimpleNamespace(device="cpu", gather=lambda x: torch.cat([x, torch.tensor([other])]))
        super().__init__(accelerator, None, 0, 16, False, passes_together=other is not None)


def prompts_in_runs(*runs):
    ids = torch.arange(len(runs)).repeat_interleave(torch.tensor(runs)).unsqueeze(1).expand(-1, LENGTH)
    return ids, torch.ones_like(ids)


@pytest.mark.parametrize(
    ("runs", "count"),
    [((4, 4), 4), ((2, 3), 1), ((1, 3), 1), ((8, 4), 4), ((6, 9, 3), 3), ((5,), 5), ((1, 1, 1), 1), ((6, 4), 2)],
)
def test_neighbours_divide_all_runs(runs, count):
    assert Rows().neighbours(prompts_in_runs(*runs), WIDTH, 1, None) == count


def test_prompts_differ_by_their_masks_too():
    ids, mask = prompts_in_runs(4)
    mask = mask.clone()
    mask[2:, 0] = 0
    assert Rows().neighbours((ids, mask), WIDTH, 1, None) == 2


@pytest.mark.parametrize(
    ("run", "completions", "size", "count"),
    [
        (16, 1, 4, 8),  # twice the completions of a micro-batch
        (16, 1, 2, 4),
        (16, 1, 1, 1),  # a row of two has more tokens than one of one
        (5, 1, 4, 5),
        (7, 1, 4, 7),
        (4, 5, 4, 1),  # of each policy sample, four of a proposal
        (4, 2, 4, 4),
    ],
)
def test_neighbours_fit_into_a_pass(run, completions, size, count):
    assert Rows().neighbours(prompts_in_runs(run), WIDTH, completions, size) == count


def test_processes_take_as_many_neighbours():
    assert Rows([4, 8]).neighbours(prompts_in_runs(12), WIDTH, 1, 12) == 4  # runs of 4 over there
    assert Rows([12, 3]).neighbours(prompts_in_runs(12), WIDTH, 1, 12) == 3  # room for 3
    assert Rows([1, 1]).neighbours(prompts_in_runs(12), WIDTH, 1, 12) == 1
    assert Rows([4, 8]).neighbours(None, WIDTH, 1, 12) == 1  # prompts of their own, here alone: no less of a call
    assert Rows().neighbours(prompts_in_runs(12), WIDTH, 1, 12) == 12  # the control


@pytest.mark.parametrize(("count", "at_once"), [(1, 4), (2, 3), (4, 2), (8, 1), (16, 1)])
def test_rows_fit_into_a_pass(count, at_once):
    """Of a micro-batch of 4 completions: 40 tokens, 8 completions; or one row."""
    layout, seen = Layout(LENGTH, WIDTH, count), []
    Rows().in_passes(
        lambda *rows: seen.append(len(rows[0])) or rows, layout, 12, 4, *torch.ones(2, 12, LENGTH + count * WIDTH)
    )
    assert seen == [at_once] * (12 // at_once)


@pytest.mark.trainer
@pytest.mark.parametrize("method", ["PPO", "RePULSe on GRPO", "RePULSe on GRPO, learned"])
@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2}])
def test_micro_batches_that_cut_prompts(make, method, settings):
    """Three completions of a prompt, five in a micro-batch: runs of many lengths."""
    settings = {"num_generations": 3, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 3} | settings
    dataset = Dataset.from_dict(
        {"prompt": [f"{first} dog ate the fish" for first in ("the", "a", "sat", "dog", "ate the")]}
    )
    settings |= {"dataset": dataset, "max_steps": 4}
    assert_the_same(*(build_and_train(make, method, share_prompts=share, **settings) for share in (True, False)))


@pytest.mark.trainer
@pytest.mark.parametrize(("generations", "size"), [(4, 2), (16, 4), (5, 4), (8, 6)])
@pytest.mark.parametrize(
    ("method", "others"), [("PPO", 0), ("RePULSe on GRPO, learned", 1), ("RePULSe on GRPO, learned", 4)]
)
def test_passes_without_gradient_are_no_larger_than_micro_batches(make, method, others, generations, size):
    """Those of all models: in tokens, and with at most twice the completions; or one row of what is drawn beside a sample."""
    many = {"num_generations": generations, "per_device_train_batch_size": size, "max_steps": 1}
    many["gradient_accumulation_steps"] = generations // math.gcd(generations, size)
    many["dataset"] = PROMPTS.repeat(2)
    if others:
        many["num_proposal_generations"] = others * generations
    trainer = build_on_rows(make, method, share_prompts=True, **many)
    seen = {}
    models = {
        "policy": trainer.model,
        "reference": trainer.ref_model,
        **{k: x.module for k, x in trainer.second_models.items()},
    }
    for name, model in models.items():

        def note(module, args, kwargs, name=name):
            if not torch.is_grad_enabled() and "layout" in kwargs:
                rows, layout = kwargs["input_ids"].shape, kwargs["layout"]
                seen.setdefault(name, []).append((rows.numel(), rows[0] * layout.count))

        model.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    trainer.train()
    assert len(seen) == 3
    for name, passes in seen.items():
        most = size * (1 + others if name == "policy" else 1)
        for tokens, completions in passes:
            assert (tokens <= most * (LENGTH + WIDTH) and completions <= 2 * most) or completions == others
    tokens, completions = (sum(x) for x in zip(*seen["policy"], strict=True))
    # Several samples share the prompt with what is beside them; a row of four and a sample may be the cheapest
    assert others == 4 or tokens / completions < LENGTH / (1 + others) + WIDTH
    separate = many["gradient_accumulation_steps"] * size  # rows, if each completion had its own
    assert sum(tokens for tokens, _ in seen["reference"]) < separate * (LENGTH + WIDTH)


@pytest.mark.trainer
@pytest.mark.parametrize(
    ("method", "settings", "sizes"),
    [
        ("PPO", {"steps_per_generation": 8, "per_device_train_batch_size": 2}, {4}),
        ("PPO", {"steps_per_generation": 6, "num_generations": 2, "per_device_train_batch_size": 1}, {2}),
        ("PPO", {"entropy_coef": 0.5}, {1}),
        ("RePULSe on GRPO", {"steps_per_generation": 4, "gradient_accumulation_steps": 2}, {2}),
        ("RePULSe on GRPO", {"steps_per_generation": 2, "gradient_accumulation_steps": 4}, {2}),
        ("RePULSe on GRPO", {"loss_type": "bnpo"}, {1}),
        ("RePULSe on GRPO", {"top_entropy_quantile": 0.5}, {1}),
        ("RePULSe on GRPO", {"share_prompts": False}, set()),
        ("RePULSe on GRPO", {"alpha": 0.0} | HOT_ROWS | {"proposal": "policy"}, set()),
        ("REINFORCE, whole", {}, set()),
    ],
)
def test_trls_shuffle_stays_where_it_matters(make, method, settings, sizes, monkeypatch):
    """Between updates; between micro-batches where a loss is of each; and where the trainer is TRL's, or shares nothing."""
    seen = set()

    def watched(batches):
        seen.add(len(batches))
        return sorted_by_prompt(batches)

    monkeypatch.setattr(base_trainer, "sorted_by_prompt", watched)
    sorted_run = build_and_train(make, method, **settings)
    assert seen == sizes
    monkeypatch.setattr(base_trainer, "sorted_by_prompt", lambda batches: batches)
    shuffled = build_and_train(make, method, **settings)
    for p, q in zip(sorted_run.model.parameters(), shuffled.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5)


@pytest.mark.trainer
def test_shares_of_clipped_completions_do_not_hang_on_their_order(make, monkeypatch):
    """TRL takes means over the completions of a micro-batch, which are not weighed by their tokens."""

    def shares():
        settings = {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 3, "epsilon": 1e-3}
        trainer = build_and_train(make, "RePULSe on GRPO", max_completion_length=6, max_steps=3, **settings)
        return [log["clip_ratio/region_mean"] for log in trainer.state.log_history[:3]]

    found = shares()
    assert max(found) > 0
    monkeypatch.setattr(base_trainer, "sorted_by_prompt", lambda batches: batches)
    assert shares() == pytest.approx(found, abs=1e-6)


PAD = 99


def sets_of(batch):
    """The sets of `build_batch`."""
    named = {name: {part: batch.get(f"{name}_{part}") for part in ("ids", "mask", "attended")} for name in "ab"}
    return {name: CompletionSet(rewards=torch.zeros(0), **parts) for name, parts in named.items()}


def build_batch():
    """4 units with a set of 2 completions of 3 tokens and one of 3 of 5 tokens, each token a number of its own."""
    ids = torch.arange(4 * 2 * 3 + 4 * 3 * 5) + 100
    first, second = ids[:24].view(4, 2, 3), ids[24:].view(4, 3, 5)
    mask = {"a_mask": torch.ones_like(first), "b_mask": torch.ones_like(second)}
    mask["b_mask"][:, 1, 3:] = 0
    return {"a_ids": first, "b_ids": second} | mask


@pytest.mark.parametrize("joint", [1, 2, 4])
@pytest.mark.parametrize("slots", [None, 3, 5])
def test_each_set_gets_its_own_scores(joint, slots):
    batch = build_batch()
    needed = torch.zeros(4, 3, dtype=torch.bool)
    needed[1, 2] = needed[2, 0] = True
    sets = CompletionSets.of(sets_of(batch), PAD, {} if slots is None else {"b": needed}, None)
    assert sets.ids.shape == (4, 5, 5) and sets.ids[:, :2, 3:].eq(PAD).all() and sets.mask[:, :2, 3:].eq(0).all()
    if joint > 1:
        sets.join(joint)
    if slots is not None:
        sets.keep_needed(joint * slots)
    assert sets.completions == joint * (slots or 5)
    prompts = torch.arange(4 // joint).unsqueeze(1)
    ids, mask, _ = sets.rows(Layout(1, 5, sets.completions), (prompts, torch.ones_like(prompts)))
    scores = (ids * mask)[:, 1:].reshape(-1, 5)  # a token's score is the token
    first, second = sets.split(scores)
    torch.testing.assert_close(first, batch["a_ids"])
    expected = batch["b_ids"] * batch["b_mask"]
    torch.testing.assert_close(second, expected if slots is None else expected * needed.unsqueeze(2))


def test_what_is_kept_is_what_is_needed():
    batch = build_batch()
    needed, asked = (torch.tensor([[1, 0, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0]]) == x for x in (1, 0))
    sets = CompletionSets.of(sets_of(batch), PAD, {"b": needed}, {"b": asked})
    before = {
        int(ids[0]): bool(wanted)
        for ids, wanted in zip(sets.ids.flatten(0, 1), sets.by_sampler.flatten(), strict=True)
    }
    sets.keep_needed(4)
    assert sets.needed.tolist() == [[True] * 3 + [False], [True] * 3 + [False], [True] * 4, [True] * 2 + [False] * 2]
    assert sets.mask[~sets.needed].eq(0).all()
    for ids, wanted in zip(sets.ids.flatten(0, 1), sets.by_sampler.flatten(), strict=True):
        assert bool(wanted) == before[int(ids[0])]


def test_tools_write_what_is_read_and_not_counted():
    batch = build_batch()
    batch["a_attended"] = batch["a_mask"].clone()
    batch["a_mask"][:, :, 1] = 0
    sets = CompletionSets.of({"a": sets_of(batch)["a"]}, PAD, {}, None)
    assert sets.mask.eq(1).all() and sets.by_sampler is None
