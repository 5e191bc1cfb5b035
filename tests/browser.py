"""A small driver of Chromium by its DevTools protocol over a websocket, for tests, gallery and benchmarks."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websockets.sync.client

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"
"""Where tests keep pictures of what they saw; the public workflow offers them for download."""


def chromium() -> str | None:
    """The browser on this machine; None where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


class Browser:
    """One page. It keeps what the page wrote to the console and what it asked for."""

    def __init__(self, address: str) -> None:
        self._socket = websockets.sync.client.connect(address, max_size=2**26, ping_interval=None)
        self._number = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One command of the protocol and its answer; events that come meanwhile are kept."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": arguments}))
        while True:
            told = json.loads(self._socket.recv(timeout=120))
            if told.get("id") == self._number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                return told["result"]
            self._event(told.get("method"), told.get("params", {}))

    def _event(self, method: str | None, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(f"{details['text']} {details.get('exception', {}).get('description', '')}")
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.errors.append(str([each.get("value") for each in told["args"]]))
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    def open(self, url: str, ready: str = "document.documentElement?.dataset.ready === '1'") -> None:
        """Goes to an address and waits until its page is ready: a studio, by default."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.until(ready)

    def run(self, script: str) -> Any:
        """The value of an expression of the page."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{script}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def until(self, script: str, seconds: float = 120.0) -> Any:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while True:
            found = self.run(script)
            if found:
                return found
            if time.monotonic() > end:
                raise TimeoutError(f"after {seconds:g} s it is still not true that {script}; errors: {self.errors}")
            time.sleep(0.1)

    def drag(self, start: tuple[float, float], end: tuple[float, float], moves: int = 4) -> None:
        """Drags with the mouse."""
        mouse = {"button": "left", "buttons": 1, "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=start[0], y=start[1], **mouse)
        for i in range(1, moves + 1):
            x, y = (a + (b - a) * i / moves for a, b in zip(start, end, strict=True))
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, **mouse)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], **mouse)

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """Sets the size of the window and the preferred colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def keep(self, name: str) -> None:
        """Keeps a screenshot in `SCREENSHOTS`."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.picture(SCREENSHOTS / f"{name}.png")

    def picture(self, path: Path) -> None:
        """Writes a screenshot."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium with an empty profile; the caller checks that there is one."""
    program = chromium()
    if program is None:
        raise FileNotFoundError("there is no Chromium on this machine")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        flags += ["--disable-dev-shm-usage", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            [program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield Browser(_address(Path(profile), process))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            process.wait(timeout=20)


def _address(profile: Path, process: "subprocess.Popen[bytes]") -> str:
    """That of the first page, which the browser tells in a file and by HTTP."""
    import urllib.request

    told, end = profile / "DevToolsActivePort", time.monotonic() + 60
    while not (told.exists() and told.read_text().count("\n")):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("Chromium did not start")
        time.sleep(0.1)
    port = told.read_text().split("\n")[0]
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=20) as answer:
            pages = [each for each in json.load(answer) if each["type"] == "page"]
        if pages:
            return pages[0]["webSocketDebuggerUrl"]
        time.sleep(0.1)
