"""Commands of launch scripts, by --dry-run of each, and of what shows the logs of a job."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYXIS = "--container-image=IMAGE --container-mounts=SRC:DST --container-env=NAME"


def program(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def dry_run(folder: Path, script: str, *arguments: str, **variables: str) -> str:
    """With an `echo` for Python, so that the plan is its command, too."""
    usual = {"PATH": f"{folder}:/usr/bin:/bin", "MCORE_RL_PYTHON": "/bin/echo", "TMPDIR": "/tmp"}
    done = subprocess.run(
        ["bash", ROOT / "launch" / script, "--dry-run", f"output_dir={folder}/out", *arguments],
        env=usual | variables, capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (folder / "out").exists()
    return done.stdout


def line(printed: str, start: str) -> str:
    return next(row for row in printed.splitlines() if row.startswith(start))


@pytest.mark.parametrize("script", ["run_tiny.sh", "hosts.sh", "local.sh"])
def test_a_dry_run_has_every_command_of_the_job(tmp_path, script):
    (tmp_path / "config.json").touch()
    printed = dry_run(
        tmp_path, script, f"model.path={tmp_path}", MCORE_RL_HOSTS="a1 a2",
        MCORE_RL_INTERFACE="ib7", MCORE_RL_FIRST_PORT="20000",
    )  # fmt: skip
    printed = printed.replace("\\", "")  # as ssh is given it
    for start, words in {
        "check: ": f"--interface ib7 --ports 20000-20255 --model-path {tmp_path} ",
        "address: ": "mcore_rl.controller.node address --interface ib7 ",
        "Ray, on each node: ": " hold --head ",
        "wait: ": "mcore_rl.controller.node wait --head ",
        "driver: RAY_ADDRESS=": f" model.path={tmp_path} resume=auto output_dir=",
        "end: ": "mcore_rl.controller.node sweep",
    }.items():
        assert words in line(printed, start)
    assert printed.count(" hold ") == (2 if script == "hosts.sh" else 1)
    assert "--model-path" not in dry_run(tmp_path, script, MCORE_RL_HOSTS="a1")


def test_hosts_get_the_variables_of_a_run_and_no_secrets(tmp_path):
    passed = {
        "NCCL_DEBUG": "INFO", "UCX_TLS": "rc", "OMPI_MCA_x": "1", "TORCH_LOGS": "x",
        "TRITON_x": "1", "LD_LIBRARY_PATH": "/a:/b", "WANDB_MODE": "offline", "no_proxy": "h",
        "TORCHINDUCTOR_x": "1", "FLASHINFER_x": "1",
    }  # fmt: skip
    secrets = {"WANDB_API_KEY": "hidden", "HF_TOKEN": "hidden"}
    printed = dry_run(tmp_path, "hosts.sh", MCORE_RL_HOSTS="a1", OTHER="o", **passed, **secrets)
    hold = line(printed, "Ray, on each node: ").replace("\\", "")
    assert [name for name, value in passed.items() if f" {name}={value} " not in hold] == []
    assert "hidden" not in printed and "OTHER" not in printed


def test_variables_of_networks_and_what_shows_the_logs_are_printed_at_the_start(tmp_path):
    script = f"""
        . {ROOT}/launch/slurm_lib.sh
        nodes=(n1) overrides=() output={tmp_path}/out
        open_logs
    """
    variables = {"NCCL_DEBUG": "INFO", "UCX_TLS": "rc", "OTHER": "o", "PATH": "/usr/bin:/bin"}
    printed = subprocess.run(
        ["bash", "-c", script], env=variables, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    assert f"to follow it: python3 {ROOT}/launch/follow.py {tmp_path}/out \n" in printed
    assert "\nNCCL_DEBUG=INFO\nUCX_TLS=rc\n" in printed and "OTHER" not in printed


def test_a_dry_run_takes_another_number_of_nodes(tmp_path):
    for environment in ({"SLURM_JOB_NUM_NODES": "64"}, {}):
        arguments = [] if environment else ["--nodes=64"]
        printed = dry_run(tmp_path, "run_dsv3.sh", *arguments, **environment)
        assert line(printed, "nodes: ").endswith(" node62 node63")
        assert " --nodes=64 --ntasks=64 " in line(printed, "Ray, on each node: ")
        plan = " --dry-run --hardware=h100 --gpus-per-node=8 --num-nodes=64\n"
        assert plan in printed.partition("\nnodes: ")[0]


def test_the_number_of_nodes_of_a_job_is_sbatchs(tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "launch/run_dsv3.sh", "--nodes=64"],
        env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "sbatch --nodes=64" in done.stderr


def test_pyxis_mounts_where_sockets_are_and_keeps_the_variables_of_the_job(tmp_path):
    """On a login node, which has no job's number; /tmp of each step would be its own."""
    program(tmp_path, "srun", f"echo '{PYXIS}'")
    (tmp_path / "temp").mkdir()
    printed = dry_run(
        tmp_path, "run_tiny.sh", MCORE_RL_IMAGE="x.sqsh", MCORE_RL_MOUNTS="/data",
        NCCL_DEBUG="INFO", TMPDIR=f"{tmp_path}/temp",
    )  # fmt: skip
    for start in ("check: ", "Ray, on each node: ", "wait: ", "driver: ", "end: "):
        command = line(printed, start).replace("\\", "")
        assert " --container-image=x.sqsh " in command
        mounts = command.partition(" --container-mounts=")[2].split()[0].split(",")
        places = (ROOT, tmp_path, "/tmp", f"{tmp_path}/temp", "/data")
        assert mounts == [f"{place}:{place}" for place in places]
        names = command.partition(" --container-env=")[2].split()[0].split(",")
        assert {"NCCL_DEBUG", "PYTHONPATH"} <= {*names}
    assert "the plan: in a job alone" in printed


def test_the_plan_of_a_job_is_made_in_its_image(tmp_path):
    program(tmp_path, "srun", f"echo '{PYXIS}'; echo ran $*")
    program(tmp_path, "scontrol", "echo n1; echo n2")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    printed = dry_run(tmp_path, "run_tiny.sh", MCORE_RL_IMAGE="x.sqsh", **job)
    plan = line(printed, "ran --overlap")
    assert " --container-image=x.sqsh " in plan and plan.endswith(" --dry-run")


def test_an_older_pyxis_is_not_given_an_option_that_it_lacks(tmp_path):
    program(tmp_path, "srun", "echo --container-image=IMAGE")
    assert "container-env" not in dry_run(tmp_path, "run_tiny.sh", MCORE_RL_IMAGE="x.sqsh")


def test_a_login_node_without_containers_shows_what_nodes_with_pyxis_would_run(tmp_path):
    program(tmp_path, "srun", "true")
    printed = dry_run(tmp_path, "run_tiny.sh", MCORE_RL_IMAGE="x.sqsh")
    assert "neither pyxis nor apptainer is on this machine" in printed
    assert "--container-image=x.sqsh" in line(printed, "Ray, on each node: ")


@pytest.mark.parametrize("script", ["run_tiny.sh", "local.sh"])
def test_apptainer_binds_where_sockets_are_and_keeps_the_variables_of_the_job(tmp_path, script):
    program(tmp_path, "apptainer", "echo in $*")
    program(tmp_path, "srun", "true")
    printed = dry_run(
        tmp_path, script, MCORE_RL_IMAGE="x.sif", NCCL_IB_HCA="mlx5_0,mlx5_1", HF_TOKEN="hidden"
    )
    hold = line(printed, "Ray, on each node: ").replace("\\", "")
    assert f"apptainer exec --nv --bind {ROOT}:{ROOT},{tmp_path}:{tmp_path},/tmp:/tmp x.sif" in hold
    assert " APPTAINERENV_NCCL_IB_HCA=mlx5_0,mlx5_1 " in hold
    assert f" APPTAINERENV_PYTHONPATH={ROOT} " in hold
    assert "hidden" not in printed
    assert line(printed, "in exec --nv").endswith(" --dry-run")


def test_logs_are_followed_before_there_are_any_and_into_the_next_attempt(tmp_path):
    command = [sys.executable, str(ROOT / "launch/follow.py"), str(tmp_path)]
    shown = tmp_path / "shown"

    def wait_for(text: str) -> None:
        started = time.monotonic()
        while text not in shown.read_text():
            assert time.monotonic() - started < 100, shown.read_text()
            time.sleep(0.05)

    with shown.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        wait_for(f"waiting for {tmp_path}/logs/latest\n")
        for attempt in ("attempt_1", "attempt_2"):
            (tmp_path / "logs" / attempt).mkdir(parents=True)
            (tmp_path / "logs/latest").unlink(missing_ok=True)
            (tmp_path / "logs/latest").symlink_to(attempt)
            for name in ("driver.log", "actor-0.log"):
                (tmp_path / "logs/latest" / name).write_text(f"begun\n{name} of {attempt}\nhalf")
                wait_for(f"\n==> {attempt}/{name} <==\nbegun\n{name} of {attempt}\n")
                with (tmp_path / "logs/latest" / name).open("a") as log:
                    log.write(f" a line of {attempt}\n")
                wait_for(f"{name} of {attempt}\nhalf a line of {attempt}\n")
    finally:
        process.kill()
        process.wait()


def test_of_long_logs_the_end_is_shown(tmp_path):
    sys.path.insert(0, str(ROOT / "launch"))
    try:
        from follow import new_lines
    finally:
        sys.path.pop(0)
    log = tmp_path / "driver.log"
    log.write_text("a line\n" * 10_000 + "the last\n")
    text, place = new_lines(log, None, is_first=True)
    assert text.startswith("a line\n") and text.endswith("the last\n") and len(text) < 5000
    assert place == log.stat().st_size
    assert new_lines(log, None, is_first=False)[0].count("\n") == 10_001
