"""Progress: parts of a whole, and stages with their shares."""

from __future__ import annotations

import io
import sys

import pytest

from qsample.progress import Progress, Stages, part, shown, unreported


def work(progress: Progress | None) -> None:
    stages = Stages(progress, {"first": 3, "second": 1})
    advance = stages.begin("first")
    advance(0.5)
    stages.begin("second")
    stages.finish()


def test_stages_take_their_shares() -> None:
    seen: list[tuple[str, float]] = []
    work(lambda stage, fraction: seen.append((stage, fraction)))
    assert seen == [("first", 0.0), ("first", 0.375), ("second", 0.75), ("done", 1.0)]
    work(None)


def test_parts_make_one_whole_that_is_done_once() -> None:
    seen: list[tuple[str, float]] = []

    def progress(stage: str, fraction: float) -> None:
        seen.append((stage, fraction))

    work(part(progress, 0.0, 0.5))
    work(part(progress, 0.5, 1.0))
    fractions = [fraction for _, fraction in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert [stage for stage, _ in seen].count("done") == 1
    work(part(None, 0.0, 0.5))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_for_callers_without_a_callback_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)  # commands that other tests run here set it
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with shown(None) as report:
        report("tracing", 0.25)
        assert "tracing:  25%|" in terminal.getvalue().split("\r")[-1]
    assert not terminal.getvalue().split("\r")[-1].strip()  # it is gone at the end
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with shown(None) as report:
        assert report is unreported
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS")
    monkeypatch.setattr(sys, "stderr", file)
    with shown(None) as report:
        report("tracing", 0.25)
    with shown(print) as report:
        assert report is print
    assert file.getvalue() == ""
