"""Where the ranks of both sides run, as all of them tell."""

from mcore_rl.weight_sync.spec import Sites, sites_of


def test_a_node_has_the_training_ranks_of_its_host():
    """Four training ranks on two hosts; the generation ranks behind them count for neither."""
    found = [("s0", "h0"), ("s0", "h0"), ("s1", "h1"), ("s1", "h1"), ("s1", "h1"), ("s0", "h0")]
    assert sites_of(found, 4) == Sites(("s0", "s0", "s1", "s1"), ("s1", "s0"), ranks_per_node=2)
    assert sites_of(found[:3], 1) == Sites(("s0",), ("s0", "s1"), ranks_per_node=1)
