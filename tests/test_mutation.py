"""Nothing that the trainer sends can be left out, doubled or sent elsewhere without being noticed.

mutants.py breaks the collectives, and some sums by hand; MUTANTS.md tells what noticed each. By
default a fixed sample of it is tried again, and that the table is whole; `-m full` makes all
of it anew."""

import ast
import pathlib

import mutants
import pytest

HERE = pathlib.Path(__file__).parent
CONTROL = {  # calls of the door that no step makes, and the tests that show what they do
    "parallel.check_replicas #1": "test_parallel.py::test_a_replica_that_differs_is_named",
    "parallel.check_replicas #2": "test_parity.py::test_saved_on_one_layout_resumed_on_another",
    "parallel.fingerprints": "test_parity.py::test_saved_on_one_layout_resumed_on_another",
    "train.main": "test_train.py::test_a_rank_that_fails_ends_all_and_says_why",
    "train.drain": "test_async_save.py::test_a_signal_waits_for_both_checkpoints",
    "train.resume": "test_train.py::test_ranks_give_the_single_process_run",
    "train.agreed": "test_train.py::test_a_checkpoint_closed_to_one_rank_is_the_same_error_on_all",
    "train.begin": "test_finetune.py::test_weights_that_cannot_be_had_are_an_error",
}
OTHER_HALF = {"parallel.run #1"}  # a receive: the ledger and the table have the send
ALONE = {"train.next_batch",  # over all ranks: there is no other group of as many
         "parallel.Blocks.add_leaf #1"}  # over all data ranks, where there can be no tp and no cp
SAMPLE = ("dp 2, fsdp 2, zero 3", "fsdp 2, tp 2, zero 0", "cp 2, tp 2, ring",
          "dp 2, cp 2, ulysses", "pp 2, fsdp 2, zero-bubble, tied, zero 3",
          "pp 2, dp 2, deterministic, tied")


@pytest.fixture(scope="module")
def known():
    return mutants.read_table(mutants.TABLE.read_text())


@pytest.mark.quick
def test_every_call_of_the_door_is_broken_or_has_a_test_of_its_own(known):
    """By the source: a new one fails here until the table is made anew."""
    broken = {mutant.site.where for mutant in known if mutant.site}
    calls = set(mutants.calls_of_the_door().values())
    assert calls - broken == {*CONTROL, *OTHER_HALF} and broken <= calls
    for test in CONTROL.values():
        file, _, name = test.partition("::")
        assert name in {node.name for node in ast.parse((HERE / file).read_text()).body
                        if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.quick
def test_every_call_is_broken_in_every_way(known):
    """Skipped and doubled on every layout that has it, sent over another axis on one at least; and
    everything that is broken by hand."""
    ways = {}
    for mutant in known:
        if mutant.site:
            ways.setdefault(mutant.site.where, set()).add(mutant.how.split()[0])
            both = [mutant._replace(how=how) for how in ("skipped", "doubled")]
            assert set(both) <= set(known), mutant
    assert {where for where, how in ways.items() if "over" not in how} == ALONE
    by_hand = {(m.layout, m.how) for m in known if m.site is None}
    assert {m.layout for m in known} == set(mutants.LAYOUTS)
    for how, (*_, layouts) in mutants.FAULTS.items():
        assert layouts and {(name, how) for name in layouts} <= by_hand, how


@pytest.mark.quick
def test_what_nothing_notices_is_proven_to_change_nothing(known):
    lost = {(*mutant.site[1:], mutant.how) if mutant.site else mutant
            for mutant, note in known.items() if not note}
    assert lost == set(mutants.EQUIVALENT)
    for mutant, note in known.items():  # and what stands for it is noticed
        if not note:
            assert known[mutant._replace(how="skipped")], mutant


@pytest.mark.quick
def test_the_table_has_its_form(known):
    assert mutants.TABLE.read_text() == mutants.table(known)


def test_a_sample_of_the_table(known, world, tokens):
    """Five mutants on each of some layouts, evenly spread: the same is noticed."""
    for name in SAMPLE:
        rows = [(mutant, note) for mutant, note in known.items() if mutant.layout == name
                and not note.startswith((mutants.STUCK, "an exception"))]
        some = dict(rows[len(rows) // 10 :: len(rows) // 5])
        assert len(some) >= 5
        assert mutants.try_all(world, some, tokens) == some


@pytest.mark.full
@pytest.mark.parametrize("name", mutants.LAYOUTS)
def test_the_whole_table(name, known, world, tokens):
    found = mutants.survey(world, tokens, [name])
    assert found == {mutant: note for mutant, note in known.items() if mutant.layout == name}
