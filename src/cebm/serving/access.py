"""Who may connect: the token, TLS, and the HTTP side of the server's one port."""

import hmac
import ipaddress
import ssl
from http import HTTPStatus
from pathlib import Path

LEAST_TOKEN = 16


def read_token(path: str | Path) -> str:
    """The token in a file: its only line, of at least 16 characters."""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"token_file {path}: a token is of ASCII characters") from error
    return checked_token(token, f"token_file {path}")


def checked_token(token: str, name: str = "token") -> str:
    """The token, if it is long enough and fits into a header."""
    if len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{name}: a token has at least {LEAST_TOKEN} printable ASCII characters and no space")
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_place(host: str, token: str | None) -> None:
    """A ValueError where a server without a token would listen to other machines."""
    if token is None and not is_loopback(host):
        raise ValueError(f"host {host} is reached from other machines: a token is needed (--token-file FILE)")


def allowed(authorization: str | None, token: str | None) -> bool:
    """Whether a client's header `Authorization: Api-Key …` has the token; the comparison takes the same time for every
    wrong one."""
    if token is None:
        return True
    given = (authorization or "").encode("utf-8", "replace")
    return hmac.compare_digest(given, f"Api-Key {token}".encode())


def server_tls(certificate: str | Path | None, key: str | Path | None) -> ssl.SSLContext | None:
    """TLS by a certificate's file (with its chain) and its key's; None where there are none."""
    if certificate is None and key is None:
        return None
    if certificate is None:
        raise ValueError("tls_key needs tls_certificate beside it")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except ssl.SSLError as error:
        raise ValueError(f"tls_certificate {certificate}: it cannot be loaded with its key: {error.reason}") from error
    return context


STATUS = {
    "unauthorised": HTTPStatus.UNAUTHORIZED,
    "foreign-origin": HTTPStatus.FORBIDDEN,
    "too-many-connections": HTTPStatus.SERVICE_UNAVAILABLE,
    "stopping": HTTPStatus.SERVICE_UNAVAILABLE,
    "not-found": HTTPStatus.NOT_FOUND,
}
"""The HTTP status of a refused handshake."""
