"""Launchers are told apart by what they were seen to set; the environments are recorded ones, cut down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pyddl.run.launcher import Launcher, detect, expected_tasks

ROOT = Path(__file__).resolve().parents[2]
HYDRA = {"PMI_HOSTNAME": "n1", "PMI_FD": "9", "PMI_RANK": "2", "PMI_SIZE": "5"}
OPENMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PRTE_LAUNCHED": "1"}
ULFM = {**OPENMPI, "OMPI_MCA_mpi_ft_enable": "1"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}
GUARDED = {"PYDDL_GUARD": "123"}


def test_detect_without_launcher_names_none():
    assert detect({"HOME": "/"}, ()) == Launcher("none")


def test_detect_hydra_with_guard_survives():
    found = detect({**HYDRA, **GUARDED}, ("hydra_pmi_proxy --control-port x", "mpiexec -n 5 pyddl guard x"))
    assert found == Launcher("mpich", 5, 2, guarded=True, survives=True)


def test_detect_hydra_without_guard_advises_it():
    found = detect(HYDRA, ())
    assert found.survives is False
    assert not found.guarded
    assert "mpiexec -n N pyddl guard python" in found.advice


@pytest.mark.parametrize(
    ("environ", "ancestors", "word"),
    [
        (HYDRA, ("hydra_pmi_proxy", "mpiexec -disable-auto-cleanup -n 5 x"), "-disable-auto-cleanup"),
        ({**HYDRA, "MPIR_CVAR_CH4_NETMOD": "ofi"}, (), "FI_PROVIDER=tcp"),
        ({**HYDRA, "MPIR_CVAR_PMI_VERSION": "2"}, (), "MPIR_CVAR_PMI_VERSION"),
        ({k: v for k, v in HYDRA.items() if k != "PMI_FD"}, (), "-pmi-port"),
    ],
)
def test_detect_guarded_hydra_with_a_setting_that_breaks_the_guard_does_not_survive(environ, ancestors, word):
    found = detect({**environ, **GUARDED}, ancestors)
    assert found.survives is False
    assert word in found.advice


def test_detect_openmpi_survives_with_ulfm_and_guard_only():
    above = ("prterun --with-ft ulfm -n 4 pyddl guard x",)
    both = detect({**ULFM, **GUARDED}, above)
    assert both == Launcher("openmpi", 4, 1, guarded=True, ulfm=True, survives=True)
    unguarded = detect(ULFM, above)
    assert (unguarded.ulfm, unguarded.survives) == (True, False)
    assert "pyddl guard" in unguarded.advice
    plain = detect({**OPENMPI, **GUARDED}, ())
    assert (plain.ulfm, plain.survives) == (False, False)
    assert "--with-ft ulfm" in plain.advice


def test_detect_openmpi_with_ulfm_by_variable_alone_does_not_survive():
    found = detect({**ULFM, **GUARDED}, ("/opt/openmpi/bin/prterun -n 4 pyddl guard x",))
    assert (found.ulfm, found.survives) == (False, False)


def test_detect_slurm_step_does_not_claim_to_survive():
    found = detect(STEP, ())
    assert (found.name, found.num_tasks, found.rank, found.survives) == ("slurm", 8, 3, None)
    assert "--kill-on-bad-exit=0" in found.advice


@pytest.mark.parametrize(
    ("variable", "option"), [("SLURM_KILL_BAD_EXIT", "--kill-on-bad-exit=0"), ("SLURM_WAIT", "--wait=0")]
)
def test_detect_slurm_with_a_variable_that_ends_the_others_does_not_survive(variable, option):
    found = detect({**STEP, variable: "1"}, ())
    assert found.survives is False
    assert option in found.advice


def test_detect_hydra_inside_a_slurm_step_names_hydra():
    assert detect({**STEP, **HYDRA}, ()).name == "mpich"
    assert detect({**STEP, **ULFM}, ()).name == "openmpi"


def test_detect_pmi_without_hydra_is_not_known_to_survive():
    found = detect({"PMI_SIZE": "2", "PMI_RANK": "1"}, ())
    assert (found.name, found.num_tasks, found.rank, found.survives) == ("mpich", 2, 1, None)
    assert found.advice


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, None),
        (HYDRA, 5),
        (OPENMPI, 4),
        (STEP, 8),
        ({**STEP, "SLURM_STEP_NUM_TASKS": "1"}, 1),  # an interactive step inside an allocation of 8
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None),  # a batch script, outside of any step
        ({**HYDRA, "PMI_SIZE": "many"}, None),
    ],
)
def test_expected_tasks_is_what_the_launcher_says(environ, count):
    assert expected_tasks(environ) == count


def test_detect_reads_the_command_lines_above_this_process():
    inner = "from pyddl.run.launcher import detect; print(detect().advice)"
    words = ["-disable-auto-cleanup", sys.executable, "-c", inner]
    middle = "import subprocess, sys; subprocess.run(sys.argv[2:], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", middle, *words],
        env={**HYDRA, **GUARDED, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=20,
    )
    assert "-disable-auto-cleanup" in done.stdout
