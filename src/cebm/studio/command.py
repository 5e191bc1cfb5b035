"""`cebm studio`: policies from disk, a server, and the browser."""

import signal
import threading
import webbrowser
from typing import TYPE_CHECKING

from cebm.commands import import_pieces, named_task, set_threads
from cebm.loading import load
from cebm.studio.desk import Desk
from cebm.studio.server import StudioServer
from cebm.studio.subject import Subject, open_subject
from cebm.tasks import Task

if TYPE_CHECKING:
    from cebm.cli import Studio


def open_studio(arguments: "Studio") -> None:
    """Serves until SIGTERM or Ctrl-C. The first line of the output is the address."""
    set_threads(arguments.threads)
    import_pieces(arguments.with_)
    if not arguments.policies:
        raise ValueError("name at least one run directory or policy directory")
    subjects = subjects_of(arguments)
    over = threading.Event()
    kept = {number: signal.signal(number, lambda *_: over.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with StudioServer(Desk(subjects), arguments.port) as server:
            print(server.url, flush=True)
            if not arguments.no_open:
                webbrowser.open(server.url)
            while not over.wait(1.0):
                pass
    finally:
        for number, before in kept.items():
            signal.signal(number, before)


def subjects_of(arguments: "Studio") -> list[Subject]:
    """The policies that the command line names, with the data and the task that it names."""
    subjects = []
    for path in arguments.policies:
        task: Task | None = None
        if arguments.task is not None:
            particle = {"dim": load(path).columns[1]} if arguments.task == "particle" else {}
            task = named_task(arguments.task, particle)
        subjects.append(open_subject(path, arguments.data, task))
    return subjects
