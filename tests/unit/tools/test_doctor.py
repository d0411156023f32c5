"""The doctor finds what is planted on one of two nodes, and compares nodes as worked by hand."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from mcore_rl.cli import doctor
from mcore_rl.config.errors import ConfigError
from mcore_rl.tools.doctor import checks
from mcore_rl.tools.doctor.bandwidth import schedule_pairs, schedule_rank_pairs
from mcore_rl.tools.doctor.report import (
    Bandwidth,
    DoctorRequest,
    Fact,
    Finding,
    NodeReport,
    Report,
    compare_clocks,
    compare_facts,
    find_slow_pairs,
)
from mcore_rl.tools.doctor.run import examine_nodes
from tests.nightly import nightly
from tests.pages import select_commands
from tests.planted import FAULTS, NICENESS, NODE, NODES, ProcessNodes, World, is_fault, plant


def faults(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if is_fault(f.check, f.status, f.value)]


@pytest.fixture
def request_(tmp_path: Path) -> DoctorRequest:
    (tmp_path / "out").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    paths = str(tmp_path / "out"), "run", str(tmp_path / "model")
    return DoctorRequest(*paths, min_disk_gb=0.01, timeout_s=20.0)


def test_two_nodes_that_are_well_have_no_fault_and_keep_no_file(tmp_path, request_):
    report = examine_nodes(request_, ProcessNodes(plant(tmp_path, World())))
    assert faults(report.findings) == []
    checks = {"network", "shared path", "clock", "model", "sandbox"}
    assert {f.check for f in report.findings} >= checks
    assert {f.node for f in report.findings} == {*NODES}
    assert list((tmp_path / "out").iterdir()) == []


def test_a_node_without_a_sandbox_is_warned_of(monkeypatch):
    report = NodeReport("a")
    monkeypatch.setattr(
        checks, "probe_tiers", lambda setting: ("bwrap: not found", "landlock: old")
    )
    checks.check_sandbox(report)
    [finding] = report.findings
    assert (finding.status, finding.value) == ("warn", "bwrap: not found; landlock: old")
    assert "install bubblewrap" in finding.remedy


@pytest.mark.job
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_node_is_reported_for_that_node_only(tmp_path, request_, name):
    fault = FAULTS[name]
    report = examine_nodes(request_, ProcessNodes(plant(tmp_path, fault.world)))
    findings = [f for f in faults(report.findings) if f.node == NODE and f.check == fault.check]
    assert len(findings) == 1, report.findings
    assert re.search(fault.value, findings[0].value), findings
    assert re.search(fault.remedy, findings[0].remedy), findings
    assert report.status == ("warn" if name == "niceness" else "fail")
    # A path that is not shared is told by both sides, whose fault ever it is.
    assert name == "path not shared" or faults(report.findings) == findings


@pytest.mark.parametrize(
    ("command", "value"),
    [
        nightly((("false",), "^did not come in")),
        (("sleep", "60"), "^did not come in"),
    ],
)
def test_a_node_that_does_not_come_is_named_within_the_limit(tmp_path, request_, command, value):
    limited = DoctorRequest(request_.output_dir, "run", min_disk_gb=0.01, timeout_s=16.0)
    start = time.monotonic()
    report = examine_nodes(limited, ProcessNodes(plant(tmp_path, World(command=command))))
    assert time.monotonic() - start < 40
    by_node = {f.node: f for f in faults(report.findings)}
    assert re.search(value, by_node[NODE].value)
    assert by_node["n1"].value == "n2 did not come in 8 s"  # who came tells what it found
    assert {f.check for f in report.findings} > {"open files", "shared memory"}
    assert list((tmp_path / "out").iterdir()) == []


def test_a_node_that_hangs_is_named_with_what_it_was_doing(tmp_path, request_):
    """Hang as on a lost file server: the open of a pipe without a writer never ends."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model" / "config.json").symlink_to(tmp_path / "fifo")
    limited = DoctorRequest(request_.output_dir, "run", request_.model_path, timeout_s=10.0)
    report = examine_nodes(limited, ProcessNodes(plant(tmp_path, World())))
    assert {(f.node, re.sub(r"\d+ s", "N s", f.value)) for f in faults(report.findings)} == {
        (node, f"no answer in N s, while reading {tmp_path / 'model'}") for node in NODES
    }
    assert list((tmp_path / "out").iterdir()) == []


def mcore_rl(*arguments: str, **limits: tuple[int, int]) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        for name, values in limits.items():
            resource.setrlimit(getattr(resource, name), values)

    command = [Path(sys.executable).with_name("mcore-rl"), *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RAY"))}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, preexec_fn=limit, timeout=60
    )


SMALL = ("--min-disk", "0.01", "--min-shm", "0.01")


@pytest.mark.parametrize(
    ("hard", "status", "word"), [(1000, 1, "FAIL"), (20_000, 0, "WARN")], ids=str
)
def test_the_command_tells_a_low_limit_by_its_status(tmp_path, hard, status, word):
    done = mcore_rl("doctor", "--quiet", *SMALL, "--output-dir", str(tmp_path),
                    RLIMIT_NOFILE=(1000, hard))  # fmt: skip
    assert done.returncode == status, done.stderr
    niceness = f": niceness: {NICENESS};"
    [line, _] = [line for line in done.stdout.splitlines() if niceness not in line]
    assert re.match(rf"{word} .*: open files: 1000; wanted: at least 8192\. To do: ", line)


def test_a_busy_port_is_named_and_a_free_one_is_not(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # nobody else is given it
        free.bind(("127.0.0.1", 0))
        ports = busy.getsockname()[1], free.getsockname()[1]
        given = ",".join(map(str, ports))
        done = mcore_rl("doctor", "--json", *SMALL, "--output-dir", str(tmp_path), "--ports", given)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["status"] == "fail"
    findings = [finding for finding in report["findings"] if finding["check"] == "ports"]
    assert [(finding["status"], finding["value"]) for finding in findings] == [
        ("fail", f"{ports[0]}: address already in use"),
        ("warn", f"{ports[1]} in the ephemeral range 32768-60999"),
    ]
    assert "MCORE_RL_FIRST_PORT" in findings[1]["remedy"]


def _finding(node: str, check: str) -> Finding:
    return Finding(check, node, "fail", "bad")


@pytest.mark.parametrize(
    ("num_nodes", "faults_by_node", "unfit"),
    [
        (2, {"n2 clock"}, {"n2"}),
        (1, {"n1 clock"}, {"n1"}),
        (2, {"n1 output folder", "n2 output folder"}, set()),  # one that they share
        (4, {"n2 node", "n1 network", "n3 network", "n4 network"}, {"n2"}),  # it did not come
        (4, {"n2 network", "n2 network ", "n2 network  ", "n1 network", "n3 network"}, {"n2"}),
        (2, {"n1 shared path", "n2 shared path"}, set()),
    ],
)
def test_nodes_at_fault_are_those_that_differ_from_most(num_nodes, faults_by_node, unfit):
    findings = [
        _finding(*map(str.strip, text.split(maxsplit=1))) for text in sorted(faults_by_node)
    ]
    nodes = [f"n{number}" for number in range(1, num_nodes + 1)]
    assert {*Report(nodes, findings, None, 1.0).list_unfit_nodes()} == unfit


def test_a_node_at_fault_is_marked_with_the_reason(tmp_path):
    mark = "--output-dir", str(tmp_path / "out"), "--mark", str(tmp_path)
    assert mcore_rl("doctor", "--quiet", *SMALL[:2], "--min-shm", "1e9", *mark).returncode == 1
    [file] = tmp_path.glob("*.failed")
    assert re.match(rf"{file.stem}: shared memory: .* free in /dev/shm\n$", file.read_text())
    file.unlink()
    assert mcore_rl("doctor", "--quiet", *SMALL, *mark).returncode == 0
    assert not [*tmp_path.glob("*.failed")]


@pytest.mark.skipif(NICENESS > 0, reason="the doctor warns of the niceness that the tests run at")
def test_nothing_is_printed_with_quiet_when_all_is_well(tmp_path):
    done = mcore_rl("doctor", "--quiet", *SMALL, "--output-dir", str(tmp_path / "new"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.job
@pytest.mark.parametrize("command", select_commands("doctor"), ids=str)
def test_the_commands_of_the_pages_show_a_table_or_json(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, *arguments = command.text.split()
    done = mcore_rl(*arguments)
    assert program == "mcore-rl"
    assert done.returncode in (0, 1), done.stderr  # this machine may have faults of its own
    assert "shared memory" in done.stdout or "--quiet" in arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ports", "70000"), "--ports=70000: '70000'; allowed: numbers and ranges, 1 to 65535"),
        (("--ports", "9-1"), "--ports=9-1: '9-1'; allowed: numbers and ranges, 1 to 65535"),
        (("--min-shm", "-1"), "--min-shm=-1.0; allowed: at least 0"),
        (("--timeout", "0"), "--timeout=0.0; allowed: above 0"),
        (("--timeout", "nan"), "--timeout=nan; allowed: above 0, finite"),
        (("--on", "k8s"), "--on='k8s'; allowed: 'auto', 'this', 'slurm', 'ray'"),
        (("--on", "ray"), "--on=ray: RAY_ADDRESS is not set; allowed: the address of a cluster"),
    ],
)
def test_what_cannot_work_is_refused(arguments, message, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError) as error:
        doctor.main(list(arguments))
    assert str(error.value) == message


# Between nodes.


def reports(**values: str) -> list[NodeReport]:
    return [NodeReport(name, facts={"ray": Fact(value)}) for name, value in values.items()]


def test_a_node_that_differs_from_most_is_named_and_with_two_nodes_the_second():
    findings = list(compare_facts(reports(a="1", b="2", c="2", d="2"), {}))
    assert [(f.node, f.value, f.wanted) for f in faults(findings)] == [
        ("a", "1", "2, as on b, c, d")
    ]
    findings = list(compare_facts(reports(a="1", b="2"), {}))
    assert [(f.node, f.value, f.wanted) for f in faults(findings)] == [("b", "2", "1, as on a")]


def test_what_a_node_lacks_is_a_difference_of_that_node():
    bare = NodeReport("c", facts={"GPUs": Fact("none", "warn")})
    with_gpus = [NodeReport(n, facts={"GPUs": Fact("8 x H200", "warn")}) for n in ("a", "b")]
    findings = faults(list(compare_facts([*with_gpus, bare], {})))
    assert [(f.node, f.status, f.value) for f in findings] == [("c", "warn", "none")]
    findings = faults(list(compare_facts([*reports(a="1", b="1"), NodeReport("c")], {})))
    assert [(f.node, f.status, f.value) for f in findings] == [("c", "fail", "none")]


def test_a_version_that_is_not_pinned_is_a_warning():
    pins = {"ray": Requirement("ray==2.60.0")}
    [finding] = compare_facts(reports(a="2.59.0"), pins)
    assert (finding.status, finding.wanted) == ("warn", "==2.60.0")
    [finding] = compare_facts(reports(a="2.60.0+local"), pins)
    assert finding.status == "ok"


def test_a_clock_is_wrong_only_beyond_what_the_measure_may_be_off_by():
    """Take clocks 0, 1.0 (a, the lower middle), 1.1 and 4.0 s behind the coordinator."""
    nodes = [NodeReport("a", clock_s=1.0, clock_bound_s=0.1)]
    nodes += [NodeReport("b", clock_s=4.0, clock_bound_s=0.2), NodeReport("c", clock_s=1.1)]
    findings = list(compare_clocks(nodes, 1.0))
    assert [(f.node, f.status) for f in findings] == [("a", "ok"), ("b", "fail"), ("c", "ok")]
    assert findings[1].value == "3.000 s behind a (give or take 0.300 s)"
    assert faults(list(compare_clocks(nodes, 2.8))) == []
    assert list(compare_clocks(nodes[:1], 1.0)) == []


def test_pairs_below_half_of_the_median_of_their_kind_are_slow():
    inside = [("a:0", "a:1", 400e9), ("b:0", "b:1", 100e9), ("c:0", "c:1", 380e9)]
    between = [
        ("a:0", "b:0", 50e9),
        ("a:0", "c:0", 25e9),
        ("b:0", "c:0", 20e9),
        ("c:0", "d:0", 12e9),
    ]
    findings = list(find_slow_pairs(Bandwidth(6, "nccl", 1.0, inside, between)))
    # Medians by hand: 380 inside, (20 + 25) / 2 = 22.5 between nodes; 12 is above 11.25.
    assert [(f.node, f.value) for f in findings] == [("b", "b:0 and b:1: 100 GB/s")]
    between[3] = ("c:0", "d:0", 11e9)
    findings = list(find_slow_pairs(Bandwidth(6, "nccl", 1.0, [], between)))
    assert [(f.node, f.status) for f in findings] == [("c, d", "warn")]


@pytest.mark.parametrize("count", range(9))
def test_every_pair_meets_once_and_nobody_is_in_two_pairs_of_a_round(count):
    rounds = schedule_pairs(count)
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(count), 2))
    assert all(len(set(itertools.chain(*pairs))) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) <= max(0, count - 1 + count % 2)


def test_ranks_meet_all_of_their_node_and_their_number_on_other_nodes():
    inside, between = schedule_rank_pairs([2, 2, 1])
    assert sorted(itertools.chain(*inside)) == [(0, 1), (2, 3)]
    assert sorted(itertools.chain(*between)) == [(0, 2), (0, 4), (1, 3), (2, 4)]
    for pairs in (*inside, *between):
        assert len(set(itertools.chain(*pairs))) == 2 * len(pairs)


# What nvidia-smi prints, as on a node of two H100 with one link down and an error of memory.
GPUS = """\
NVIDIA H100 80GB HBM3, 81559, 4, 0, 580.95.05, Default
NVIDIA H100 80GB HBM3, 81559, 70123, 3, 580.95.05, Exclusive_Process
"""
LINKS = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    def install(script: str) -> None:
        file = tmp_path / "nvidia-smi"
        file.write_text(f"#!/bin/sh\n{script}")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_gpus_are_reported_with_their_faults(nvidia_smi):
    nvidia_smi(f"if [ $1 = nvlink ]; then printf '{LINKS}'; else printf '{GPUS}'; fi")
    report = NodeReport("a")
    checks.check_devices(report)
    assert report.facts["GPUs"].value == "2 x NVIDIA H100 80GB HBM3, 81559 MiB"
    assert report.facts["NVIDIA driver"].value == "580.95.05"
    assert [(f.check, f.status, f.value) for f in report.findings] == [
        ("ECC errors", "fail", "GPU 1: 3"),
        ("compute mode", "fail", "1 x Default; 1 x Exclusive_Process"),
        ("GPU memory in use", "warn", "GPU 1: 70123 MiB"),
        ("NVLink", "warn", "GPU 1: 1 links"),
    ]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'Unable to determine the device handle for GPU0: Unknown Error'; exit 15", "Unable"),
        ("echo 'NVIDIA H100, [GPU is lost], 0, 0, 580, Default'", "GPU is lost"),
    ],
)
def test_a_driver_in_trouble_is_a_failure(nvidia_smi, script, reason):
    nvidia_smi(script)
    report = NodeReport("a")
    checks.check_devices(report)
    [finding] = report.findings
    assert finding.status == "fail" and reason in finding.value


RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.mark.parametrize(
    ("kind", "has_triton", "setting", "runner"),
    [
        ("gpu", True, None, "V2"),
        ("gpu", True, "0", "V1"),
        ("gpu", False, None, "V1"),
        ("cpu", True, None, "V1"),  # a Triton without a backend for CPUs
        ("gpu", True, "1", "V2"),
        ("cpu", False, "0", "V1"),
    ],
)
def test_the_model_runner_that_vllm_would_take_is_reported(
    monkeypatch, tmp_path, kind, has_triton, setting, runner
):
    spec = SimpleNamespace(origin=str(tmp_path / "triton/__init__.py")) if has_triton else None
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(checks, "detect_installed_extra", lambda: kind)
    monkeypatch.delenv(RUNNER, raising=False)
    if setting is not None:
        monkeypatch.setenv(RUNNER, setting)
    report = NodeReport("a")
    checks.check_model_runner(report)
    assert report.facts["vLLM's model runner"].value == runner and not report.findings


@pytest.mark.parametrize(
    ("setting", "has_triton", "expected"),
    [("yes", True, "0 or 1"), ("", True, "0 or 1"), ("1", False, "0, because Triton is missing")],
)
def test_a_model_runner_that_cannot_be_had_fails_before_a_server_does(
    monkeypatch, setting, has_triton, expected
):
    monkeypatch.setattr(checks, "detect_installed_extra", lambda: "gpu")
    monkeypatch.setattr(checks, "_has_triton", lambda _: has_triton)
    monkeypatch.setenv(RUNNER, setting)
    report = NodeReport("a")
    checks.check_model_runner(report)
    [finding] = report.findings
    assert (finding.status, finding.value, finding.wanted) == (
        "fail",
        f"{RUNNER}={setting!r}",
        expected,
    )


@pytest.mark.parametrize("setting", [None, "0", "1"])
def test_the_reported_model_runner_is_the_choice_of_vllm(monkeypatch, setting):
    from vllm.config import VllmConfig

    monkeypatch.delenv(RUNNER, raising=False)
    if setting is not None:
        monkeypatch.setenv(RUNNER, setting)
    report = NodeReport("a")
    checks.check_model_runner(report)
    if report.findings:
        with pytest.raises(ValueError, match="V2 requires Triton"):
            VllmConfig()
        return
    chosen = "V2" if VllmConfig().use_v2_model_runner else "V1"
    assert report.facts["vLLM's model runner"].value == chosen


@pytest.mark.parametrize(
    ("tools", "packages", "toolkit", "status", "value"),
    [
        (("ninja", "nvcc"), {"flashinfer"}, "", "ok", "{0}/ninja, {0}/nvcc"),
        (("nvcc",), {"flashinfer"}, "", "warn", "no ninja"),
        ((), {"flashinfer"}, "", "warn", "no ninja and no nvcc"),
        (("ninja", "nvcc"), {"flashinfer"}, "/nowhere", "warn", "no nvcc"),
        ((), {"flashinfer", "flashinfer_cubin"}, "", "ok", "compiled kernels of flashinfer-cubin"),
        ((), set(), "", None, ""),  # this environment has no FlashInfer
    ],
)
def test_compilers_of_flashinfer_are_searched_on_the_path_of_servers(
    monkeypatch, tmp_path, tools, packages, toolkit, status, value
):
    from mcore_rl.controller import compilers

    for tool in tools:
        (tmp_path / tool).touch(mode=0o755)
    monkeypatch.setattr(checks, "is_gpu_node", lambda: True)
    monkeypatch.setattr(compilers, "_TOOLKIT", tmp_path / "cuda")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", toolkit)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(
        checks.importlib.util, "find_spec", lambda name: name if name in packages else None
    )
    report = NodeReport("a")
    checks.check_compilers(report)
    results = [(finding.check, finding.status, finding.value) for finding in report.findings]
    assert results == ([("FlashInfer", status, value.format(tmp_path))] if status else [])


def test_compilers_are_not_checked_on_a_node_without_a_gpu(monkeypatch):
    monkeypatch.setattr(checks, "is_gpu_node", lambda: False)
    report = NodeReport("a")
    checks.check_compilers(report)
    assert not report.findings


@pytest.mark.parametrize(
    ("modes", "status"),
    [
        (("Default", "Default"), "ok"),
        (("Exclusive_Process", "Exclusive_Process"), "fail"),
        (("Prohibited",), "fail"),
    ],
)
def test_a_gpu_for_one_process_is_a_fault_because_roles_share_it(nvidia_smi, modes, status):
    rows = "\\n".join(f"NVIDIA H100, 81559, 4, 0, 580.95.05, {mode}" for mode in modes)
    nvidia_smi(f"if [ $1 != nvlink ]; then printf '{rows}\\n'; fi")
    report = NodeReport("a")
    checks.check_devices(report)
    [finding] = [finding for finding in report.findings if finding.check == "compute mode"]
    assert finding.status == status and finding.value == f"{len(modes)} x {modes[0]}"
    assert ("-c DEFAULT" in finding.remedy) == (status == "fail")


def test_only_active_ports_of_infiniband_count(tmp_path):
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert list(checks.list_infiniband_rates(tmp_path)) == ["400 Gb/sec (4X NDR)"] * 2
