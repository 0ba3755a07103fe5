"""Log-probabilities of completions whose prompts are read once, and draws from such prompts."""

from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from benchmarks.architectures import build
from trl_repulse.evaluation import log_probs
from trl_repulse.evaluation._generation import transformers_engine
from trl_repulse.evaluation.log_probs import completion_log_probs
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions
from trl_repulse.generation import drawing as _cache
from trl_repulse.generation._probe import Guard, probe_shared
from trl_repulse.generation.drawing import POLICY, Sampler

from ..conftest import build_model


VOCABULARY = 40
LONG = list(range(20, 32))  # longer than the windows of tiny models
PROMPTS = [[3], [3], LONG, LONG, LONG, [8, 9], [4, 5, 6, 7], LONG, [8, 9]]
COMPLETIONS = [[12, 1], [7], [], [13, 14, 15], [5, 6, 7, 8, 9, 10], [9, 9], [20, 21, 22], [5, 6, 7, 8, 9, 11], [1]]
ORDINARY = ("llama", "gpt2", "gemma2", "gemma3_text", "mixtral", "bloom")
RECURRENT = ("mamba", "rwkv", "minimax", "recurrent_gemma", "jamba")


@torch.no_grad()
def by_hand(model, sampler=POLICY):
    """Log-probability and entropy of each completion from one unpadded pass, (2, B)."""
    found = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        ids = torch.tensor([[*prompt, *completion]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        log_p = sampler(logits).log_softmax(dim=-1).double().cpu()
        token = log_p.gather(1, torch.tensor(completion, dtype=torch.long)[:, None]).sum()
        found.append(torch.stack([token, torch.special.entr(log_p.exp()).sum()]))
    return torch.stack(found, dim=1)


def scores(model, guard=None, size=32, sampler=POLICY):
    return torch.stack(completion_log_probs(model, PROMPTS, COMPLETIONS, size, sampler=sampler, guard=guard))


@pytest.fixture
def tokens_read(monkeypatch):
    """Tokens of each pass, padding included."""
    read, original = [], _cache.padded_outputs

    def counted(model, ids, mask, **options):
        read.append(ids.numel())
        return original(model, ids, mask, **options)

    monkeypatch.setattr(_cache, "padded_outputs", counted)
    monkeypatch.setattr(log_probs, "padded_outputs", counted)
    return read


@pytest.mark.parametrize(
    "sampler", [POLICY, Sampler(1.5, torch.linspace(-1, 1, VOCABULARY))], ids=["policy", "tempered"]
)
@pytest.mark.parametrize("name", [*ORDINARY, *RECURRENT])
def test_scores_are_those_of_single_passes(name, sampler):
    """Prompts of different length, some with one completion and some with several, not all side by side."""
    model = build(name, VOCABULARY).eval()
    guard = probe_shared(model, samples=False)
    assert guard.share_prompts == (name in ORDINARY)
    expected = by_hand(model, sampler)
    for size in (32, 4):
        assert scores(model, guard, size, sampler).tolist() == [
            pytest.approx(row, abs=2e-5) for row in expected.tolist()
        ]


def test_a_compiled_model_is_scored_as_itself():
    model = build_model("gpt2", VOCABULARY)
    assert torch.equal(scores(torch.compile(model, backend="eager")), scores(model))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="no token"):
        completion_log_probs(build_model("gpt2", VOCABULARY), [[]], [[3]])


def test_a_cache_that_cannot_be_continued_would_be_wrong():
    model = build("rwkv", VOCABULARY).eval()
    wrong = scores(model, replace(probe_shared(model, samples=False), share_prompts=True))
    assert (wrong - by_hand(model)).abs().max() > 0.1


@pytest.mark.parametrize("wrong", ["rows", "positions"])
def test_a_wrong_pass_is_found_out(monkeypatch, wrong):
    model = build_model("gpt2", VOCABULARY).eval()
    if wrong == "rows":
        select = DynamicCache.batch_select_indices
        monkeypatch.setattr(DynamicCache, "batch_select_indices", lambda self, rows: select(self, rows.flip(0)))
    else:
        monkeypatch.setattr(
            _cache, "padded_outputs", lambda model, ids, mask, **options: model(ids, attention_mask=mask, **options)
        )
    guard = probe_shared(model)
    assert (guard.share_prompts, guard.repeat_cache) == (False, False)
    assert scores(model, guard).tolist() == [pytest.approx(row, abs=2e-5) for row in by_hand(model).tolist()]
    assert (scores(model, Guard()) - by_hand(model)).abs().max() > 0.1


def test_a_prompt_is_read_once(tokens_read):
    model = build_model("llama", VOCABULARY).eval()
    scores(model, Guard())
    assert tokens_read == [4 * 11, 9 * 6]  # four prompts without their last token; the rest of nine rows
    tokens_read.clear()
    scores(model, Guard(share_prompts=False))
    assert tokens_read == [9 * (12 + 6)]
    tokens_read.clear()
    completion_log_probs(model, [[3], [3]], [[4], [5]], guard=Guard())
    completion_log_probs(model, [[3, 4], [3, 5]], [[4], [5]], guard=Guard())
    assert tokens_read == [2 * 2, 2 * 3]  # nothing to share


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_in_parts_change_nothing(name, monkeypatch):
    model = build_model(name, VOCABULARY).eval()
    whole = scores(model, Guard())
    monkeypatch.setattr(log_probs, "_AT_ONCE", 2 * 6 * VOCABULARY)
    assert torch.equal(scores(model, Guard()), whole)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_draws_read_a_prompt_once(tokenizer, name, tokens_read):
    """The same random numbers draw the same tokens."""
    model = build_model(name, len(tokenizer)).eval()
    prompts = [[3, 4, 5]] * 5 + [[6, 7, 8, 9, 10]] * 3
    guard = probe_shared(model)
    assert guard.repeat_cache
    tokens_read.clear()
    once, each = (
        transformers_engine(model, tokenizer, 6, 8, guard=replace(guard, repeat_cache=repeat))
        for repeat in (True, False)
    )
    assert once(prompts, 3) == each(prompts, 3) and tokens_read == [2 * 4]


def test_held_out_models_are_probed_once(tmp_path, model_dirs, tokenizer, monkeypatch):
    """However many shards there are."""
    probed = []
    monkeypatch.setattr(
        "trl_repulse.evaluation.sampling.probe_shared", lambda *args: probed.append(args[1]) or probe_shared(*args)
    )
    monkeypatch.setattr(log_probs, "probe_shared", None)
    monkeypatch.setattr("trl_repulse.evaluation._generation.probe_shared", None)
    settings = SamplingSettings(num_samples=6, max_completion_length=3, shard_size=4)
    reward = lambda completions, **_: [float(len(text)) for text in completions]  # noqa: E731
    folder = model_dirs["llama"]
    samples = sample_completions(tmp_path / "s", folder, ["the cat", "fish"], reward, settings, reference=folder)
    assert probed == [True, False]  # the reference draws nothing
    assert abs(samples.column("kl")).max() < 1e-5
