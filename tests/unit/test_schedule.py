"""core/schedule.py: H as a step function of the clock."""

from __future__ import annotations

import pytest

from pyddl.core.schedule import IntervalSchedule
from pyddl.errors import ConfigError


@pytest.mark.parametrize("text", ["24", " 24 ", "24:0", "24 : 0"])
def test_parse_plain_number_holds_for_the_whole_run(text) -> None:
    schedule = IntervalSchedule.parse(text)
    assert schedule == IntervalSchedule((0,), (24,))
    assert [schedule.at(step) for step in (0, 1, 10**9)] == [24, 24, 24]


def test_parse_number_of_type_int_is_taken() -> None:
    assert IntervalSchedule.parse(7).at(0) == 7  # type: ignore[arg-type]


def test_at_changes_exactly_at_the_first_step_of_a_piece() -> None:
    schedule = IntervalSchedule.parse("1:0, 2:200, 24:2000")
    assert [schedule.at(step) for step in (0, 199, 200, 1999, 2000, 5000)] == [1, 1, 2, 2, 24, 24]


def test_parse_first_piece_without_a_position_starts_at_zero() -> None:
    assert IntervalSchedule.parse("1,24:50") == IntervalSchedule((0, 50), (1, 24))


def test_parse_interval_may_shrink() -> None:
    schedule = IntervalSchedule.parse("24:0,4:100")
    assert (schedule.at(99), schedule.at(100)) == (24, 4)


def test_shortest_steps_is_the_smallest_wherever_it_stands() -> None:
    assert IntervalSchedule.parse("24:0,4:100,8:200").shortest_steps == 4


@pytest.mark.parametrize(
    ("percent", "max_steps", "start"),
    [
        ("50%", 1000, 500),
        ("12.5%", 80, 10),
        ("33%", 10, 3),
        ("29%", 100, 29),
        ("1.1%", 1000, 11),
        ("99.9%", 10, 9),
    ],
)
def test_parse_share_of_the_run_is_the_exact_step_rounded_down(percent, max_steps, start) -> None:
    # 29 % of 100: 0.29 * 100 is 28.999... as a float
    assert IntervalSchedule.parse(f"1:0%,24:{percent}", max_steps=max_steps).starts_steps == (0, start)


def test_parse_shares_and_steps_may_be_mixed() -> None:
    assert IntervalSchedule.parse("1:0,24:50%", max_steps=100).starts_steps == (0, 50)


def test_parse_shares_that_fall_on_one_step_keep_the_later() -> None:
    schedule = IntervalSchedule.parse("1:0%,8:10%,24:15%", max_steps=6)
    assert schedule == IntervalSchedule((0,), (24,))
    assert schedule.shortest_steps == 24  # H = 1 and 8 never hold


def test_parse_share_without_max_steps_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"'1:0%,24:50%'.*needs run\.max_steps or run\.max_tokens.*set it or"):
        IntervalSchedule.parse("1:0%,24:50%")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "H",
        "2.5",
        "1e3",
        "0",
        "-4",
        "24:",
        ":0",
        "24:5",  # the first step is not 0
        "1:0,24",  # no position
        "1:0,24:",
        "1:0,,24:9",
        "1:0,24:9,",
        "1:0,24:9:9",
        "1:0,24:-9",
        "1:0,2:9,24:9",  # two pieces from one step
        "1:0,2:9,24:8",
        "0:0,24:9",
        "1:0,24:1.5",
    ],
)
def test_parse_malformed_text_is_refused_with_the_grammar(text) -> None:
    with pytest.raises(ConfigError, match=r"sync\.interval must be a number of steps") as caught:
        IntervalSchedule.parse(text, max_steps=100)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("percent", ["%", "x%", "-1%", "100%", "250%", "nan%", "inf%", "1/0%"])
def test_parse_share_outside_the_run_is_refused(percent) -> None:
    with pytest.raises(ConfigError, match=r"sync\.interval must be"):
        IntervalSchedule.parse(f"1:0%,24:{percent}", max_steps=100)


def test_parse_shares_of_a_run_that_ends_by_tokens_are_millionths() -> None:
    schedule = IntervalSchedule.parse("1:0%,24:50%", max_tokens=7)
    assert schedule == IntervalSchedule((0, 500_000), (1, 24), by_tokens=True)
    assert (schedule.at(499_999), schedule.at(500_000)) == (1, 24)


def test_parse_steps_beside_shares_of_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="all be percentages or all be steps"):
        IntervalSchedule.parse("1:0,2:100,24:50%", max_tokens=7)
