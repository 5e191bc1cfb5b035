"""A policy behind a socket: `cebm.serve` and `cebm.connect`, in openpi's wire format. docs/serving.md has all of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cebm.serving.requests import Limits as Limits

if TYPE_CHECKING:
    from cebm.serving.client import RemotePolicy
    from cebm.serving.server import Server


def serve(
    policy: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    tls_certificate: str | Path | None = None,
    tls_key: str | Path | None = None,
    limits: Limits | None = None,
    name: str = "policy",
) -> "Server":
    """Serves a policy and gives the `Server`, which has `url`, `reload`, `wait` and `close`, and closes itself at the
    end of a `with` block. The policy, any object with `act` and a `specification`, acts in a thread of this process; a
    process of its own talks to the clients. Port 0 takes one that is free; a host that other machines reach needs a
    token."""
    from cebm.serving.server import Server

    options: dict[str, Any] = {"tls_certificate": tls_certificate, "tls_key": tls_key, "limits": limits, "name": name}
    return Server(policy, host=host, port=port, token=token, **options)


def connect(
    url: str,
    *,
    token: str | None = None,
    tls_ca: str | Path | None = None,
    deadline_ms: float | None = None,
    timeout_s: float = 30.0,
    reconnect_s: float = 30.0,
) -> "RemotePolicy":
    """A policy behind a server, as `RemotePolicy`: with the `act`, `propose` and `reset` of a policy of ours."""
    from cebm.serving.client import RemotePolicy

    times: dict[str, Any] = {"deadline_ms": deadline_ms, "timeout_s": timeout_s, "reconnect_s": reconnect_s}
    return RemotePolicy(url, token=token, tls_ca=tls_ca, **times)
