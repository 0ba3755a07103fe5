"""Asynchronous rewards, outside a trainer and inside a running loop, and the seeds of vLLM's requests."""

import asyncio
import sys
import types

import numpy as np
import pytest

from trl_repulse.evaluation import _generation, sampling
from trl_repulse.evaluation.rare.sampling import draw
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions

from ..conftest import build_model, word_reward


class Client:
    """A reward whose connection belongs to the loop that it was opened in."""

    __name__ = "client"

    def __init__(self):
        self.loop = None

    async def __call__(self, completions, **columns):
        self.loop = self.loop or asyncio.get_running_loop()
        answer = self.loop.create_future()
        self.loop.call_soon(answer.set_result, word_reward(completions))
        return await answer


def sample(folder, model, reward, **settings):
    settings = SamplingSettings(**({"num_samples": 6, "max_completion_length": 2, "batch_size": 4} | settings))
    return sample_completions(folder, model, ["the cat", "fish"], reward, settings, progress=False)


def test_an_asynchronous_client_lives_through_all_batches(tmp_path, model_dirs):
    found = sample(tmp_path / "a", model_dirs["gpt2"], Client(), shard_size=5)
    assert found.table == sample(tmp_path / "b", model_dirs["gpt2"], Client(), shard_size=5).table
    assert found.column().ravel().tolist() == word_reward(found.table["completion"].to_pylist())


def test_asynchronous_rewards_inside_a_running_loop(tmp_path, model_dirs, tokenizer):
    async def notebook():
        found = sample(tmp_path / "s", model_dirs["gpt2"], Client())
        draws = draw([build_model("gpt2", len(tokenizer))], tokenizer, ["the cat"], Client(), (4,), 2)
        return found.column().shape, draws.sample.rewards.shape

    assert asyncio.run(notebook()) == ((2, 6), (1, 4))


def test_an_error_of_an_asynchronous_reward_names_it(tmp_path, model_dirs):
    async def broken(completions, **columns):
        raise KeyError("key")

    with pytest.raises(KeyError) as caught:
        sample(tmp_path / "s", model_dirs["gpt2"], broken)
    assert any("'broken'" in note for note in caught.value.__notes__)


@pytest.fixture
def requests(monkeypatch):
    """In place of vLLM: every completion is one end token. What is asked for is kept."""
    asked = []

    class LLM:
        def __init__(self, **options):
            pass

        def generate(self, prompts, params, use_tqdm):
            asked.extend(params)
            output = types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=[1])])
            return [output for _ in prompts]

    double = types.SimpleNamespace(LLM=LLM, SamplingParams=lambda **given: types.SimpleNamespace(**given))
    monkeypatch.setitem(sys.modules, "vllm", double)
    monkeypatch.setattr(sampling, "vllm_version", lambda: "1.2")
    return asked


def test_no_two_of_vllms_requests_share_a_seed(tmp_path, model_dirs, requests):
    sample(tmp_path / "a", model_dirs["gpt2"], word_reward, engine="vllm", num_samples=100, shard_size=7)
    seeds = [each.seed for each in requests]
    assert len(set(seeds)) == 200 and all(0 <= seed < 2**63 for seed in seeds)
    assert np.median(seeds) > 2**61  # from the whole range, where two of millions are not met by chance
    sample(tmp_path / "b", model_dirs["gpt2"], word_reward, engine="vllm", num_samples=100, shard_size=7)
    assert [each.seed for each in requests[200:]] == seeds
    # Shards whose seeds are neighbours
    engine = _generation.vllm_engine("m", [1], 2, "float32", None)
    for seed in (5, 6):
        engine([[3]] * 4, seed)
    assert len({each.seed for each in requests[400:]}) == 8
