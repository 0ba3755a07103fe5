"""Asynchronous rewards, outside a trainer and inside a running loop, and the seeds of vLLM's requests."""

import asyncio

import pytest

from trl_repulse.evaluation._generation import as_function, evaluate_rewards
from trl_repulse.evaluation.rare.sampling import draw
from trl_repulse.evaluation.sampling import SamplingSettings, sample_completions

from .conftest import build_model, word_reward


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


def test_the_loop_can_be_the_trainers():
    seen = []

    async def reward(completions, **columns):
        seen.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    async def main(loop):
        functions = dict([as_function(reward, None, None)])
        return await asyncio.to_thread(evaluate_rewards, functions, ["a"] * 3, ["b"] * 3, None, {}, 2, loop)

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(main(loop)) == {"reward": [1.0] * 3} and seen == [loop, loop]
    loop.close()


def test_an_error_of_an_asynchronous_reward_names_it(tmp_path, model_dirs):
    async def broken(completions, **columns):
        raise KeyError("key")

    with pytest.raises(KeyError) as caught:
        sample(tmp_path / "s", model_dirs["gpt2"], broken)
    assert any("'broken'" in note for note in caught.value.__notes__)
