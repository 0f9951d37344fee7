"""Clocks never run backwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.clock import Clock, MonotonicClock, VirtualClock, boot


def test_a_virtual_clock_stands_still_until_told() -> None:
    clock = VirtualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    assert clock.advance(1.5) == clock.now() == 6.5
    assert clock.advance(0) == 6.5
    assert clock.advance_to(9.0) == clock.now() == 9.0
    assert clock.advance_to(2.0) == clock.now() == 9.0


def test_a_virtual_clock_refuses_to_run_backwards() -> None:
    clock = VirtualClock()
    with pytest.raises(ValueError, match=r"^seconds is -1; a clock cannot run backwards$"):
        clock.advance(-1)
    with pytest.raises(ValueError, match=r"^seconds is nan; "):
        clock.advance(float("nan"))
    assert clock.now() == 0.0


def test_the_machine_clock_never_falls() -> None:
    clock: Clock = MonotonicClock()
    times = [clock.now() for _ in range(1000)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("file", "name"), [(b"0a1B2c3d-1111-2222-3333-444444444444\n", "0a1B2c3d"), (None, ""), (b"\xff", "")]
)
def test_a_boot_has_a_name_where_the_system_gives_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: bytes | None, name: str
) -> None:
    if file is not None:
        (tmp_path / "boot_id").write_bytes(file)
    monkeypatch.setattr("runtime.clock._BOOT_ID", tmp_path / "boot_id")
    assert boot.__wrapped__() == name
