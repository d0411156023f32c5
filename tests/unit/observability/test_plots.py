import os

import numpy as np
import pytest

from mcore_rl.observability.plots import plot_reward_curve

ORANGE, GREEN = (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)


def has_colour(pixels: np.ndarray, colour: tuple[int, int, int]) -> bool:
    return bool((np.round(pixels[..., :3] * 255) == colour).all(axis=-1).any())


def test_the_picture_shows_the_accuracies_it_is_given_and_no_others(tmp_path):
    import matplotlib.image  # seconds that other tests need not wait

    path = tmp_path / "reward.png"
    plot_reward_curve(path, [0.3, 0.5, 0.6], before=0.35)
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[:2] == (720, 1200)
    assert has_colour(pixels, ORANGE)
    assert not has_colour(pixels, GREEN)
    plot_reward_curve(path, [0.3, 0.5, 0.6], before=0.35, after=0.95)
    assert has_colour(matplotlib.image.imread(path), GREEN)
    assert os.listdir(tmp_path) == ["reward.png"]


@pytest.mark.parametrize("rewards", [[], [0.5], [-2.0, 3.0]])
def test_few_steps_and_rewards_outside_of_0_to_1_are_drawn_too(tmp_path, rewards):
    plot_reward_curve(tmp_path / "reward.png", rewards)
    assert (tmp_path / "reward.png").stat().st_size > 1000
