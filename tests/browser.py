"""A headless Chromium, steered through pipes with real key presses and window widths, and a server for its pages.

Protocol: Chrome DevTools over ``--remote-debugging-pipe``: messages are JSON, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

DEADLINE_S = 60.0
"""Chosen far above the seconds of a start on a busy machine."""
_FLAGS = (
    "--headless", "--no-sandbox", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe",
)  # fmt: skip
_NO_GPU = ("--disable-gpu",)
WEBGPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")
"""Flags of WebGPU in software, without 16-bit floats."""
_KEYS = {
    "Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " "), "Home": (36, ""),
    "ArrowLeft": (37, ""), "ArrowUp": (38, ""), "ArrowRight": (39, ""), "ArrowDown": (40, ""),
}  # fmt: skip
"""Key → its code and the text it types."""


class Browser:
    """One page of a browser; script errors and failed requests are collected in ``problems``."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.problems: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + DEADLINE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._reading, 1 << 16)
            assert data, "the browser ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))

    def open(self, page: Path | str, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> None:
        """Open a file or an address at a window width in pixels, after clearing the problems of the previous page."""
        self.problems.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", media="", features=[scheme])
        self.send("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            state = self.run("[document.readyState, location.href]")
            if state[0] == "complete" and state[1] != "about:blank":
                return
            time.sleep(0.05)
        raise AssertionError(f"{page} is not loaded")

    def run(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys one after another: names of :data:`_KEYS`, or letters."""
        for key in keys:
            code, text = _KEYS.get(key, (ord(key[0].upper()), key))
            event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
            self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def column(self, table: str, position: int) -> list[str]:
        """Return the text of the cells of a column of a table, without hidden rows."""
        rows = f"[...document.querySelectorAll('#{table} tbody tr:not([hidden])')]"
        cells: list[str] = self.run(f"{rows}.map(row => row.cells[{position}].textContent)")
        return cells

    def wider_elements(self) -> list[str]:
        """Return the HTML of up to five elements beyond the right edge of the page, outside scrolling boxes."""
        found: list[str] = self.run(
            """(() => {
              const clips = node => node && node !== document.documentElement
                && (getComputedStyle(node).overflowX !== "visible" || clips(node.parentElement));
              const wide = [...document.body.querySelectorAll("*")].filter(node => {
                const box = node.getBoundingClientRect();
                return box.width && box.right > innerWidth + 1 && !clips(node);
              });
              const page = document.documentElement.scrollWidth > innerWidth ? ["the page scrolls sideways"] : [];
              return [...page, ...wide.slice(0, 5).map(node => node.outerHTML.slice(0, 200))];
            })()"""
        )
        return found

    def save_picture(self, path: Path, *, is_whole: bool = True) -> None:
        """Write a screenshot of the whole page, or of the window only."""
        picture = self.send("Page.captureScreenshot", captureBeyondViewport=is_whole)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextlib.contextmanager
def opened_browser(command: str, flags: Sequence[str] = _NO_GPU) -> Iterator[Browser]:
    """Start a browser and end it."""
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{to_us}'
        process = subprocess.Popen(
            ["bash", "-c", shell, command, *_FLAGS, *flags, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(to_us)
        try:
            yield Browser(from_browser, from_us)
        finally:
            os.close(from_us)
            process.terminate()
            process.wait(DEADLINE_S)
            os.close(from_browser)


class _Handler(SimpleHTTPRequestHandler):
    """Sends files with the headers that threads of WebAssembly require."""

    extensions_map: ClassVar[dict[str, str]] = {
        ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm",
        ".json": "application/json", "": "application/octet-stream",
    }  # fmt: skip

    def end_headers(self) -> None:
        """Isolate the page from pages of other hosts."""
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, links included, and yield the address of its first page."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/index.html"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
