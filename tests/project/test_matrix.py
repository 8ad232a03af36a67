"""The matrix of releases: what it asks pip for, which files it runs, and what it reads from pytest."""

import sys

import pytest

from tests.project.test_file_sizes import ROOT

sys.path.insert(0, str(ROOT / "tools"))
matrix = pytest.importorskip("matrix")


def test_a_series_is_its_latest_release_and_a_release_is_itself() -> None:
    assert matrix.releases_of("2.12") == ("2.12.*", "1.7.*", "1.7.*")
    assert matrix.releases_of("2.12.1") == ("2.12.1", "1.7.*", "1.7.*")
    with pytest.raises(SystemExit, match=r"--torch: 1\.0 is not among 2\.11"):
        matrix.releases_of("1.0")


def test_the_default_suites_are_there() -> None:
    files = matrix.files_of(matrix.SUITES)
    assert {"tests/sharding", "tests/table", "tests/checkpoint/test_state_dict_dcp.py"} <= set(files)
    with pytest.raises(SystemExit, match="nothing is called tests/nothing"):
        matrix.files_of(["tests/nothing*"])


@pytest.mark.parametrize(
    ("line", "passed", "failed"),
    [
        ("=== 12 passed in 3.10s ===", 12, 0),
        ("2 failed, 12 passed, 3 skipped in 3.10s", 12, 2),
        ("1 failed, 3 passed, 2 errors in 4s", 3, 3),
        ("no tests ran in 0.01s", 0, 0),
    ],
)
def test_the_closing_line_of_pytest_is_read(line: str, passed: int, failed: int) -> None:
    assert matrix.outcome_of(f"5 passed\n{line}\n") == {"passed": passed, "failed": failed}


def test_the_table_has_a_column_for_each_version() -> None:
    row = {"python": "3.11.7", "torch": "2.13.0+cpu", "passed": 7, "failed": 0, "seconds": 1}
    head, line = matrix.table_of([row]).splitlines()
    assert head.split()[:3] == ["python", "torch", "fbgemm_gpu"]
    assert line.index("2.13.0+cpu") == head.index("torch") and line.index("7", 20) == head.index("passed")
