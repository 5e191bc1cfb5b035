"""The command line, through the installed entry point."""

import json
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest

import cebm
from cebm import certificate
from cebm.cli import SamplerName, main

SCRIPT = [str(Path(sys.executable).parent / "cebm")]
MODULE = [sys.executable, "-m", "cebm"]


def call(*arguments: str, entry: list[str] = SCRIPT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*entry, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("entry", [SCRIPT, MODULE], ids=["script", "module"])
def test_help_is_quick(entry: list[str]) -> None:
    times = []
    for _ in range(3):  # the best of three: the machine may be busy
        begin = time.perf_counter()
        done = call("--help", entry=entry)
        times.append(time.perf_counter() - begin)
        assert done.returncode == 0, done.stderr
        assert "certify" in done.stdout and "bench" in done.stdout
    assert min(times) < 2


@pytest.mark.parametrize("command", [[], ["certify"], ["bench"]])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys\nfrom cebm.cli import main\n"
        f"try:\n    main({[*command, '--help']})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'gymnasium', 'matplotlib', 'numpy', 'jinja2'} & set(sys.modules)\n"
        "print('imported', sorted(heavy))"
    )
    done = call("-c", code, entry=[sys.executable])
    assert done.stdout.splitlines()[-1] == "imported []", done.stderr


def test_version() -> None:
    assert call("--version").stdout == f"cebm {cebm.__version__}\n"


def test_certify_prints_json_lines_alone_and_writes_the_figure(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "folder"
    done = call("certify", "--sampler", "langevin-ibc", "--json", "--out", str(out), "--seed", "3")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["target"], row["run"]) for row in rows] == [
        (target, run) for target in ("gaussian", "skewed", "double-well", "box") for run in ("chains", "single")
    ]
    for row in rows:
        keys = {"sampler", "target", "run", "mean_error", "std_error", "temperature", "acceptance", "verdict"}
        assert keys <= set(row)
        assert row["sampler"] == "langevin-ibc" and row["verdict"] == "does not sample" and row["acceptance"] is None
    assert (out / "certificate.jsonl").read_text() == done.stdout
    assert (out / "langevin.png").read_bytes().startswith(b"\x89PNG")


def test_certify_prints_a_table_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "SINGLE_STEPS", 1500)
    monkeypatch.setenv("COLUMNS", "80")
    main(["certify", "--sampler", "langevin-correct", "--seed", str(secrets.randbelow(2**31))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "langevin-correct fails on box."
    assert sum("chains" in line and "samples the target" in line for line in lines) == 3
    assert sum("biased" in line for line in lines) == 2
    assert max(map(len, lines)) <= 80


def test_the_names_are_those_of_the_certificate() -> None:
    assert get_args(SamplerName) == certificate.SAMPLERS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["certify", "--sampler", "nuts"], "nuts"),
        (["certify", "--out", "{file}/folder"], "Not a directory"),
        (["certify", "--out", "{file}"], "File exists"),
        (["bench", "chain", "--threads", "0"], "threads must be at least 1, got 0"),
        (["bench", "fast"], "chain"),
        ([], "certify"),
    ],
)
def test_a_users_mistake_is_a_message_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = call(*(argument.format(file=tmp_path / "file") for argument in arguments))
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = (
        "from cebm import certificate, cli; "
        "certificate.report = lambda *_: [print('x' * 1000) for _ in range(1000)]; cli.main(['certify'])"
    )
    shell = f'"{sys.executable}" -c "{code}" | head -c 1'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("x", "")


def test_bench_prints_a_json_line_per_thread_count() -> None:
    done = call("bench", "chain", "--json", "--threads", "1", "1", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["threads"] for row in rows] == [1, 1]
    assert all({"mm_gflops", "chain_gflops", "fraction"} <= set(row) for row in rows)
    assert done.stderr == ""


def test_repeated_samplers_add_up() -> None:
    """`--sampler a --sampler b` and `--sampler a b` are the same: no name is dropped."""
    code = (
        "from cebm import certificate, cli\n"
        "certificate.report = lambda names, *rest: print(*names)\n"
        "cli.main(['certify', '--sampler', 'mala', '--sampler', 'langevin-ibc', 'derivative-free'])"
    )
    done = call("-c", code, entry=[sys.executable])
    assert done.stdout == "mala langevin-ibc derivative-free\n", done.stderr
