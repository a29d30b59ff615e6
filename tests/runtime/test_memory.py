"""What a rank holds at once stays near what the plan predicts."""

import pytest

pytest.importorskip("torch")

from runtime.held_memory import run_counted

ALLOWANCE = 1.2
LINE = ("zb-h1", [[0], [1], [2], [3]])
V = ("zb-v", [[0], [1], [1], [0]])
PAIRS = ("zb-h1", [[0, 1], [2, 3]])
CHAINS = {
    "line": LINE,
    "line with replicas": ("zb-h1", [[0], [1, 2], [3, 4], [5]]),
    "two pairs": PAIRS,
    "uneven": ("zb-h1", [[0, 1], [2]]),
    "V": V,
    "V with replicas": ("zb-v", [[0, 1], [2], [2], [0, 1]]),
    "small V": ("v-half", [[0], [1], [1], [0]]),
    "smaller V with replicas": ("v-min", [[0, 1], [2], [2], [0, 1]]),
    "loop": ("interleaved-1f1b", [[0], [1], [0], [1]]),
    "loop with replicas": ("interleaved-1f1b", [[0, 1], [2, 3], [0, 1], [2, 3]]),
}


def check(tmp_path, *cases, allowance=ALLOWANCE):
    """Cases are `of_stages` or `of_groups` of `memory_cases`, with their arguments."""
    for case, ranks in zip(
        cases, run_counted("runtime.memory_cases", cases, tmp_path), strict=True
    ):
        text = [[f"{ratio:.3f}" for ratio in ratios] for ratios in ranks]
        assert max(map(max, ranks)) <= allowance, f"{case}: of the prediction, by rank: {text}"


def groups(chain, **changes):
    return "groups", chain, changes


def stages(model, schedules, **changes):
    return "stages", (model, schedules), changes


def test_memory_of_groups(tmp_path):
    check(tmp_path, groups(V), groups(LINE, recompute=True))


REPLICATED = {"cuts": (0, 2, 6), "replicas": (1, 2, 1)}


def test_memory_of_one_stage_a_device(tmp_path):
    check(
        tmp_path,
        stages("blocks", [("1f1b", False), ("pe", True)]),
        stages("blocks", [("1f1b", False)], **REPLICATED),
        stages("mlp", [("1f1b", False)]),
    )


@pytest.mark.full
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", CHAINS)
def test_memory_of_chains(name, recompute, tmp_path):
    chain = CHAINS[name]
    check(
        tmp_path,
        *(groups(chain, blocks_a_stage=n, recompute=recompute) for n in (2, 4)),
        groups(chain, recompute=recompute, gradient_buckets=3),
    )


@pytest.mark.full
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_memory_of_stages_of_one_block(recompute, tmp_path):
    """While attention runs backward in I, a rank holds six tensors more than planned.

    One is the next message. All others are needed at that moment, 18 beside the inputs: nine for W
    (what four linear layers have read, five, and the gradients that have come to three of them,
    four), query, key and value, two gradients on their way, and four that torch makes within the
    op. A plan counts ten there, what a forward keeps. Where a stage is one recomputed block, all
    that it plans for is 19 tensors of that size.
    """
    cases = [groups(chain, blocks_a_stage=1, recompute=recompute) for chain in (LINE, V)]
    check(tmp_path, *cases, allowance=1.36 if recompute else ALLOWANCE)


@pytest.mark.full
def test_memory_of_sharded_optimizers(tmp_path):
    check(tmp_path, *(groups(PAIRS, shards=True, recompute=again) for again in (False, True)))


@pytest.mark.full
def test_memory_of_more_schedules(tmp_path):
    both = [(name, again) for name in ("gpipe", "1f1b", "pe") for again in (False, True)]
    check(
        tmp_path,
        stages("blocks", both),
        stages("blocks", both, **REPLICATED),
        stages("mlp", [("gpipe", False), ("pe", False)]),
    )


@pytest.mark.full
def test_memory_of_small_layers_with_recomputation(tmp_path):
    """A rank holds ten tensors. A plan counts no messages: here up to three, the next one that
    comes, and two that went but that a late neighbour has not taken yet.
    """
    check(tmp_path, stages("mlp", [("1f1b", True)] * 3), allowance=1.35)
