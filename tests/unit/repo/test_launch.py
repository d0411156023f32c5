"""The launch scripts: their syntax, what they ask SLURM for, and what --dry-run prints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli.compose import compose_config
from mcore_rl.config.rules import resolve_for_device_type
from mcore_rl.config.schema import RLConfig
from mcore_rl.jobs.run_plan import plan_run
from tests.pages import select_commands

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
JOBS = [path for path in SCRIPTS if path.name.startswith("run_")]


def read_sbatch_option(script: Path, option: str) -> str:
    match = re.search(rf"^#SBATCH --{option}=(\S+)$", script.read_text(), re.MULTILINE)
    return match[1] if match else ""


@pytest.mark.job
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_of_bash_and_shellcheck_has_nothing_to_say(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", script], check=True, cwd=ROOT)


@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_a_job_asks_for_as_many_devices_as_its_recipe_needs(script):
    recipe = re.search(r"run_job recipe=(\w+)", script.read_text())
    assert recipe, script
    config = resolve_for_device_type(compose_config(RLConfig, [f"recipe={recipe[1]}"]), "cpu")
    devices = int(read_sbatch_option(script, "nodes")) * int(
        read_sbatch_option(script, "gpus-per-node") or 1
    )
    assert devices == plan_run(config).num_devices
    assert config.trainer.save_every or "trainer.save_every=" in script.read_text()
    assert read_sbatch_option(script, "signal").startswith("B:USR1@")
    assert "#SBATCH --requeue\n" in script.read_text()


@pytest.mark.job
def test_a_dry_run_prints_every_command_and_starts_nothing():
    (command,) = [c.text for c in select_commands("launch plan")]
    environment = os.environ | {"MCORE_RL_PYTHON": sys.executable, "SLURM_JOB_NODELIST": ""}
    done = subprocess.run(
        [*command.split(), "warm_start.num_steps=1", "warm_start.optimizer.warmup_steps=0"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--no-kill --kill-on-bad-exit=0 --wait=0 " in done.stdout  # whatever slurm.conf says
    order = [
        "actor: 2 ranks", "rollout: 2 ranks",
        "nodes: node0 node1", "mcore_rl.cli.main doctor", "mcore_rl.controller.node address",
        "mcore_rl.controller.node hold", "mcore_rl.cli.main rl", "mcore_rl.controller.node sweep",
    ]  # fmt: skip
    places = [done.stdout.index(word) for word in order]
    assert places == sorted(places)
    assert "resume=auto" in done.stdout
    output = re.search(rf"driver: .* output_dir=({ROOT}/outputs/run_tiny-[0-9-]+) ", done.stdout)
    assert output and not Path(output[1]).exists()  # without output_dir, one of the job's own


@pytest.mark.job
def test_a_dry_run_of_the_published_deepseek_v3_shows_nodes_gpus_and_the_weight_sync():
    """Only its config.json is read, with the quantisation, before there is any data."""
    (command,) = [c.text for c in select_commands("launch plan of a model")]
    environment = os.environ | {"MCORE_RL_PYTHON": sys.executable, "SLURM_JOB_NODELIST": ""}
    done = subprocess.run(
        command.split(), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "data: not checked: data.train_file is not set\n",
        "--nodes=32 --ntasks=32",
        "actor: 256 ranks, tp=2 pp=16 dp=8 ep=16",
        " nodes 0-31: actor 0-255 (pp 0-15); rollout servers 0-7\n",
    ):
        assert words in done.stdout
    assert done.stdout.startswith("memory: fits, ")
    assert re.search(r"\nweight sync \(colocated\), each step: [\d,.]+ GB between", done.stdout)


@pytest.mark.job
def test_a_model_on_half_of_its_gpus_is_refused_before_any_command_is_shown():
    half = "actor.layout.dp=4", "actor.layout.ep=8", "rollout.num_servers=4", "--nodes=16"
    done = subprocess.run(
        ["bash", ROOT / "launch/run_dsv3.sh", "--dry-run", "model.path=DeepSeek-V3", *half],
        env=os.environ | {"MCORE_RL_PYTHON": sys.executable, "SLURM_JOB_NODELIST": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout.startswith("memory: does not fit, 124.")
    assert "the run does not fit NVIDIA H100" in done.stderr and "srun" not in done.stdout


@pytest.mark.parametrize(
    ("script", "variables", "message"),
    [
        ("run_tiny.sh", {}, "this is a job of SLURM's: sbatch "),
        ("hosts.sh", {}, "MCORE_RL_HOSTS names no host; set it to a list such as 'a1 a2'"),
        ("local.sh", {"MCORE_RL_FIRST_PORT": "abc"}, "allowed: a whole number from 1024 to 65280"),
        ("local.sh", {"MCORE_RL_FIRST_PORT": "80"}, "MCORE_RL_FIRST_PORT is '80'; allowed: "),
        ("local.sh", {"MCORE_RL_FIRST_PORT": "65500"}, "MCORE_RL_FIRST_PORT is '65500'; allowed: "),
        ("local.sh", {"MCORE_RL_NODES_S": "5m"}, "MCORE_RL_NODES_S is '5m'; allowed: "),
        ("local.sh", {"MCORE_RL_OBJECT_STORE_BYTES": "8G"}, "BYTES is '8G'; allowed: "),
        ("local.sh", {"MCORE_RL_IMAGE": "x.sif"}, "there is neither pyxis in srun nor apptainer"),
    ],
)
def test_a_script_that_cannot_start_says_what_it_needs(tmp_path, script, variables, message):
    if "apptainer" in message and shutil.which("apptainer"):
        pytest.skip("apptainer is there")
    usual = {"PATH": "/usr/bin:/bin", "MCORE_RL_PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", ROOT / "launch" / script, f"output_dir={tmp_path / 'out'}"],
        env=usual | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(f"{script}: ") and message in done.stderr
    assert not (tmp_path / "out").exists()


def run_library(script: str, folder: Path, **variables: str) -> str:
    """Return what bash prints behind slurm_lib.sh, with a scontrol that prints its arguments."""
    scontrol = folder / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho ExcNodeList='(null)'\necho $* >>{folder}/calls\n")
    scontrol.chmod(0o755)
    usual = {"PATH": f"{folder}:/usr/bin:/bin", "MCORE_RL_PYTHON": sys.executable}
    return subprocess.run(
        ["bash", "-c", f". {ROOT}/launch/slurm_lib.sh\n{script}"],
        env=usual | variables, stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip


def test_a_task_of_an_array_queues_itself_again_and_not_the_others(tmp_path):
    script = f"nodes=(n1) logs={tmp_path}\nstart_again"
    run_library(script, tmp_path, SLURM_JOB_ID="7")
    task = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}
    run_library(script, tmp_path, **task)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["show job 7", "requeue 7", "show job 9_3", "requeue 9_3"]


@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_a_script_finds_its_folder_by_the_number_of_an_array_too(tmp_path, script):
    """SLURM runs a copy, and tells of the tasks of an array one after the other."""
    copy = tmp_path / "slurm_script"
    shutil.copy(script, copy)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f"#!/bin/sh\nfor task in 1 2; do echo '   Command={script} output_dir=x'; echo; done\n"
    )
    scontrol.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "9"}
    done = subprocess.run(
        ["bash", copy], env=variables | {"MCORE_RL_PYTHON": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "this is a job of SLURM's" in done.stderr


def test_a_job_that_is_queued_again_takes_other_ports(tmp_path):
    script = "read_settings\necho $port"
    job = {"SLURM_JOB_ID": "88", "SLURM_JOB_NODELIST": "n1"}
    ports = [run_library(script, tmp_path, **job, SLURM_RESTART_COUNT=f"{n}") for n in range(88)]
    assert ports[0] == run_library(script, tmp_path, **job) == "10000\n"
    assert len(set(ports)) == 88


def test_jobs_that_start_at_one_moment_have_logs_of_their_own(tmp_path):
    """One job makes the folder when the other has just seen that it is not there."""
    mkdir = tmp_path / "mkdir"
    mkdir.write_text('#!/bin/sh\n/bin/mkdir -p "$LATE"\nexec /bin/mkdir "$@"\n')
    mkdir.chmod(0o755)
    script = f"nodes=(n1) overrides=() output='{tmp_path}/o p'\nopen_logs\necho $logs"
    out = run_library(script, tmp_path, LATE=f"{tmp_path}/o p/logs/attempt_1")
    assert out.endswith("/o p/logs/attempt_2\n")


def test_what_watches_ray_beside_the_driver_leaves_nothing_when_the_driver_has_ended(tmp_path):
    """Ray, for which a `sleep` stands as for the driver, has ended already. The call returns when
    nobody is there any more who might print.
    """
    script = f"""
        . {ROOT}/launch/slurm_lib.sh && set +e
        logs={tmp_path} nodes=(n1 n2)
        sleep 0 & ray_pid=$!
        wait $ray_pid
        sleep 4 & driver_pid=$!
        watch_ray & watcher_pid=$!
        sleep 2 # until it has seen that
        {{end}}
        wait $watcher_pid
    """
    for end in ("kill $watcher_pid", "wait $driver_pid"):
        done = subprocess.run(
            ["bash", "-c", script.format(end=end)],
            timeout=30, stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        assert "the driver's Ray has ended" in done.stdout


@pytest.mark.parametrize("end", ["echo n1: no memory >n1.failed", "kill $ray_pid"])
def test_a_driver_outlives_the_ray_of_another_node_and_not_its_own(tmp_path, end):
    """A `sleep` stands for the driver, another for the task of srun's that has Ray on all nodes."""
    script = f"""
        . {ROOT}/launch/slurm_lib.sh && set +e && cd {tmp_path}
        wait_at_most() {{ return 1; }} # the driver does not end by itself, however long one waits
        logs={tmp_path} nodes=(n1 n2)
        sleep 1000 & ray_pid=$!
        sleep 1000 & driver_pid=$!
        echo 'n2: a port cannot be had' >n2.failed
        watch_ray >told &
        until grep -q 'Ray has ended' told; do sleep 0.1; done
        sleep 3 # it looks every second
        kill -0 $driver_pid && echo it lives
        {end}
        wait $driver_pid
        echo it has ended with $?
        kill $ray_pid 2>/dev/null
        wait
    """
    done = subprocess.run(
        ["bash", "-c", script], timeout=60, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.stdout == "it lives\nit has ended with 143\n"
    lines = [line.partition("] ")[2] for line in (tmp_path / "told").read_text().splitlines()]
    assert lines[0] == "Ray has ended on n2; the driver goes on if it can: n2: a port cannot be had"
    assert len(lines) == 2 and lines[1].startswith("the driver's Ray has ended: ")


@pytest.mark.parametrize("works", [True, False])
def test_whether_a_node_is_left_out_the_next_time_is_printed(tmp_path, works):
    script = f"""
        . {ROOT}/launch/slurm_lib.sh
        logs={tmp_path} nodes=(n1 n2) SLURM_JOB_ID=7 SLURM_JOB_PARTITION=p
        scontrol() {{
            case $1 in
            show) echo "   ExcNodeList=(null)" ;;
            update) {"true" if works else "false"} ;;
            esac
        }}
        sinfo() {{ printf 'n1 idle\nn2 mix\nn3 idle\n'; }}
        echo 'no memory' >"$logs/n1.failed"
        start_again
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    message = "next time without n1" if works else "n1 is not left out: scontrol update failed"
    assert message in done.stdout
