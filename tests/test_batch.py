"""Groups to micro-batches: each live row once, budgets kept, groups whole where they fit; divisors and dead rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amir.tokens import Tokens
from amir.update.batch import Batch, assemble
from amir.update.micro_batches import micro_batches
from tiny import run_config


def tokens_of(prompt_lengths: list[int], completion_lengths: list[int]) -> Tokens:
    p, c = max(prompt_lengths), max(completion_lengths)
    prompt_mask = torch.arange(p) >= p - torch.tensor(prompt_lengths)[:, None]
    completion_mask = torch.arange(c) < torch.tensor(completion_lengths)[:, None]
    prompt_ids = torch.arange(len(prompt_lengths))[:, None].expand(-1, p)
    completion_ids = torch.arange(len(completion_lengths))[:, None].expand(-1, c)
    prompt_index = torch.arange(len(completion_lengths)) // 4
    return Tokens(prompt_ids, prompt_mask, prompt_index, completion_ids, completion_mask)


def batch_of(completion_lengths: list[int], rewards: list[float], truncated=None, **changes: object) -> Batch:
    tokens = tokens_of([2 + i for i in range(len(rewards) // 4)], completion_lengths)
    cut = torch.tensor(truncated or [False] * len(rewards))
    return assemble(tokens, torch.tensor(rewards)[:, None], cut, run_config(**changes))


rows_of_groups = st.integers(1, 4).flatmap(
    lambda groups: st.tuples(
        st.lists(st.integers(1, 30), min_size=4 * groups, max_size=4 * groups),
        st.lists(st.sampled_from([0.0, 1.0]), min_size=4 * groups, max_size=4 * groups),
    )
)


@settings(deadline=None, max_examples=60)
@given(rows_of_groups, st.integers(1, 400))
def test_micro_batches_hold_each_needed_row_once_within_the_budget(groups, budget: int) -> None:
    lengths, rewards = groups
    batch = batch_of(lengths, rewards)
    micros = list(micro_batches(batch.tokens, batch.has_gradient, budget))
    rows = torch.cat([m.rows for m in micros]) if micros else torch.zeros(0, dtype=torch.int64)
    assert sorted(rows.tolist()) == torch.nonzero(batch.has_gradient).flatten().tolist()
    for micro in micros:
        part = batch.tokens.rows(micro.rows)
        assert part.computed(packed=True) <= budget or len(micro.rows) == 1
        assert torch.equal(part.prompt_ids[part.prompt_index, -1], batch.tokens.prompt_index[micro.rows])
        assert torch.equal(part.prompt_lengths[part.prompt_index], 2 + batch.tokens.prompt_index[micro.rows])
        assert torch.equal(part.completion_ids[:, 0], micro.rows)
        assert part.completion_mask.sum() == batch.tokens.completion_mask[micro.rows].sum()
        if micro.complete_groups:
            for group in set(batch.group[micro.rows].tolist()):
                held = micro.rows[batch.group[micro.rows] == group].tolist()
                assert held == torch.nonzero(batch.has_gradient & (batch.group == group)).flatten().tolist()
    if budget >= 5 + 4 * 30:
        assert all(m.complete_groups for m in micros)


def test_longest_rows_go_first_so_that_memory_peaks_at_once() -> None:
    batch = batch_of([3, 9, 1, 5] * 2, [1.0, 0.0, 1.0, 0.0] * 2)
    widths = [
        batch.tokens.rows(m.rows).completion_ids.shape[1] for m in micro_batches(batch.tokens, batch.has_gradient, 1)
    ]
    assert widths == [9, 5, 3, 1] * 2


def test_dead_rows_are_skipped_and_still_counted() -> None:
    batch = batch_of([5] * 12, [1.0] * 4 + [0.0] * 4 + [1.0, 0.0, 0.0, 0.0])
    assert batch.has_gradient.tolist() == [False] * 8 + [True] * 4
    assert batch.num_tokens == 60
    assert batch.num_sequences == 12
    assert batch.pairs.total == 3


@pytest.mark.parametrize("changes", [{"beta": 0.04}, {"entropy_coef": 0.01}], ids=str)
def test_no_row_is_dead_where_kl_or_entropy_trains_it(changes: dict[str, object]) -> None:
    assert batch_of([5] * 4, [1.0] * 4, **changes).has_gradient.all()


def test_masked_truncated_rows_leave_loss_pairs_and_token_count_but_stay_a_sequence() -> None:
    cut = [True, False, False, False]
    batch = batch_of([5] * 4, [1.0, 0.0, 1.0, 0.0], cut, mask_truncated_completions=True)
    assert batch.has_gradient.tolist() == [False, True, True, True]
    assert not batch.pairs.participants[0]
    assert (batch.pairs.total, batch.num_tokens, batch.num_sequences) == (2, 15, 4)


def test_unscorable_rows_get_no_advantage_and_no_pair() -> None:
    batch = batch_of([5] * 4, [float("nan"), 0.0, 1.0, 0.0])
    assert batch.advantages[0] == 0
    assert not batch.pairs.participants[0]
    assert batch.pairs.total == 2


def test_empty_completions_train_nothing_and_form_no_pair() -> None:
    batch = batch_of([5, 0, 5, 5], [0.0, 1.0, 1.0, 0.0])
    assert batch.has_gradient.tolist() == [True, False, True, True]
    assert not batch.pairs.participants[1]
    assert (batch.pairs.total, batch.num_tokens, batch.num_sequences) == (2, 15, 4)


@pytest.mark.parametrize(("margin", "pairs"), [(0.0, 4), (0.5, 4), (1.0, 0)])
def test_a_gap_equal_to_the_margin_is_no_pair(margin: float, pairs: int) -> None:
    assert batch_of([5] * 4, [1.0, 0.0, 1.0, 0.0], reward_margin=margin).pairs.total == pairs


def test_without_a_pair_term_nothing_is_paired() -> None:
    batch = batch_of([5] * 4, [1.0, 0.0, 1.0, 0.0], lambda_reg=0)
    assert batch.pairs.total == 0
    assert not batch.pairs.participants.any()


@pytest.mark.parametrize("loss_type", ["reinforce", "dapo"])
@pytest.mark.parametrize(
    ("baseline", "advantages"),
    [("mean", [0.75, -0.25, -0.25, -0.25]), ("leave_one_out", [1, -1 / 3, -1 / 3, -1 / 3]), ("none", [1, 0, 0, 0])],
)
def test_the_baseline_is_the_setting_whatever_the_loss(loss_type: str, baseline: str, advantages: list[float]) -> None:
    changes = {"loss_type": loss_type, "baseline": baseline, "scale_rewards": "none"}
    batch = batch_of([5] * 4, [1.0, 0.0, 0.0, 0.0], **changes)
    assert batch.advantages.tolist() == pytest.approx(advantages)
    assert run_config(loss_type=loss_type).baseline == "mean"


def test_normalizing_by_group_needs_the_groups_mean_and_deviation() -> None:
    expected = r"expected scale_rewards = 'group' and baseline = 'mean', got 'group' and 'leave_one_out'"
    with pytest.raises(ValueError, match=expected):
        run_config(combine_rewards="normalize_then_sum", baseline="leave_one_out")
