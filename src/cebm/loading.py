"""Reading a saved policy: everything that a file says is checked before anything large is built."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cebm.acting import Acting
from cebm.energies.base import EnergySettings
from cebm.legacy import upgraded_policy
from cebm.policy import FORMAT, VERSION, EnergyPolicy
from cebm.settings import StorageError, from_json
from cebm.spaces import Box, Specification, usable_device
from cebm.storage import load_bundle, take
from cebm.units import Conversion


def load(directory: str | Path, device: torch.device | str = "cpu") -> EnergyPolicy:
    """Reads a policy that `save` wrote, or the best one of a run directory; a StorageError says what is wrong with a
    damaged, altered or newer one. A policy made of your own pieces needs their module imported first."""
    where, place = Path(directory), usable_device(device)
    if not where.is_dir():
        raise StorageError(f"{where}: there is no such directory; a saved policy is one, and so is a run")
    if (where / "run.json").exists():
        where = where / "best"
    header, tensors = load_bundle(where, FORMAT, VERSION)
    try:
        if header["version"] < 3:
            header, tensors = upgraded_policy(header, tensors, str(where))
        return _rebuild(header, tensors, str(where), place)
    except StorageError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise StorageError(f"{where}: {error or type(error).__name__}") from error


def _rebuild(header: dict[str, Any], tensors: dict[str, Tensor], where: str, device: torch.device) -> EnergyPolicy:
    spec = from_json(take(header, "spec", where), Specification, where)
    settings = from_json(take(header, "energy", where), EnergySettings, where)
    acting = from_json(take(header, "acting", where), Acting, where)
    boxes = {}
    for name, dim in (("obs", spec.obs_dim), ("act", spec.act_dim)):
        centre, scale = (take(tensors, f"{name}_box.{part}", where) for part in ("centre", "scale"))
        margin = from_json(take(header, f"{name}_margin", where), float, f"{where}: {name}_margin")
        boxes[name] = box = Box(centre, scale, margin).to(device)
        if box.dim != dim:
            raise StorageError(f"{where}: {name}_box has {box.dim} dimensions, the specification {dim}")
    weights = {name.removeprefix("energy."): value for name, value in tensors.items() if name.startswith("energy.")}
    _check_sizes(settings, spec, weights, where)
    # A generator of its own: loading leaves torch's global one alone.
    energy = settings.build(spec, torch.Generator())
    floating = next((value.dtype for value in weights.values() if value.is_floating_point()), torch.float32)
    energy = energy.to(floating)
    try:
        energy.load_state_dict(weights)
    except RuntimeError as error:
        raise StorageError(f"{where}: the weights do not fit the settings: {error}") from error
    conversion = from_json(header.get("units"), Conversion | None, f"{where}: units")
    low, high, data_energies, seen = (
        tensors[name].to(device) if name in tensors else None for name in ("low", "high", "data_energies", "seen")
    )
    pieces = (energy.to(device), boxes["obs"], boxes["act"], acting, spec, settings)
    from cebm.trust import Calibration  # its guard loads policies itself

    thresholds = from_json(header.get("calibration"), Calibration | None, f"{where}: calibration")
    return EnergyPolicy(*pieces, low, high, data_energies, conversion, seen, thresholds)


def _check_sizes(settings: Any, spec: Specification, weights: dict[str, Tensor], where: str) -> None:
    """Builds the energy without memory and compares it with the weights in the file, so that a header that lies about
    its sizes is refused before anything large is made."""
    try:
        with torch.device("meta"), _at_most(weights, where):
            built = {name: tuple(value.shape) for name, value in settings.build(spec, None).state_dict().items()}
    except StorageError:
        raise
    except Exception:  # a user's energy may not be made for this; the real one says what is wrong, if anything is
        return
    stored = {name: tuple(value.shape) for name, value in weights.items()}
    for name in sorted(built.keys() | stored.keys()):
        if built.get(name) != stored.get(name):
            raise StorageError(
                f"{where}: the weights do not fit the settings: {name} is {stored.get(name, 'missing')} in the file, "
                f"{built.get(name, 'not there')} by the settings"
            )


@contextmanager
def _at_most(weights: dict[str, Tensor], where: str) -> Iterator[None]:
    """Stops a build, in this thread, of far more weights than these. Ten times as many may come and go meanwhile, as
    where a layer's weights are replaced after it is made."""
    thread, tensors, numbers = threading.get_ident(), 0, 0
    most = 10 * len(weights) + 10, 10 * sum(value.numel() for value in weights.values()) + 1000

    def count(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal tensors, numbers
        if threading.get_ident() != thread or parameter is None:
            return
        tensors, numbers = tensors + 1, numbers + parameter.numel()
        if tensors > most[0] or numbers > most[1]:
            raise StorageError(f"{where}: the weights do not fit the settings: those build far more than the file has")

    handle = nn.modules.module.register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
