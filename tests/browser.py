"""A headless Chromium for tests, driven through the DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--remote-debugging-port=0", "--hide-scrollbars", "--mute-audio",
)  # fmt: skip
_START_S, _CALL_S = 60.0, 60.0


class BrowserPage:
    """A tab. `errors` are messages of its console that are warnings or errors, and exceptions."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._ids = connection, itertools.count(1)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.errors: list[str] = []
        self.requests: list[str] = []  # addresses, except data: and blob:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(timeout=_CALL_S))
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._record(answer)

    def _record(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("data:", "blob:")):
                    self.requests.append(url)

    def open(self, url: str, width: int = 1400, height: int = 1000, theme: str = "light") -> None:
        """Load a page in a window of this size."""
        self.resize(width, height)
        media = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self.call("Page.navigate", url=url)

    def resize(self, width: int, height: int = 1000) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, of its promise if it is one."""
        reply = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60.0) -> Any:
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} after {seconds:g} s; console: {self.errors}")
            time.sleep(0.1)
        return value

    def press(self, key: str) -> None:
        """Press and release a key, such as "Tab"."""
        codes = {"Tab": 9, "Enter": 13, "ArrowDown": 40, "ArrowUp": 38}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
            self.call("Input.dispatchKeyEvent", **event, **(text if kind == "keyDown" else {}))

    def save_screenshot(self, path: Path) -> None:
        """Save the page from top to bottom as PNG."""
        reply = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(reply["data"]))


@contextmanager
def open_browser(folder: Path) -> Iterator[BrowserPage]:
    """Start Chromium with a profile in `folder`, and open a tab."""
    assert CHROMIUM is not None
    log = folder / "chromium.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [CHROMIUM, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        address = _wait_for_address(log, process)
        with connect(address, max_size=None, open_timeout=_START_S, compression=None) as connection:
            yield BrowserPage(connection)
    finally:
        process.terminate()
        process.wait(timeout=_START_S)


def _wait_for_address(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if match := re.search(r"DevTools listening on (ws://\S+)", log.read_text(errors="replace")):
            return match[1]
        time.sleep(0.1)
    raise RuntimeError(f"chromium has not started: {log.read_text(errors='replace')[-2000:]}")
