"""A SLURM of one node on this machine, for tests: with its own configuration, keys, ports and folders."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "squeue")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1
MinJobAge=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def found(program: str) -> str | None:
    """Where a program is; daemons are often not on a user's path."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def missing() -> str:
    """Why SLURM cannot be started here; empty where it can."""
    absent = [program for program in PROGRAMS if found(program) is None]
    if absent:
        return f"no {', '.join(absent)} (on Debian: apt-get install slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "the daemons of SLURM need root"


@contextmanager
def running(folder: Path) -> Iterator[Path]:
    """Starts it; the path of its configuration, to be put into SLURM_CONF."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    ports = {name: _free_port() for name in ("controller", "node")}
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(host=socket.gethostname(), folder=folder, **ports))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    munge = [f"--{name}={folder}/munge.{end}" for name, end in (("socket", "socket"), ("pid-file", "pid"))]
    munge += [f"--{name}={folder}/munge.{end}" for name, end in (("log-file", "log"), ("seed-file", "seed"))]
    environment = os.environ | {"SLURM_CONF": str(configuration)}
    try:
        _start("munged", "--force", f"--key-file={key}", *munge)
        for daemon in ("slurmctld", "slurmd"):
            _start(daemon, "-f", str(configuration))
        _wait_for_the_node(environment)
        yield configuration
    finally:
        for name in ("slurmd", "slurmctld", "munge"):
            _end(folder / f"{name}.pid")


def _start(program: str, *arguments: str) -> None:
    subprocess.run([str(found(program)), *arguments], check=True, timeout=60)


def _wait_for_the_node(environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        told = subprocess.run([str(found("sinfo")), "-h", "-o", "%T"], capture_output=True, text=True, env=environment)
        if told.stdout.strip() == "idle":
            return
        time.sleep(0.5)
    raise TimeoutError("the node of the test's SLURM did not come up")


def _end(pid_file: Path) -> None:
    """Ends a daemon that was started here, by its number."""
    try:
        number = int(pid_file.read_text())
        os.kill(number, signal.SIGTERM)
        for _ in range(100):
            os.kill(number, 0)
            time.sleep(0.1)
    except (OSError, ValueError):
        return


def _free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return int(each.getsockname()[1])
