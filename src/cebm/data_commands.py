"""`cebm data`: what is in demonstrations of any format, and writing them in cebm's own. Needs no torch."""

import json
from typing import TYPE_CHECKING

from cebm.demonstrations import Demonstrations, open_demonstrations
from cebm.demonstrations.files import check_target
from cebm.demonstrations.inspecting import inspect
from cebm.progress import share_bar

if TYPE_CHECKING:
    from cebm.cli import Data


def data_command(arguments: "Data") -> None:
    """Inspects data, or converts them."""
    if arguments.what == "inspect":
        if arguments.out is not None:
            raise ValueError(f"inspect writes nothing, so it takes no second path ({arguments.out})")
        found = inspect(_read(arguments))
        print(json.dumps(found.to_json()) if arguments.json else found)
        return
    if arguments.out is None:
        raise ValueError("convert needs a second path, where it writes")
    if arguments.out.exists() and arguments.out.resolve() == arguments.path.resolve():
        raise ValueError(f"{arguments.out}: convert does not write over what it reads")
    check_target(arguments.out)  # before the long work
    data = _read(arguments)
    data.save(arguments.out)
    print(f"{data.summary()}\n{arguments.out}")


def _read(arguments: "Data") -> Demonstrations:
    words = {"obs": arguments.data_obs, "action": arguments.data_action, "episodes": arguments.data_episodes}
    with share_bar(f"reading {arguments.path.name}") as listen:
        return open_demonstrations(arguments.path, **words, listen=listen)
