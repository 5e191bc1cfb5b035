"""The command line, through the installed entry point."""

import contextlib
import json
import os
import pty
import secrets
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import cebm
from cebm import certificate
from cebm.certificate import judging
from cebm.cli import COMMANDS, SamplerName, main
from waiting import PATIENCE

SCRIPT = [str(Path(sys.executable).parent / "cebm")]
BENCH = pytest.mark.skipif(
    not (Path(cebm.__file__).parents[2] / "benchmarks/__init__.py").exists(), reason="needs benchmarks/"
)
MODULE = [sys.executable, "-m", "cebm"]


def call(*arguments: str, entry: list[str] = SCRIPT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*entry, *arguments], capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("entry", [SCRIPT, MODULE], ids=["script", "module"])
def test_help_is_quick(entry: list[str]) -> None:
    """By the processor's time, of which other processes take none; the best of three."""
    times = []
    for _ in range(3):
        begin = os.times()
        done = call("--help", entry=entry)
        end = os.times()
        times.append(end.children_user + end.children_system - begin.children_user - begin.children_system)
        assert done.returncode == 0, done.stderr
        assert "certify" in done.stdout and "bench" in done.stdout
    assert min(times) < 2


def test_help_imports_nothing_heavy() -> None:
    commands = [[], *([name] for name in COMMANDS if name != "train")]  # its settings need torch
    code = (
        "import sys\nfrom cebm.cli import main\n"
        f"for command in {commands}:\n"
        "    try:\n        main([*command, '--help'])\n    except SystemExit:\n        pass\n"
        "heavy = {'torch', 'gymnasium', 'matplotlib', 'numpy', 'jinja2'} & set(sys.modules)\n"
        "print('imported', sorted(heavy))"
    )
    done = call("-c", code, entry=[sys.executable])
    assert done.stdout.splitlines()[-1] == "imported []", done.stderr


CERTIFY_QUICKLY = (
    "from cebm import cli; from cebm.certificate import judging; judging.SINGLE_STEPS = 1001; "
    "judging.SINGLE_REPLICAS = 2; judging.CHAINS = 20; "
    "cli.main(['certify', '--sampler', 'derivative-free'])"
)


def on_a_terminal(*arguments: str, **env: str) -> str:
    """What a command prints where stdout and stderr are a terminal."""
    ours, theirs = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=theirs, stderr=theirs, env=plain | {"TERM": "xterm-256color"} | env
    )
    os.close(theirs)
    printed = b""
    with contextlib.suppress(OSError):  # Linux says so when the other end is closed
        while part := os.read(ours, 4096):
            printed += part
    os.close(ours)
    process.wait(timeout=PATIENCE)
    return printed.decode()


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    "arguments",
    [["-m", "cebm", "--help"], ["-m", "cebm", "demos", "--nope"], ["-c", CERTIFY_QUICKLY]],
    ids=["help", "mistake", "table and spinner"],
)
def test_no_color_means_no_escape_codes(arguments: list[str]) -> None:
    printed = on_a_terminal(*arguments, NO_COLOR="1")
    assert len(printed) > 50 and "\x1b" not in printed


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_terminal_gets_colours_otherwise() -> None:
    assert "\x1b[" in on_a_terminal("-m", "cebm", "--help")


def test_an_import_that_fails_inside_cebm_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cebm.commands", None)
    with pytest.raises(ImportError):
        main(["train"])


def test_commands_of_the_checkout_say_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cebm, "__file__", str(tmp_path / "lib/cebm/__init__.py"))
    for command in ("bench", "reproduce"):
        with pytest.raises(SystemExit) as stop:
            main([command])
        assert stop.value.code == 2
        assert "needs a checkout of cebm's repository" in capsys.readouterr().err


def test_memory_that_is_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def large(*_: object) -> None:
        raise MemoryError("Unable to allocate 7 PiB")

    monkeypatch.setattr(certificate, "report", large)
    with pytest.raises(SystemExit) as stop:
        main(["certify"])
    assert stop.value.code == 2 and capsys.readouterr().err.startswith("cebm: Unable to allocate 7 PiB")


def test_version() -> None:
    assert call("--version").stdout == f"cebm {cebm.__version__}\n"


def test_certify_prints_json_lines_alone_and_writes_the_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "SINGLE_STEPS", 1100)
    monkeypatch.setattr(judging, "CHAINS", 300)
    monkeypatch.setattr(judging, "SINGLE_REPLICAS", 16)
    out = tmp_path / "deep" / "folder"
    main(["certify", "--sampler", "langevin-ibc", "--json", "--out", str(out), "--seed", "3"])
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [(row["target"], row["run"]) for row in rows] == [
        (target.name, run) for target in certificate.analytic_targets() for run in ("chains", "single")
    ]
    for row in rows:
        keys = {"sampler", "target", "run", "mean_error", "std_error", "temperature", "acceptance", "verdict"}
        assert keys <= set(row)
        assert row["sampler"] == "langevin-ibc" and row["verdict"] == "does not sample" and row["acceptance"] is None
    assert (out / "certificate.jsonl").read_text() == printed
    assert (out / "langevin.png").read_bytes().startswith(b"\x89PNG")


def test_certify_prints_a_table_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "SINGLE_STEPS", 1500)
    monkeypatch.setenv("COLUMNS", "80")
    main(["certify", "--sampler", "langevin-correct", "--seed", str(secrets.randbelow(2**31))])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "langevin-correct fails on box."
    assert sum("chains" in line and "samples the target" in line for line in lines) == 7
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
        pytest.param(["bench", "chain", "--threads", "0"], "threads must be at least 1, got 0", marks=BENCH),
        (["bench", "fast"], "chain"),
        ([], "certify"),
    ],
)
def test_a_users_mistake_is_a_message_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        main([argument.format(file=tmp_path / "file") for argument in arguments])
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert message in printed.err and printed.out == ""


def test_a_reader_that_leaves_early_is_no_error() -> None:
    code = (
        "import sys, types; from cebm import cli; "
        "much = lambda _: [print('x' * 1000) for _ in range(1000)]; "
        "sys.modules['cebm.commands'] = types.SimpleNamespace(certify_samplers=much); cli.main(['certify'])"
    )
    shell = f'"{sys.executable}" -c "{code}" | head -c 1'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == ("x", "")


@BENCH
def test_bench_prints_a_json_line_per_thread_count() -> None:
    done = call("bench", "chain", "--json", "--threads", "1", "1", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["threads"] for row in rows] == [1, 1]
    assert all({"mm_gflops", "chain_gflops", "fraction"} <= set(row) for row in rows)
    assert done.stderr == ""


def test_repeated_samplers_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--sampler a --sampler b` and `--sampler a b` are the same: no name is dropped."""
    seen: list[object] = []
    monkeypatch.setattr(certificate, "report", lambda names, *rest: seen.append(names))
    main(["certify", "--sampler", "mala", "--sampler", "langevin-ibc", "derivative-free"])
    assert seen == [("mala", "langevin-ibc", "derivative-free")]
