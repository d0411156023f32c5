"""Runs the uv of this environment with the package sources that pip is configured to use.

    .venv/bin/python launch/uv.py pip install --requirement FILE

uv installs in a fraction of pip's time but reads none of pip's configuration: what pip takes from
its environment variables (PIP_INDEX_URL, ...) and files is handed over here.
"""

import ast
import os
import subprocess
import sys

_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
_VARIABLES = {
    "cert": ["SSL_CERT_FILE"],
    "client-cert": ["SSL_CLIENT_CERT"],
    "proxy": ["HTTP_PROXY", "HTTPS_PROXY"],
    "default-timeout": ["UV_HTTP_TIMEOUT"],
    "timeout": ["UV_HTTP_TIMEOUT"],
}


def configured(listing: str) -> dict[str, str]:
    """What `pip config list` says of `pip install`; an environment variable goes before a file.

    >>> configured("global.find-links='/a /b'\\nglobal.cert='/c'\\ninstall.cert='/d'")
    {'find-links': '/a /b', 'cert': '/d'}
    """
    settings = {}
    lines = [line.partition("=") for line in listing.splitlines()]
    for section in ("global.", "install.", ":env:."):
        for key, _, value in lines:
            if key.startswith(section):
                settings[key.removeprefix(section)] = str(ast.literal_eval(value))
    return settings


def options(settings: dict[str, str]) -> list[str]:
    """Where uv looks.

    >>> options({"find-links": "/a /b", "cert": "/c"})
    ['--index-strategy=unsafe-best-match', '--find-links=/a', '--find-links=/b']
    """
    # As pip does: the best version of all sources.
    found = ["--index-strategy=unsafe-best-match"]
    if settings.get("no-index", "").lower() in ("1", "on", "true", "y", "yes"):
        found.append("--no-index")
    for key, option in _OPTIONS.items():
        found += [f"{option}={value}" for value in settings.get(key, "").split()]
    return found


def environment(settings: dict[str, str]) -> dict[str, str]:
    """How uv gets there: what it takes from its environment only.

    >>> environment({"find-links": "/a /b", "cert": "/c"})
    {'SSL_CERT_FILE': '/c'}
    """
    return {name: settings[key] for key in settings for name in _VARIABLES.get(key, ())}


def main() -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings = configured(listing)
    given = environment(settings) | dict(os.environ)
    uv = os.path.join(os.path.dirname(sys.executable), "uv")
    command = [uv, *sys.argv[1:], "--python", sys.executable, *options(settings)]
    os.execve(uv, command, given)


if __name__ == "__main__":
    main()
