"""`cebm reproduce` and `cebm bench` need the repository, and say so where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cebm.cli import main
from reproduction import command
from reproduction.claims import CLAIMS
from reproduction.claims.integral import Integral
from reproduction.claims.validation import Validation
from reproduction.command import with_reference

ROOT = Path(__file__).parents[2]


def called(*arguments: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """A Python process that finds cebm in `path`."""
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("name", "package"), [("reproduce", "reproduction"), ("bench", "benchmarks")])
def test_an_installed_library_says_that_the_command_needs_a_checkout(name: str, package: str, tmp_path: Path) -> None:
    installed = tmp_path / "lib" / "site-packages"
    shutil.copytree(ROOT / "src/cebm", installed / "cebm", ignore=shutil.ignore_patterns("__pycache__"))
    done = called("-m", "cebm", name, cwd=tmp_path, path=installed)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr
    assert "needs a checkout of cebm's repository" in done.stderr and f"there is no {package} in" in done.stderr


def test_worker_processes_find_the_package(tmp_path: Path) -> None:
    """From another folder, with only the library on the path, as an editable install has it."""
    arguments = ["-m", "cebm", "reproduce", "integral", "--scale", "smoke", "--seeds", "1", "--workers", "1"]
    done = called(*arguments, cwd=tmp_path, path=ROOT / "src")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" 1 integral") and (tmp_path / "results/01-integral.json").is_file()


def test_the_package_is_a_command_too() -> None:
    done = called("-m", "reproduction", "--help", cwd=ROOT, path=ROOT / "src")
    assert done.returncode == 0, done.stderr
    assert "--reference" in done.stdout


def test_the_reference_curves_go_to_the_claim_that_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_reference([Integral(), Validation()], tmp_path)[1] == Validation(str(tmp_path))
    assert [claim.slug for claim in with_reference(CLAIMS, tmp_path)] == [claim.slug for claim in CLAIMS]
    monkeypatch.setattr(command, "REFERENCE", tmp_path)
    assert with_reference([Validation()], None) == [Validation(str(tmp_path))]
    monkeypatch.setattr(command, "REFERENCE", tmp_path / "nowhere")
    assert with_reference([Validation()], None) == [Validation(None)]


def test_a_reference_that_is_no_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", "validation", "--reference", str(tmp_path / "nowhere"), "--out", str(tmp_path / "results")])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"cebm: reference must be a folder of reference curves, got {tmp_path}/nowhere\n"
    assert not (tmp_path / "results").exists()
