"""Training in other processes and on a cluster: the same models, whatever is killed."""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from distributed import LocalCluster

from models.training import grid as training
from models.training import sweep
from tests.models.training.runs import quietly, same_weights, step_of, tiny


def test_local_processes_give_the_same_models(tmp_path):
    config = tiny(prompts=(*tiny().prompts, tiny().prompts[0].model_copy(update={"noise_std": 1})))
    assert same_weights(quietly(config, tmp_path, n_jobs=2), quietly(config))


def test_a_run_goes_on_where_it_is_when_it_is_split(tmp_path, monkeypatch):
    config, reference = tiny(), quietly(tiny())

    class Stop(Exception):
        pass

    def stop(*_):
        if step_of(tmp_path) == 40:
            raise Stop

    here = sweep.train_unit
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "train_unit", lambda *args: here(*args[:-1], stop))
        with pytest.raises(Stop):
            quietly(config, tmp_path, save_steps=20)

    steps = []
    members = training._members(config, training.default_name)
    for seed in config.seeds:  # units as they are made for workers
        unit = [member for member in members if member.seed == seed]
        sweep.train_unit(
            config, unit, tmp_path, 60, 10**6, lambda state, _: steps.append(state.step)
        )
    assert sorted(steps) == sorted([*range(41, 61)] * 2)
    assert same_weights(quietly(config, tmp_path), reference)


def test_models_that_stopped_at_different_steps_are_not_mixed(tmp_path):
    config, reference = tiny(), quietly(tiny())
    members = training._members(config, training.default_name)
    names = [member.name for member in members]
    with training.RunFolder.hold(tmp_path, config.model_dump(mode="json"), names, dict):
        first = [member for member in members if member.seed == 0]
        sweep.train_unit(config, first, tmp_path, 60, 10**6)
    assert same_weights(quietly(config, tmp_path), reference)


def test_a_worker_killed_midway_loses_nothing(tmp_path):
    config = tiny(steps=3000, seeds=(0, 1, 2))
    reference = quietly(config)
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        victim = cluster.workers[0].pid

        def kill_after_progress():
            while step_of(tmp_path) < 100:
                time.sleep(0.01)
            os.kill(victim, signal.SIGKILL)

        with ThreadPoolExecutor(1) as pool:
            killed = pool.submit(kill_after_progress)
            result = quietly(config, tmp_path, scheduler=cluster.scheduler_address, save_steps=50)
            killed.result()
        restarted = cluster.workers[0].pid
    assert restarted != victim
    assert same_weights(result, reference)
    assert not (tmp_path / ".state").exists()


def test_trouble_with_dask_is_explained(monkeypatch):
    monkeypatch.setattr(sweep, "_CONNECT_SECONDS", 0.5)
    with pytest.raises(training.TrainingError, match=r"no Dask scheduler answers at tcp://127"):
        quietly(tiny(), scheduler="tcp://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(training.TrainingError, match=r"which-algorithm\[cluster\]"):
        quietly(tiny(), scheduler="tcp://127.0.0.1:1")
