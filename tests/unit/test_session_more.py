"""Frozen tensors are compared at the start; with MPI: tests/mpi/test_mpi_session.py."""

from __future__ import annotations

from pyddl.run.hello import frozen_difference


def test_frozen_difference_of_equal_tensors_is_none():
    assert frozen_difference([{"a": 1, "b": 2}] * 3, "learner") == ""
    assert frozen_difference([{}, {}], "learner") == ""


def test_frozen_difference_names_the_first_tensors_and_all_who_differ():
    names = ["a", "b", "c", "d", "e"]
    first = dict.fromkeys(names, 1)
    sentence = frozen_difference([first, {**first, "b": 2}, first, {**first, "b": 3, "c": 4}], "learner")
    assert "b, c of learner 1, 3 differ from those of learner 0" in sentence
    assert "load the same values everywhere" in sentence
    sentence = frozen_difference([first, dict.fromkeys(names, 2)], "learner")
    assert "a, b, c and 2 more of learner 1 differ" in sentence
