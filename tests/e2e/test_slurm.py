"""Jobs on a real SLURM of two nodes."""

from __future__ import annotations

from tests.e2e.processes import lives
from tests.slurm_cluster import NODES, SlurmCluster, slurm_cluster


def test_a_task_runs_on_each_node(slurm: SlurmCluster):
    done = slurm.run("srun", "-N2", "sh", "-c", "echo $SLURMD_NODENAME")
    assert sorted(done.stdout.split()) == [*NODES], done.stderr


def test_a_job_goes_on_after_its_node_was_lost_and_nothing_of_the_cluster_is_left(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\necho $SLURM_RESTART_COUNT >>$1\nsleep 1000\n")
    with slurm_cluster() as cluster:
        out, told = str(tmp_path / "log"), tmp_path / "told"
        number = cluster.submit("-N1", "-w", "n2", "-o", out, "--requeue", str(script), str(told))
        cluster.wait_until(told.exists, "the job runs")
        cluster.kill_node("n2")
        assert cluster.processes("n2") == set()
        cluster.wait_for_state(number, "PENDING")
        cluster.start_node("n2")
        cluster.wait_until(lambda: told.read_text().split() == ["1"], "it runs again", 120)
        assert cluster.job(number)["Restarts"] == "1"
        processes, folder = cluster.processes(), cluster.folder
    assert len(processes) > 4
    assert not any(map(lives, processes))
    assert not folder.exists()
