"""The benchmark of the API asks both sides for the same."""

from __future__ import annotations

from benchmarks.api_speed import Side, cpu_table, measure, table


def test_both_servers_make_and_show_as_many_things_in_turns() -> None:
    us, peer = measure(rounds=2, requests=8)
    for side in (us, peer):
        assert {kind: len(turns) for kind, turns in side.seconds.items()} == {"create": 2, "read": 2}
        assert {kind: len(each) for kind, each in side.latencies.items()} == {"create": 16, "read": 16}
        # Those of the first turn are no part of the result, but they were made.
        assert len(set(side.ids)) == 24
    assert len(table(us, peer, requests=8).splitlines()) == 4
    assert len(cpu_table(us, peer, requests=8).splitlines()) == 4


def test_a_round_is_compared_with_itself() -> None:
    # The machine was three times slower in the last round, for both.
    us, peer = (
        Side(name, port=0, spec={}, seconds={"read": seconds}, latencies={"read": [0.001] * 3})
        for name, seconds in (("ours", [2.0, 2.0, 6.0]), ("peer", [1.0, 1.0, 3.0]))
    )
    row = table(us, peer, requests=10).splitlines()[-1]
    assert row == "| read | 5 | 0.50 (0.50 to 0.50) | 1 | 1 |"
