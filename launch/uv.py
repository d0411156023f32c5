"""Run the uv of this environment with the package sources that pip is configured to use.

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


def parse_pip_config(listing: str) -> dict[str, str]:
    """Return the settings of `pip install`; an environment variable goes before a file.

    Args:
        listing: Output of `pip config list`.

    >>> parse_pip_config("global.find-links='/a /b'\\nglobal.cert='/c'\\ninstall.cert='/d'")
    {'find-links': '/a /b', 'cert': '/d'}
    """
    settings = {}
    lines = [line.partition("=") for line in listing.splitlines()]
    for section in ("global.", "install.", ":env:."):
        for key, _, value in lines:
            if key.startswith(section):
                settings[key.removeprefix(section)] = str(ast.literal_eval(value))
    return settings


def build_options(settings: dict[str, str]) -> list[str]:
    """Return the options of uv with the package sources.

    >>> build_options({"find-links": "/a /b", "cert": "/c"})
    ['--index-strategy=unsafe-best-match', '--find-links=/a', '--find-links=/b']
    """
    # As pip does: the best version of all sources.
    options = ["--index-strategy=unsafe-best-match"]
    if settings.get("no-index", "").lower() in ("1", "on", "true", "y", "yes"):
        options.append("--no-index")
    for key, option in _OPTIONS.items():
        options += [f"{option}={value}" for value in settings.get(key, "").split()]
    return options


def build_environment(settings: dict[str, str]) -> dict[str, str]:
    """Return the settings that uv reads from its environment only.

    >>> build_environment({"find-links": "/a /b", "cert": "/c"})
    {'SSL_CERT_FILE': '/c'}
    """
    return {name: settings[key] for key in settings for name in _VARIABLES.get(key, ())}


def main() -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings = parse_pip_config(listing)
    variables = build_environment(settings) | dict(os.environ)
    uv = os.path.join(os.path.dirname(sys.executable), "uv")
    command = [uv, *sys.argv[1:], "--python", sys.executable, *build_options(settings)]
    os.execve(uv, command, variables)


if __name__ == "__main__":
    main()
