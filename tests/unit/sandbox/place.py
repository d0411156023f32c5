"""A script: makes itself a place such as a container, and calls a sandbox there.

    python place.py '{"uid": 65534, "is_container": true}'

reads requests from stdin, a line of JSON each: a tier's fields, settings, program, stdin and files;
answers each with a line. is_container: as Docker runs a process by default, only without any
capability: no namespaces, no mounts.
"""

import asyncio
import ctypes
import dataclasses
import errno
import json
import os
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from mcore_rl.config.schema import SandboxSettings
from mcore_rl.sandbox import sandbox
from mcore_rl.sandbox.sandbox import SandboxError, run_in_tier
from mcore_rl.sandbox.tiers import Tier

_REFUSED = {
    "x86_64": (165, 166, 272, 308),  # mount, umount2, unshare, setns
    "aarch64": (40, 39, 97, 268),
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_NEW_NAMESPACES = 0x7E020000


def refuse_namespaces() -> None:
    machine = os.uname().machine
    refuse, allow = (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)
    code = [(0x20, 0, 0, 0)]  # the number of the call
    for number in _REFUSED[machine]:
        code += [(0x15, 0, 1, number), refuse]
    code += [(0x15, 0, 1, _CLONE3), (0x06, 0, 0, 0x00050000 | errno.ENOSYS)]
    code += [(0x15, 0, 3, _CLONE[machine]), (0x20, 0, 0, 16), (0x45, 0, 1, _NEW_NAMESPACES), refuse]
    code.append(allow)
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *item) for item in code))
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(packed))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())


def drop_capabilities() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for number in range(64):
        libc.prctl(24, number, 0, 0, 0)  # PR_CAPBSET_DROP
    header = struct.pack("Ii", 0x20080522, 0)
    assert libc.capset(header, bytes(24)) == 0, os.strerror(ctypes.get_errno())


def main() -> None:
    place = json.loads(sys.argv[1])
    if place["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[place["uid"]] * 3)
        os.setresuid(*[place["uid"]] * 3)
    if place["is_container"]:
        libc = ctypes.CDLL(None)
        if os.geteuid():
            libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, needed for a filter
        refuse_namespaces()
        drop_capabilities()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def answer(request: dict) -> dict:
    if "auto" in request:
        result = sandbox.probe_tiers(request["auto"])
        return dataclasses.asdict(result) if isinstance(result, Tier) else {"reasons": result}
    tier = Tier(**request["tier"])
    if "settings" not in request:
        return {"why_not": sandbox.check_tier(tier)}
    settings = SandboxSettings(**request["settings"])
    try:
        running = run_in_tier(
            tier, settings, request["program"], request["stdin"], request["files"]
        )
        return dataclasses.asdict(asyncio.run(running))
    except SandboxError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main()
