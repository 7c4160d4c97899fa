"""Invalid input of `weft profile`: refused before any rank starts."""

from pathlib import Path

import pytest

from tests.cli.test_bad_input import refuse
from tests.lab.jobs import write_job


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "0,one"], "ranks are numbers with commas, or all"),
        (["--ranks", "5", "--nproc-per-node", "2"], "rank 5 of a job with 2 ranks"),
        (["--out", "/proc/profile"], "a run writes metrics"),
        (["--compare", "missing.toml", "."], "there is no file missing.toml"),
    ],
)
def test_options_are_refused(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refuse(capsys, monkeypatch, "profile", str(write_job(tmp_path)), *options)
    assert words in " ".join(text.split())


def test_plans_need_a_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "name a job" in refuse(capsys, monkeypatch, "profile")
    assert "name a job" in refuse(capsys, monkeypatch, "profile", "--compare", "a.toml", "b.toml")


def test_a_folder_without_a_profile_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no profile in" in refuse(capsys, monkeypatch, "profile", str(tmp_path))
    sides = ["--compare", str(tmp_path), str(tmp_path)]
    assert "a profile has a file summary.json" in refuse(capsys, monkeypatch, "profile", *sides)
